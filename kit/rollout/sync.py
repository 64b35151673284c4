"""Adapter sync: make every replica sample from a new version of the policy's adapter.

Only the adapter is sent. Whether a replica folds it into its weights or serves it unmerged is up to the replica
(`rollout.sync`); for the trainer both are the same four requests: stage on all, activate on all, score the canary,
discard the previous version. Nothing is sampled from a version that not every replica serves: on any failure, all
replicas that answer roll back to the previous version, and the run ends with an error that names the replica, unless
a `Recovery` brings it back (`launch.up --restarts`). The first version of a session has no previous one; the message
then says what each replica serves.

vLLM's prefix cache identifies an adapter by name, so versions of a resumed run must not share names with earlier ones:
each trainer process has its own session.
"""

import itertools
import secrets
import shutil
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kit.core.config.schema import Config
from kit.core.errors import CheckFailed, KitError
from kit.core.run_directory import RunDir
from kit.rollout.adapter_file import AdapterFile, WrittenAdapter
from kit.rollout.canary import CanaryResult, compare, write_canary
from kit.rollout.canary_scores import CanaryScorer, Scores
from kit.rollout.noise import Noise, facts, noise_of
from kit.rollout.policy_view import PolicyView
from kit.rollout.protocol import WEIGHTS
from kit.rollout.recovery import Recovery, ReplicasFailed
from kit.rollout.replica import CONTINUE, Replica, ReplicaError, ask_all, log_name

STATE_TIMEOUT_S = 5.0  # for asking a replica what it serves, after a failure
START = "python -m launch.server --config ..."
_LOST = "did not answer, so what it serves is not known"


@dataclass(frozen=True)
class Published:
    """What every replica serves, as it was sent, and the canary's scores of it by the trainer."""

    version: int
    stage: dict[str, Any]  # arguments of `Replica.stage`
    scores: Scores | None
    noise: Noise | None


