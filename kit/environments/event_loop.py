"""An event loop in a thread of its own, which lives as long as the process.

Episodes run on one, and so do libraries whose connections belong to the loop that opened them: episodes start in
threads that have none.
"""

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class EventLoop:
    """A loop that runs in a daemon thread until the process ends."""

    def __init__(self, name: str):
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name=name, daemon=True).start()

    def start(self, work: Coroutine[Any, Any, T]) -> "concurrent.futures.Future[T]":
        """Run `work` without waiting for it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def wait(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run `work` and block this thread until it is done; `TimeoutError` cancels it."""
        future = self.start(work)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            future.cancel()
            raise

    async def join(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` and await it from another loop; cancelling the caller cancels it."""
        return await asyncio.wrap_future(self.start(work))
