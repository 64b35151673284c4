"""Adapter sync: how a new version of the adapter comes to be what every replica samples from.

Only the adapter travels. Whether a replica folds it into its weights or serves it unmerged is the replica's work
(`rollout.sync`); for the trainer both are the same four requests: stage on all, activate on all, score the canary,
discard the version before. A version is served by every replica or by none: whatever fails, all go back to the version
before and the run ends with the replica's name.

vLLM's prefix cache knows an adapter by name, so versions of a resumed run must not share names with the first ones:
each trainer process has a session of its own.
"""

import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from recipes.parts.adapter_file import WEIGHTS, AdapterFile
from recipes.parts.canary import CanaryResult, compare, write_canary
from recipes.parts.config import Config
from recipes.parts.errors import CheckFailed
from recipes.parts.replica import Replica, ReplicaError
from recipes.parts.rundir import RunDir

# Scores of the policy and of the base on the canary's sequences; called while the replicas work.
Scores = tuple[list[list[int]], list[np.ndarray], list[np.ndarray]]


class AdapterSync:
    """Publishes adapter versions to all replicas, or to none.

    After `publish`, `seconds` holds its wall-clock parts (write, stage, activate, canary) and `canary` the result of
    each replica by URL; `served` is the version that all replicas sample from.
    """

    def __init__(self, replicas: list[Replica], config: Config, run: RunDir):
        self.replicas, self.config, self.run = replicas, config, run
        self.session = secrets.token_hex(4)
        self.folder = run.path / "sync" / self.session
        self.served: int | None = None
        self.seconds: dict[str, float] = {}
        self.canary: dict[str, CanaryResult] = {}
        self._background = ThreadPoolExecutor(1)
        self._cleanup: Future | None = None

    def publish(self, version: int, adapter: AdapterFile, score: Callable[[], Scores] | None) -> None:
        """Make all replicas serve this version; `CheckFailed`, naming the replica, when one cannot.

        `score` is run in this thread while the replicas load and switch; None leaves the canary out.
        """
        self.seconds, self.canary = {}, {}
        self.settle()
        started = time.perf_counter()
        directory = adapter.write(self.folder / f"v{version:06d}", version)
        self.seconds["write"] = time.perf_counter() - started
        with ThreadPoolExecutor(1) as pool:
            swap: Future = pool.submit(self._swap, version, directory, adapter.base_hash)
            scores = error = None
            try:
                scores = score() if score else None
            except Exception as found:
                error = found
            swap.result()
        started = time.perf_counter()
        if error is not None:
            self._roll_back(version)
            raise error
        if scores is not None:
            self._check_canary(version, *scores)
        self.seconds["canary"] = time.perf_counter() - started
        previous, self.served = self.served, version
        # Nothing waits for it: the first completions of the new version need not.
        self._cleanup = self._background.submit(self._forget, previous, directory)

    def _swap(self, version: int, directory: Path, base_hash: str) -> None:
        """Stage everywhere, then activate everywhere; after a failure everything is as before."""
        rollout = self.config.rollout
        what = {"way": rollout.sync, "run": self.config.run.name, "session": self.session, "version": version}
        what |= {"base_hash": base_hash}
        what |= {"body": (directory / WEIGHTS).read_bytes()} if rollout.transport == "body" else {"path": directory}
        started = time.perf_counter()
        failed = self._each(lambda replica: replica.stage(**what))[1]
        self.seconds["stage"] = time.perf_counter() - started
        if failed:
            self._each(lambda replica: replica.discard(self.session, version))
            raise CheckFailed(
                f"{_names(failed)} did not load adapter version {version}: {_reasons(failed)}. All replicas stay on "
                f"{self._before()}.{_path_hint(rollout.transport, failed)} {restart_hint(self.run, failed)}"
            )
        started = time.perf_counter()
        failed = self._each(lambda replica: replica.activate(self.session, version))[1]
        self.seconds["activate"] = time.perf_counter() - started
        if failed:
            left = self._roll_back(version)
            raise CheckFailed(
                f"{_names(failed)} did not switch to adapter version {version}: {_reasons(failed)}. "
                f"{self._after_roll_back(left)} {restart_hint(self.run, failed)}"
            )

    def _check_canary(
        self, version: int, sequences: list[list[int]], policy: list[np.ndarray], base: list[np.ndarray]
    ) -> None:
        """Compare every replica's scores with the trainer's; `CheckFailed` after the roll back when one is off."""
        scored, failed = self._each(lambda replica: replica.score(sequences, self.session, version))
        self.canary = {url: compare(scores, policy, base) for url, scores in scored.items()}
        limit = self.config.rollout.max_canary_delta
        problems = {
            url: f"the canary of {url} failed: {problem}"
            for url, result in self.canary.items()
            if (problem := result.problem(limit))
        }
        for url, error in failed.items():
            problems[url] = f"the replica at {url} did not score the canary: {error.text}"
        if problems:
            left = self._roll_back(version)
            raise CheckFailed(
                f"adapter version {version}: {'; '.join(problems.values())}. {self._after_roll_back(left)} "
                f"{restart_hint(self.run, problems)} If it happens again, write its base again (python -m merge base)."
            )
        facts: dict[str, Any] = {"session": self.session, "version": version, "way": self.config.rollout.sync}
        write_canary(self.folder / "canary.json", **facts, sequences=sequences, policy=policy, base=base)

    def _roll_back(self, version: int) -> dict[str, ReplicaError]:
        """Serve the version before again everywhere and forget this one; the replicas that did not go back."""
        if self.served is None:
            return {}
        served = self.served
        left = self._each(lambda replica: replica.activate(self.session, served))[1]
        self._each(lambda replica: replica.discard(self.session, version))
        return left

    def _each(self, call: Callable[[Replica], Any]) -> tuple[dict[str, Any], dict[str, ReplicaError]]:
        """The answers by URL and the failures by URL, of all replicas at once."""
        answers: dict[str, Any] = {}
        failed: dict[str, ReplicaError] = {}
        with ThreadPoolExecutor(len(self.replicas)) as pool:
            futures = {replica.url: pool.submit(call, replica) for replica in self.replicas}
            for url, future in futures.items():
                try:
                    answers[url] = future.result()
                except ReplicaError as error:
                    failed[url] = error
        return answers, failed

    def _before(self) -> str:
        return "what they served before this run" if self.served is None else f"version {self.served}"

    def _after_roll_back(self, left: dict[str, ReplicaError]) -> str:
        if self.served is None:
            return "No version was served before it."
        if left:
            return f"The others serve version {self.served} again; {_names(left)} did not go back to it."
        return f"All replicas serve version {self.served} again."

    def settle(self) -> None:
        """Wait until the version before is gone from every replica and from the disk."""
        if self._cleanup is not None:
            self._cleanup.result()

    def _forget(self, previous: int | None, directory: Path) -> None:
        if previous is not None:
            # A slot that stays taken is not worth the run.
            self._each(lambda replica: replica.discard(self.session, previous))
        self._remove_all_but(directory)

    def _remove_all_but(self, directory: Path) -> None:
        """Delete older versions, and what earlier processes of this run left."""
        for entry in [*self.folder.glob("v[0-9]*"), *self.folder.parent.glob("*")]:
            if entry not in (directory, self.folder):
                shutil.rmtree(entry, ignore_errors=True)


def restart_hint(run: RunDir, urls: Iterable[str]) -> str:
    """What to do about replicas that failed, with the logs that `launch.server` writes when it ran on this machine."""
    ports = [re.search(r":(\d+)", url.partition("://")[2]) for url in urls]
    logs = [run.logs / f"server-{port.group(1)}.log" for port in ports if port]
    found = ", ".join(str(log) for log in logs if log.is_file())
    start = "python -m launch.server --config ..."
    return f"Restart it ({start}{f'; its log: {found}' if found else ''}), then continue with --resume."


def _names(failed: dict[str, ReplicaError]) -> str:
    return f"the replica{'s' * (len(failed) > 1)} at {', '.join(failed)}"


def _reasons(failed: dict[str, ReplicaError]) -> str:
    reasons = {f"{error.status or ''} {error.text}".strip().rstrip(".") for error in failed.values()}
    return "; ".join(sorted(reasons))


def _path_hint(transport: str, failed: dict[str, ReplicaError]) -> str:
    if transport == "path" and any(error.status is not None for error in failed.values()):
        return " A replica that cannot read the run directory needs rollout.transport body."
    return ""