class AdapterSync:
    """Publish adapter versions to all replicas; on failure, roll those that answer back to the previous version.

    After `publish`, `seconds` holds its wall-clock parts (write, stage, activate, canary, and noise if any) and
    `canary` the result of each replica by URL; `served` is the version that all replicas sample from. `scorer` has the
    sequences of the canary, `recovery` brings failed replicas back.
    """

    recovery: Recovery | None = None

    def __init__(self, replicas: list[Replica], config: Config, run: RunDir):
        self.replicas, self.config, self.run = replicas, config, run
        rollout = config.rollout
        longest = rollout.max_prompt_length + rollout.max_completion_length
        self.scorer = CanaryScorer(rollout.canary_prompts, longest)
        self._prepared: tuple[AdapterFile | None, Scores | None] | None = None
        self._begin_session()
        self.served: int | None = None
        self._published: Published | None = None
        self.seconds: dict[str, float] = {}
        self.canary: dict[str, CanaryResult] = {}
        self._background = ThreadPoolExecutor(1)
        self._cleanup: Future | None = None
        self._kept: set[tuple[str, int]] = set()  # (URL, version) that could not be discarded

    def _begin_session(self) -> None:
        self.session = secrets.token_hex(4)
        self.folder = self.run.path / "sync" / self.session

    def prepare(self, policy: PolicyView) -> None:
        """For a split base, collect everything that `update` needs of the policy, in all processes together and before
        any request: a forward or gather that one process skips would block the others forever."""
        self._prepared = policy.adapter(), self.scorer.scores(policy)

    def update(self, policy: PolicyView) -> dict[str, Any]:
        """Make all replicas serve the policy's version, unless they do; return the figures of the sync."""
        if policy.version == self.served:
            return {}
        adapter, scores = self._prepared or (policy.adapter(), None)
        score = (lambda: scores) if self._prepared else (lambda: self.scorer.scores(policy))
        self._prepared = None  # it holds the gathered tensors
        return self._update(policy.version, adapter, score)

    def begin(self, policy: PolicyView) -> tuple[Callable[[], dict[str, Any]], Callable[[], bool]]:
        """Write the policy's adapter, and return the rest of `update` and a function that scores the canary.

        Any thread may run the rest, once; it waits for the scores and raises their error. The function is for the
        caller's thread, which has the model, while the replicas load and switch; False if it failed.
        """
        version, scores = policy.version, Future[Scores | None]()
        if version == self.served:
            return dict, lambda: True
        prepared, self._prepared = self._prepared, None
        adapter = prepared[0] if prepared else policy.adapter()
        self.settle()  # its end deletes what the replicas do not serve
        started = time.perf_counter()
        written = WrittenAdapter(adapter.write(self._directory(version), version), adapter.base_hash)
        begun = {"write": time.perf_counter() - started}

        def score() -> bool:
            started = time.perf_counter()
            try:
                found = prepared[1] if prepared else self.scorer.scores(policy)
            except BaseException as error:  # whoever waits for the scores must hear of it
                scores.set_exception(error)
                if isinstance(error, Exception):
                    return False
                raise
            begun["score"] = time.perf_counter() - started
            scores.set_result(found)
            return True

        return lambda: self._update(version, written, scores.result, begun), score

    def _directory(self, version: int) -> Path:
        return self.folder / f"v{version:06d}"

    def _update(
        self,
        version: int,
        adapter: AdapterFile | WrittenAdapter,
        score: Callable[[], Scores | None],
        begun: dict[str, float] | None = None,
    ) -> dict[str, Any]:
        """Make all replicas serve this version; return its figures. `begun`: seconds of what `begin` did."""
        noise = noise_of(self.config, version)
        self._publish_to_all(version, adapter, score if self.scorer.sequences else None, noise)
        seconds = self.seconds | (begun or {})
        figures = facts(noise) | {"sync_seconds": {part: round(value, 4) for part, value in seconds.items()}}
        if results := self.canary.values():
            figures["canary_delta"] = max(result.mean for result in results)
            figures["canary_k3"] = max(result.k3 for result in results)
        return figures

    def _publish_to_all(self, version: int, *what: Any) -> None:
        """`publish`, again whenever `recovery` has brought the replicas back that failed."""
        for attempt in itertools.count():
            if self.recovery is not None:
                self.recovery.settle()
            try:
                self.publish(version, *what)
                return
            except ReplicasFailed as failed:
                if self.recovery is None:
                    raise
                self.recovery.bring_back(failed, is_final=attempt > 0)
                if self.served is None:  # some may serve this version already, under a name that is taken now
                    self._begin_session()
                else:
                    self._undo(version)

    def _undo(self, version: int) -> None:
        """Make all replicas serve the version before again, without `version`: a request whose answer was lost may
        have been carried out. One that does not confirm it is started again."""

        def undo(replica: Replica) -> None:
            replica.activate(self.session, self.served)
            replica.discard(self.session, version)

        while failed := ask_all(self.replicas, undo, probe="activate")[1]:
            reasons, hint = _reasons(failed), restart_hint(self.run, failed)
            text = f"{_names(failed)} did not go back to adapter version {self.served}: {reasons}. {hint}"
            self.recovery.bring_back(ReplicasFailed(text, failed), is_final=True)

    def restore(self, replica: Replica) -> None:
        """Make a replica that was started again serve what the others do; `ReplicaError` if it cannot, or if its
        canary is off."""
        if (published := self._published) is None:
            return
        version = published.version
        replica.stage(**published.stage, is_first=True)
        replica.activate(self.session, version)
        if published.scores is not None:
            sequences, policy, base = published.scores
            result = compare(replica.score(sequences, self.session, version), policy, base)
            if problem := result.problem(self.config.rollout.max_canary_delta):
                raise ReplicaError(replica.url, "canary", problem, retry=False)
        if published.noise is not None and published.noise.sigma:
            replica.noise(self.session, version, published.noise.sigma, published.noise.seed)

    def publish(
        self,
        version: int,
        adapter: AdapterFile | WrittenAdapter,
        score: Callable[[], Scores | None] | None,
        noise: Noise | None = None,
    ) -> None:
        """Make all replicas serve this version; `CheckFailed`, naming the replica, if one cannot.

        `score` runs in this thread while the replicas load and switch; None skips the canary. `noise` is added to
        their norms after the canary, which compares without it.
        """
        self.seconds, self.canary = {}, {}
        self.settle()
        self._discard_again()
        started = time.perf_counter()
        directory = adapter.write(self._directory(version), version)
        self.seconds["write"] = time.perf_counter() - started
        with ThreadPoolExecutor(1) as pool:
            what = self._stage_arguments(version, directory, adapter.base_hash)
            swap: Future = pool.submit(self._swap, version, what)
            scores = error = None
            try:
                scores = score() if score else None
            except Exception as found:
                error = found
            swap.result()
        started = time.perf_counter()
        if error is not None:
            serving = self._roll_back(version, {})
            raise CheckFailed(f"{error} {serving}") if isinstance(error, KitError) else error
        if scores is not None:
            self._check_canary(version, *scores)
        self.seconds["canary"] = time.perf_counter() - started
        if noise is not None and noise.sigma:
            self._make_noisy(version, noise)
        self._published = Published(version, what, scores and Scores(*scores), noise)
        previous, self.served = self.served, version
        # In the background: the first completions of the new version need not wait for it.
        self._cleanup = self._background.submit(self._forget, previous, directory)

    def _stage_arguments(self, version: int, directory: Path, base_hash: str) -> dict[str, Any]:
        rollout = self.config.rollout
        named: dict[str, Any] = {"way": rollout.sync, "run": self.config.run.name, "session": self.session}
        named |= {"version": version, "base_hash": base_hash}
        is_sent = rollout.transport == "body"
        return named | ({"body": (directory / WEIGHTS).read_bytes()} if is_sent else {"path": directory})

    def _swap(self, version: int, what: dict[str, Any]) -> None:
        """Stage on all replicas, then activate on all. After a failure every replica that answers is as before, except
        that some may already serve a first version."""
        rollout, is_first = self.config.rollout, self.served is None
        started = time.perf_counter()
        # A server that is still reading its NF4 copy does not answer probes either.
        failed = ask_all(
            self.replicas, lambda one: one.stage(**what, is_first=is_first), probe=None if is_first else "stage"
        )[1]
        self.seconds["stage"] = time.perf_counter() - started
        if failed:
            self._discard(self._that_answer(failed), version)
            which = "All replicas" if len(self._that_answer(failed)) == len(self.replicas) else "Those that answer"
            stays = "No replica serves it." if is_first else f"{which} stay on version {self.served}."
            raise ReplicasFailed(
                f"{_names(failed)} did not load adapter version {version}: {_reasons(failed)}. {stays}"
                f"{_path_hint(rollout.transport, failed)} {restart_hint(self.run, failed)}",
                failed,
            )
        started = time.perf_counter()
        failed = ask_all(self.replicas, lambda one: one.activate(self.session, version), probe="activate")[1]
        self.seconds["activate"] = time.perf_counter() - started
        if failed:
            serving = self._roll_back(version, failed)
            raise ReplicasFailed(
                f"{_names(failed)} did not switch to adapter version {version}: {_reasons(failed)}. {serving} "
                f"{restart_hint(self.run, failed)}",
                failed,
            )

    def _check_canary(
        self, version: int, sequences: list[list[int]], policy: list[np.ndarray], base: list[np.ndarray]
    ) -> None:
        """Compare every replica's scores with the trainer's; if one is off, roll back and raise `CheckFailed`."""
        scored, failed = ask_all(self.replicas, lambda one: one.score(sequences, self.session, version), probe="score")
        self.canary = {url: compare(scores, policy, base) for url, scores in scored.items()}
        limit = self.config.rollout.max_canary_delta
        wrong = {
            url: ReplicaError(url, "canary", problem, retry=False)
            for url, result in self.canary.items()
            if (problem := result.problem(limit))
        }
        if wrong or failed:
            problems = [f"the canary of {url} failed: {error.text}" for url, error in wrong.items()]
            problems += [f"the replica at {url} did not score the canary: {one.text}" for url, one in failed.items()]
            serving, hint = self._roll_back(version, failed), restart_hint(self.run, wrong | failed)
            if wrong:
                hint += " If it happens again, write its base again (python -m merge base)."
            raise ReplicasFailed(f"adapter version {version}: {'; '.join(problems)}. {serving} {hint}", wrong | failed)
        facts: dict[str, Any] = {"session": self.session, "version": version, "way": self.config.rollout.sync}
        write_canary(self.folder / "canary.json", **facts, sequences=sequences, policy=policy, base=base)

    def _make_noisy(self, version: int, noise: Noise) -> None:
        """Add the same noise on all replicas; if one fails, roll back, which removes it, and raise `CheckFailed`."""
        started = time.perf_counter()
        ask = lambda one: one.noise(self.session, version, noise.sigma, noise.seed)  # noqa: E731
        failed = ask_all(self.replicas, ask, probe="noise")[1]
        self.seconds["noise"] = time.perf_counter() - started
        if failed:
            serving = self._roll_back(version, failed)
            raise ReplicasFailed(
                f"{_names(failed)} did not put noise on the norms of adapter version {version}: {_reasons(failed)}. "
                f"{serving} {restart_hint(self.run, failed)}",
                failed,
            )

    def _roll_back(self, version: int, failed: dict[str, ReplicaError]) -> str:
        """Roll all replicas that answer back to the previous version and discard this one; return a sentence on what
        is served.

        A replica that did not answer is skipped: waiting for it again would only delay the end of the run.
        """
        answering, served = self._that_answer(failed), self.served
        if served is None:
            return self._serving(version, answering)
        back, left = ask_all(answering, lambda one: one.activate(self.session, served), probe="activate")
        self._discard([replica for replica in answering if replica.url in back], version)
        lost = [replica.url for replica in self.replicas if replica.url not in back]
        if lost:
            reasons = [
                f"the replica at {url} {f'did not go back to it: {left[url].text}' if url in left else _LOST}"
                for url in lost
            ]
            others = "The others serve" if back else "None is known to serve"
            return f"{others} version {served} again; {'; '.join(reasons)}."
        return f"All replicas serve version {served} again."

    def _serving(self, version: int, answering: list[Replica]) -> str:
        """Describe what each replica serves after the first version failed; discard it where it was only staged."""
        infos = ask_all(answering, lambda one: one.info(timeout_s=STATE_TIMEOUT_S))[0]
        ours = {"session": self.session, "version": version}
        state, staged = [], []
        for replica in self.replicas:
            served = infos[replica.url]["served"] if replica.url in infos else None
            if replica.url not in infos:
                state.append(f"{replica.url} {_LOST}")
            elif served and {key: served[key] for key in ours} == ours:
                state.append(f"{replica.url} serves the refused version {version}")
            else:
                staged.append(replica)
                held = f"version {served['version']} of session {served['session']}" if served else "the base"
                state.append(f"{replica.url} serves {held}")
        self._discard(staged, version)
        return f"No version of this session was served before it: {', '.join(state)}."

    def _that_answer(self, failed: dict[str, ReplicaError]) -> list[Replica]:
        """Replicas, except those that failed by not answering."""
        return [one for one in self.replicas if one.url not in failed or failed[one.url].status is not None]

    def _discard(self, replicas: list[Replica], version: int) -> None:
        """Discard a version on these replicas; failures are printed and retried at the next sync."""
        for url, error in ask_all(replicas, lambda one: one.discard(self.session, version))[1].items():
            self._kept.add((url, version))
            print(
                f"{url} keeps adapter version {version} in its memory: {error.text}. The next sync asks it again.",
                flush=True,
            )

    def _discard_again(self) -> None:
        """Retry failed discards, so that adapters do not pile up on the GPU."""
        kept, self._kept = self._kept, set()
        for version in sorted({version for _, version in kept}):
            self._discard([one for one in self.replicas if (one.url, version) in kept], version)

    def settle(self) -> None:
        """Wait until the previous version is discarded on every replica and deleted from disk."""
        if self._cleanup is not None:
            self._cleanup.result()

    def _forget(self, previous: int | None, directory: Path) -> None:
        if previous is not None:
            # A slot that stays occupied is no reason to fail the run.
            self._discard(self.replicas, previous)
        self._remove_all_but(directory)

    def _remove_all_but(self, directory: Path) -> None:
        """Delete older versions, and leftovers of earlier processes of this run."""
        for entry in [*self.folder.glob("v[0-9]*"), *self.folder.parent.glob("*")]:
            if entry not in (directory, self.folder):
                shutil.rmtree(entry, ignore_errors=True)


