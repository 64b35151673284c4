"""Stream requests of exact lengths to a vLLM server in a closed loop and time each of them.

`vllm bench serve` (read in 0.31) sends its random prompts as text, which the server tokenizes again, so their length
differs between models, and it imports vLLM again for every concurrency. Here prompts are token ids.
"""

import asyncio
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kit.core.errors import BadInput, CheckFailed
from kit.core.file_kinds import MODEL_CONFIG, TOKENIZER
from kit.core.run_files import is_there, read_object

if TYPE_CHECKING:
    import aiohttp

POLL_S = 0.5  # between two checks that the server is alive
SILENT_S = 600.0  # a stream without a token for this long has failed


@dataclass(frozen=True)
class Timing:
    """Seconds from sending one request to its first and to its last token, and the chunks it came in."""

    first_s: float
    last_s: float
    chunks: int


def vocabulary(checkpoints: Sequence[Path]) -> list[int]:
    """Token ids that every checkpoint's model knows, without the special tokens of its tokenizer."""
    size, special = None, set()
    for checkpoint in checkpoints:
        config = read_object(checkpoint / "config.json", MODEL_CONFIG)
        known = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
        tokenizer = checkpoint / "tokenizer.json"
        if type(known) is not int:
            raise BadInput(f"{checkpoint / 'config.json'} has no vocab_size. {MODEL_CONFIG.fix}")
        if is_there(tokenizer):
            facts = read_object(tokenizer, TOKENIZER)
            special |= {token["id"] for token in facts.get("added_tokens", [])}
            # Ids above the tokenizer's only pad the embedding.
            pieces = facts.get("model", {}).get("vocab")
            known = min(known, len(pieces) + len(facts.get("added_tokens", []))) if pieces else known
        size = known if size is None else min(size, known)
    return [token for token in range(size or 0) if token not in special]


def make_prompts(ids: Sequence[int], count: int, length: int, seed: Sequence[int]) -> list[list[int]]:
    """`count` prompts of `length` random token ids; the same for the same `seed`, all different from each other."""
    rng = np.random.default_rng(list(seed))
    return np.asarray(ids)[rng.integers(0, len(ids), (count, length))].tolist()


def closed_loop(
    url: str,
    prompts: Sequence[list[int]],
    new_tokens: int,
    concurrency: int,
    check_alive: Callable[[], None],
) -> tuple[list[Timing], float]:
    """Return (timing of every request, seconds from the first request sent to the last token).

    `concurrency` requests are in flight until the prompts run out. `check_alive` is called twice a second; what it
    raises ends the run. `CheckFailed` if a request fails or returns another length than requested.
    """
    return asyncio.run(_closed_loop(url, iter(prompts), new_tokens, concurrency, check_alive))


async def _closed_loop(
    url: str, prompts: Iterator[list[int]], new_tokens: int, concurrency: int, check_alive: Callable[[], None]
) -> tuple[list[Timing], float]:
    import aiohttp

    key = os.environ.get("VLLM_API_KEY")
    timings: list[Timing] = []
    sent_at, ended_at = [], []
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        headers={"Authorization": f"Bearer {key}"} if key else None,
        timeout=aiohttp.ClientTimeout(total=None, sock_read=SILENT_S),
    ) as session:

        async def ask_in_turn() -> None:
            for prompt in prompts:  # the iterator is shared: each request is sent once
                sent_at.append(time.perf_counter())
                timings.append(await _ask(session, url, prompt, new_tokens))
                ended_at.append(time.perf_counter())

        async def watch() -> None:
            while True:
                check_alive()
                await asyncio.sleep(POLL_S)

        work = asyncio.gather(*(ask_in_turn() for _ in range(concurrency)))
        guard = asyncio.create_task(watch())
        try:
            futures: set[asyncio.Future] = {work, guard}
            await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
            if guard.done():
                guard.result()
            try:
                await work
            except aiohttp.ClientError as error:
                check_alive()  # the error of a dead server says more than its broken connections
                raise CheckFailed(f"a request failed: {type(error).__name__}: {error}") from None
            return timings, max(ended_at) - min(sent_at)
        finally:
            work.cancel()
            guard.cancel()
            await asyncio.gather(work, guard, return_exceptions=True)


async def _ask(session: "aiohttp.ClientSession", url: str, prompt: list[int], new_tokens: int) -> Timing:
    body = {
        "model": "model",
        "prompt": prompt,
        "max_tokens": new_tokens,
        "min_tokens": new_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    first = last = usage = None
    chunks = 0
    sent = time.perf_counter()
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        if answer.status != 200:
            raise CheckFailed(f"the server answers {answer.status}: {(await answer.text())[:500]}")
        async for line in answer.content:
            if not line.startswith(b"data:"):
                continue
            # Only the last lines are parsed: with hundreds of streams, the client must not become the bottleneck.
            if b'"choices":[]' in line or b'"choices": []' in line:
                usage = json.loads(line[5:]).get("usage")
            elif line.startswith((b'data: {"error"', b'data:{"error"')):
                raise CheckFailed(f"the server ends a stream: {line[5:500].decode(errors='replace').strip()}")
            elif b"[DONE]" not in line[:16]:
                last = time.perf_counter()
                first = first or last
                chunks += 1
    made, read = (usage or {}).get("completion_tokens"), (usage or {}).get("prompt_tokens")
    if first is None or last is None or (made, read) != (new_tokens, len(prompt)):
        raise CheckFailed(f"a request of {len(prompt)} prompt and {new_tokens} new tokens returned {read} and {made}.")
    return Timing(first - sent, last - sent, chunks)


def summarize(timings: Sequence[Timing], seconds: float, concurrency: int, new_tokens: int) -> dict:
    """Figures of one concurrency: overall output tokens per second, and percentiles over the requests in seconds.

    `itl_p50_s` is the median over requests of (last token - first token) / (new tokens - 1): a chunk of a stream can
    hold several tokens, so gaps between chunks would not be times between tokens. None for a single token.
    `tokens_per_chunk` is 1 if the server sent every token before it had the next.
    """
    firsts = np.array([timing.first_s for timing in timings])
    lasts = np.array([timing.last_s for timing in timings])
    between = np.median((lasts - firsts) / (new_tokens - 1)) if new_tokens > 1 else None
    return {
        "batch": concurrency,
        "requests": len(timings),
        "tokens_per_s": round(len(timings) * new_tokens / seconds, 2),
        "ttft_p50_s": _percentile(firsts, 50),
        "ttft_p95_s": _percentile(firsts, 95),
        "latency_p50_s": _percentile(lasts, 50),
        "latency_p95_s": _percentile(lasts, 95),
        "itl_p50_s": None if between is None else round(float(between), 6),
        "tokens_per_chunk": round(len(timings) * new_tokens / sum(timing.chunks for timing in timings), 2),
    }


def _percentile(values: np.ndarray, percent: float) -> float:
    return round(float(np.percentile(values, percent)), 6)