def start_hint(run: RunDir, urls: Iterable[str]) -> str:
    """Command that starts replicas, and the logs that `launch.server` wrote if it ran on this machine."""
    logs = [run.logs / log_name(url) for url in urls]
    found = ", ".join(str(log) for log in logs if log.is_file())
    return f"{START}{f'; its log: {found}' if found else ''}"


def restart_hint(run: RunDir, failed: Iterable[str]) -> str:
    """Fix for failed replicas, given as URLs or {URL: error}. The error of one that works for another trainer already
    has its own."""
    errors = failed if isinstance(failed, dict) else {}
    urls = [url for url in failed if not getattr(errors.get(url), "is_conflict", False)]
    return f"Restart it ({start_hint(run, urls)}), then continue with --resume." if urls else CONTINUE


def _names(failed: dict[str, ReplicaError]) -> str:
    return f"the replica{'s' * (len(failed) > 1)} at {', '.join(failed)}"


def _reasons(failed: dict[str, ReplicaError]) -> str:
    reasons = {f"{error.status or ''} {error.text}".strip().rstrip(".") for error in failed.values()}
    return "; ".join(sorted(reasons))


def _path_hint(transport: str, failed: dict[str, ReplicaError]) -> str:
    if transport == "path" and any(error.status not in (None, 409) for error in failed.values()):
        return " A replica that cannot read the run directory needs rollout.transport body."
    return ""
