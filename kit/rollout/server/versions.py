"""Adapter versions of one rollout server: staged and served versions, and the transitions between them.

There are two ways. `adapter`: vLLM serves the adapter unmerged, under a name that no other version ever has.
`remerge`: the workers fold it into their weights. Staging, activating, discarding, sleeping and waking run under one
lock. After a failed change of the weights, either the previous version is still served or the server is marked as
damaged and refuses requests until it is restarted. With several workers nothing is rolled back: a failed rank may have
left the others waiting in a collective operation.
"""

import asyncio
import contextlib
import json
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kit.core.formats import FORMATS, packed_format
from kit.rollout.protocol import QUANT_CFG, WAYS, Way
from kit.rollout.server import speculation
from kit.rollout.server.adapter_check import Refused, Room, adapted_modules, check, checkpoint_shapes, read_adapter
from kit.rollout.server.base_copy import has_copy
from kit.rollout.server.packed_config import EXTENSION as PACKED
from kit.rollout.server.packed_layers import weights_of
from kit.rollout.server.private_files import PrivateFiles
from kit.rollout.server.vllm_types import Engine, LoRARequest, Models

REMERGE = "kit.rollout.server.remerge.Remerge"
QUANTIZED_INPUTS = (
    "kit.rollout.server.quantized_inputs.RemergeQuantizedInputs"  # also remerge, for formats with static activations
)
SHARE_BASE = "kit.rollout.server.share_base.ShareBase"
NF4_COPY = "GRPO_KIT_NF4_COPY"  # environment variable of the server: one of COPIES
COPIES = ("gpu", "host")
WORKER_S, SETUP_S = 120.0, 1800.0  # longest wait for the workers; setup reads the whole NF4 copy
ASLEEP_S = 1.0  # longest wait for an engine to say whether it is asleep: a busy one does not answer
logger = logging.getLogger("vllm.rollout")  # child of vLLM's logger, which has the handlers
Key = tuple[str, int]


class Failure(Exception):
    """Error that is returned as an HTTP status and a sentence."""

    def __init__(self, status: int, text: str):
        self.status, self.text = status, text
        super().__init__(text)


@dataclass
class Version:
    """One staged version; `lora` is vLLM's LoRARequest (adapter), `directory` is ours to remove."""

    way: Way
    run: str
    session: str
    version: int
    lora: LoRARequest | None = None
    directory: Path | None = None
    requests: set[asyncio.Future] = field(default_factory=set)  # in flight
    is_gone: bool = False

    @property
    def key(self) -> Key:
        return self.session, self.version

    @property
    def name(self) -> str:
        return f"{self.session}/{self.version}"


class Versions:
    """State of one server. `engine` is vLLM's engine client, `models` its OpenAIServingModels."""

    def __init__(self, engine: Engine, models: Models, base_dir: Path, base_hash: str | None, nf4_copy: str):
        self.engine, self.models = engine, models
        self.base_dir, self.base_hash, self.nf4_copy = base_dir, base_hash, nf4_copy
        self.staged: dict[Key, Version] = {}
        self.served: Version | None = None
        self.epoch = 0  # counts in-place changes of the weights: an answer that spans one belongs to no version
        self.damaged: str | None = None
        self.product: str | None = None  # of remerge's workers, once they are set up
        self.asleep = False
        self.files = PrivateFiles()
        self._shared: Path | None = None  # directory of the last description of the base's memory
        self._lock = asyncio.Lock()
        self._names: Counter[str] = Counter()
        self._folded = False  # whether the weights were ever anything but the base
        self.noise: dict[str, float] | None = None  # on the norms of the served version
        self.quant_cfg = (getattr(engine.vllm_config, "additional_config", None) or {}).get(QUANT_CFG)
        self._is_in_format = self.quant_cfg is None  # vLLM loads the base unquantized
        self._setup: asyncio.Task | None = None
        self.shapes = checkpoint_shapes(base_dir) if base_dir.is_dir() else {}

    # What the server can do ------------------------------------------------------------------------------------

    @property
    def extension(self) -> str:
        """The worker extension that remerge needs here."""
        if packed_format(weights_of(self.engine.vllm_config.model_config)):
            return PACKED
        fmt = FORMATS.get(self.quant_cfg)
        return QUANTIZED_INPUTS if fmt is not None and fmt.needs_calibration else REMERGE

    @property
    def max_lora_rank(self) -> int | None:
        lora = getattr(self.engine.vllm_config, "lora_config", None)
        return lora.max_lora_rank if lora else None

    async def ways(self) -> tuple[list[Way], dict[Way, str], list[str] | None]:
        """Return (ways that work, {way: why it does not}, layers that an adapter may target in all of them, None if
        unknown); set up remerge if needed."""
        ways, refused, modules = [], {}, adapted_modules(self.shapes) or None
        for way in WAYS:
            try:
                room = await self._room(way)
            except Failure as failed:
                refused[way] = failed.text
                continue
            ways.append(way)
            modules = room.modules if modules is None else modules & (room.modules or modules)
        return ways, refused, None if modules is None else sorted(modules)

    async def _room(self, way: Way) -> Room:
        """Limits on an adapter to be served this way; `Failure` says why none can be."""
        if why := speculation.fault(self.engine.vllm_config):
            raise Failure(400, why)
        if way == "remerge":
            return Room(frozenset(await self._remerge_modules()), self.shapes, None, takes_patterns=True)
        if self.quant_cfg is not None:
            raise Failure(400, f"it computes in {self.quant_cfg}, an unmerged adapter would not be quantized with it")
        if self.max_lora_rank is None:
            raise Failure(400, "the server was started without --enable-lora and --max-lora-rank")
        # vLLM computes the LoRA of these layers only and silently ignores an adapter's others.
        targets = self.engine.vllm_config.lora_config.target_modules
        modules = [name for name in self.shapes if targets is None or name.rpartition(".")[2] in targets]
        return Room(frozenset(modules) if self.shapes else None, self.shapes, self.max_lora_rank, takes_patterns=False)

    async def _remerge_modules(self) -> list[str]:
        """Layers that the workers can recompute; `Failure` says why they cannot."""
        if getattr(self.engine.vllm_config.parallel_config, "worker_extension_cls", "") != self.extension:
            raise Failure(400, f"the server was started without --worker-extension-cls {self.extension}")
        if not has_copy(self.base_dir):
            raise Failure(
                400, f"{self.base_dir} has no NF4 copy (nf4/index.json). Write it again with python -m merge base"
            )
        if self._setup is None:
            self._setup = asyncio.ensure_future(self._set_up_remerge())
        # One setup for all callers; a client that disconnects must not cancel it.
        return await asyncio.shield(self._setup)

    async def _set_up_remerge(self) -> list[str]:
        try:
            described = await self._workers("remerge_describe")
            if why := next((answer["why"] for answer in described if answer.get("why")), None):
                raise Failure(500, why)
            if self._is_in_format:
                await self._workers("remerge_setup", str(self.base_dir), self.nf4_copy, limit_s=SETUP_S)
            else:
                async with self._while_paused({}):
                    await self._workers("remerge_setup", str(self.base_dir), self.nf4_copy, limit_s=SETUP_S)
                self._is_in_format = True
        except Exception as error:
            raise Failure(500, f"the workers cannot fold adapters in: {error}") from None
        self.product = described[0].get("product")
        return described[0]["modules"]

    async def _workers(self, method: str, *args: Any, limit_s: float = WORKER_S) -> list[dict]:
        """Call a method on every worker and return the answers; `Failure` 500 with the first reason on an error.

        Workers that do not answer in time leave the server damaged: a late answer would be taken for the answer to
        another call.
        """
        try:
            answers = await asyncio.wait_for(self.engine.collective_rpc(method, None, args, {}), limit_s)
        except TimeoutError:
            self._damage(f"the workers did not answer {method} within {limit_s:g} s")
            raise Failure(500, self.damaged) from None
        for rank, answer in enumerate(answers):
            if "error" in answer:
                of = f" (rank {rank} of {len(answers)})" if len(answers) > 1 else ""
                raise Failure(500, f"{method}{of}: {answer['error']}")
        return answers

    def _damage(self, why: str) -> None:
        """Refuse everything from now on; the first reason is the one reported."""
        logger.error("rollout: %s", why)
        self.damaged = self.damaged or f"{why}. Restart the server."

    @contextlib.contextmanager
    def _damaged_by(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._damage(f"{what} failed ({_short(error)})")
            raise

    # Changes of state ------------------------------------------------------------------------------------------

    async def stage(self, way: Way, run: str, session: str, version: int, base_hash: str, directory: Path) -> float:
        """Check and load an adapter from a private directory without serving it; return seconds. The directory is
        removed with it."""
        started = time.perf_counter()
        entry = Version(way, run, session, version, directory=directory)
        try:
            async with self._lock:
                self._check_state(entry, base_hash)
                self._check_adapter(directory, await self._room(way))
                # vLLM has room for two adapters: the served one and this one.
                await self._drop_others(entry, keep=self.served)
                await (self._stage_remerge if way == "remerge" else self._stage_adapter)(entry, directory)
                self.staged[entry.key] = entry
        finally:
            if self.staged.get(entry.key) is not entry or way == "remerge":
                # The workers hold a remerged adapter's tensors, but vLLM may read an unmerged one from disk again.
                self.files.remove(entry.directory)
        return time.perf_counter() - started

    def _check_state(self, entry: Version, base_hash: str) -> None:
        self._check_usable()
        if entry.key in self.staged:
            raise Failure(409, f"{entry.name} is staged already: discard it first, or use another version number.")
        if base_hash != self.base_hash:
            held = self.base_hash or "an unknown one: its directory was not written by python -m merge base"
            raise Failure(
                409,
                f"the adapter belongs to the base {base_hash}, this server holds {held}. Write the base of this run "
                "with python -m merge base and start the server on it.",
            )
        other = next((one for one in self.staged.values() if one.way != entry.way and one.run != entry.run), None)
        if (entry.way == "adapter" and self._folded) or other:
            trainer = self.other_trainer(entry.session)
            raise Failure(
                409,
                f"this server has served by {other.way if other else 'remerge'}; by {entry.way} it would serve this "
                f"adapter on other weights.{trainer} {'Else restart' if trainer else 'Restart'} the server.",
            )

    def _check_usable(self) -> None:
        if self.damaged:
            raise Failure(500, self.damaged)
        if self.asleep:
            raise Failure(503, "the server is asleep: POST /v1/rollout/wake first.")

    async def _drop_others(self, entry: Version, keep: Version | None) -> None:
        """Discard versions left by other sessions and other runs."""
        for other in [*self.staged.values()]:
            if (other.run, other.session) != (entry.run, entry.session) and other is not keep:
                await self._forget(other)

    async def _stage_remerge(self, entry: Version, directory: Path) -> None:
        try:
            await self._workers("remerge_stage", entry.name, str(directory))
        except Failure as failed:
            await self._discard_on_workers(entry)
            raise Failure(422, failed.text) from None
        except BaseException:
            await self._discard_on_workers(entry)
            raise

    async def _stage_adapter(self, entry: Version, directory: Path) -> None:
        from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest

        name = f"{entry.run}-{entry.session}-v{entry.version:06d}"
        self._names[name] += 1
        if self._names[name] > 1:
            # vLLM's prefix cache is keyed by the name: a reused name may be answered from stale blocks.
            name = f"{name}-{self._names[name]}"
        answer = await self.models.load_lora_adapter(LoadLoRAAdapterRequest(lora_name=name, lora_path=str(directory)))
        if not isinstance(answer, str):
            raise Failure(422, f"vLLM did not load {directory}: {answer.error.message}")
        entry.lora = self.models.lora_requests[name]

    def _check_adapter(self, directory: Path, room: Room) -> None:
        try:
            check(read_adapter(directory), room, self.quant_cfg)
        except Refused as error:
            raise Failure(422, str(error)) from None

    async def activate(self, session: str, version: int) -> dict[str, float]:
        """Serve a staged version; return seconds by part. On failure the previous one stays served."""
        async with self._lock:
            self._check_usable()
            entry = self.staged.get((session, version))
            if entry is None:
                known = ", ".join(one.name for one in self.staged.values()) or "nothing"
                raise Failure(409, f"{session}/{version} is not staged; staged: {known}.{self.other_trainer(session)}")
            if entry is self.served:
                return {}
            seconds = await self._fold_in(entry) if entry.way == "remerge" else {}
            self.served = entry
            await self._drop_others(entry, keep=None)
            return seconds

    async def _fold_in(self, entry: Version) -> dict[str, float]:
        """Recompute the workers' weights while generation is paused and the cache is empty."""
        seconds: dict[str, float] = {}
        async with self._while_paused(seconds):
            with _timed(seconds, "remerge"):
                await self._recompute(entry)
        return seconds

    @contextlib.asynccontextmanager
    async def _while_paused(self, seconds: dict[str, float]) -> AsyncIterator[None]:
        """Pause generation and clear the cache for the block; a server that cannot resume is marked as damaged."""
        self.epoch += 1
        try:
            with _timed(seconds, "pause"):
                # engine.pause_generation would sleep for 20 ms more, "not required for correctness".
                await self.engine.engine_core.pause_scheduler_async(mode="abort", clear_cache=True)
            yield
        finally:
            with _timed(seconds, "resume"), contextlib.suppress(Exception), self._damaged_by("resuming generation"):
                await self.engine.resume_generation()
            # Last, with no await before `served` changes: a request of the old version that arrived in the meantime
            # runs on the new weights.
            self.epoch += 1
        self._check_usable()

    async def set_noise(self, session: str, version: int, sigma: float, seed: int) -> dict[str, float]:
        """Set noise of this draw on the served version's norms; 0 removes it, as does activating another version.
        Return seconds by part."""
        async with self._lock:
            self._check_usable()
            served = self.serving(session, version)
            if served.way != "remerge":
                raise Failure(400, f"{served.name} is served by {served.way}: only remerge puts noise on the norms.")
            seconds: dict[str, float] = {}
            async with self._while_paused(seconds):
                with _timed(seconds, "noise"):
                    await self._workers("remerge_noise", sigma, seed)
                await self._reset_prefix_cache()
            self.noise = {"sigma": sigma, "seed": seed} if sigma else None
            return seconds

    async def _recompute(self, entry: Version) -> None:
        self._folded, self.noise = True, None
        try:
            await self._workers("remerge_activate", entry.name)
        except BaseException as error:
            await self._unfold(error)
            raise
        finally:
            await self._reset_prefix_cache()

    async def _unfold(self, error: BaseException) -> None:
        """Restore the served version in the weights, or mark the server as damaged."""
        was_damaged = self.damaged
        # Mark it first: a server that dies here must never have been seen undamaged.
        self._damage(f"a change of the weights failed ({_short(error)}): they are of no version")
        is_alone = self.engine.vllm_config.parallel_config.tensor_parallel_size == 1
        if self.served is not None and is_alone and not was_damaged:
            with contextlib.suppress(Exception):
                await self._workers("remerge_activate", self.served.name)
                self.damaged = None
                logger.error("rollout: %s is in the weights again", self.served.name)

    async def _reset_prefix_cache(self) -> None:
        with contextlib.suppress(Exception), self._damaged_by("resetting the prefix cache"):
            for _ in range(50):
                # False while blocks are still in use, which is brief: everything was aborted.
                if await self.engine.reset_prefix_cache() is not False:
                    return
                await asyncio.sleep(0.02)
            self._damage("the prefix cache could not be reset, it may hold another version's")

    async def discard(self, session: str, version: int) -> None:
        """Discard a staged version; a no-op if it is not staged, a `Failure` if it is served."""
        async with self._lock:
            entry = self.staged.get((session, version))
            if entry is not None and entry is self.served:
                raise Failure(409, f"{entry.name} is being served: activate another version first.")
            if entry is not None:
                await self._forget(entry)

    async def _forget(self, entry: Version) -> None:
        self.staged.pop(entry.key, None)
        if entry is self.served:
            self.served = None
        entry.is_gone = True
        # vLLM may reread the adapter of a running request, and a missing file kills the whole engine.
        running = [*entry.requests]
        for request in running:
            request.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        if entry.way == "remerge":
            await self._discard_on_workers(entry)
        else:
            await self._unload(entry)
        self.files.remove(entry.directory)

    async def _unload(self, entry: Version) -> None:
        from vllm.entrypoints.serve.lora.protocol import UnloadLoRAAdapterRequest

        try:
            answer = await self.models.unload_lora_adapter(UnloadLoRAAdapterRequest(lora_name=entry.lora.lora_name))
            if not isinstance(answer, str):
                logger.warning("rollout: vLLM did not unload %s: %s", entry.name, answer.error.message)
            # Unloading only drops the name; this frees the slot.
            await self.engine.remove_lora(entry.lora.lora_int_id)
        except Exception as error:
            logger.warning("rollout: %s keeps its slot in vLLM: %s", entry.name, _short(error))

    async def _discard_on_workers(self, entry: Version) -> None:
        try:
            await self._workers("remerge_discard", entry.name)
        except Exception as error:
            logger.warning("rollout: the workers keep %s: %s", entry.name, _short(error))

    async def sleep(self) -> float:
        """Move weights to host memory and drop the KV cache; return seconds."""
        started = time.perf_counter()
        async with self._lock:
            self._check_sleeps()
            # Requests that arrive while it falls asleep must see it as asleep.
            self.asleep = True
            self.epoch += 1
            with self._damaged_by("falling asleep"):
                if not await self.engine.is_sleeping():
                    await self.engine.sleep(level=1)
        return time.perf_counter() - started

    async def wake(self) -> float:
        """Restore weights and KV cache, even if another route put the engine to sleep; return seconds."""
        started = time.perf_counter()
        async with self._lock:
            self._check_sleeps()
            with self._damaged_by("waking up"):
                if await self.engine.is_sleeping():
                    await self.engine.wake_up()
            self.asleep = False
        return time.perf_counter() - started

    async def share(self) -> Path:
        """Let a trainer on this machine map the workers' base; return the file, readable by this user only, that says
        where the memory is (kit/weights/shared_memory.py)."""
        config = self.engine.vllm_config
        if getattr(config.parallel_config, "worker_extension_cls", "") != SHARE_BASE:
            raise Failure(400, f"the server was started without --worker-extension-cls {SHARE_BASE}")
        if (parts := config.parallel_config.tensor_parallel_size) > 1:
            raise Failure(
                400, f"its base is split over {parts} GPUs (--tensor-parallel-size), a trainer needs all of it"
            )
        for flag in ("enable_sleep_mode", "enable_cumem_allocator"):
            if getattr(config.model_config, flag, False):
                named = f"--{flag.replace('_', '-')}"
                raise Failure(400, f"it was started with {named}: CUDA does not export memory of cumem's pool")
        async with self._lock:
            self._check_usable()
            (described,) = await self._workers("share_base")
            self.files.remove(self._shared)
            self._shared = self.files.make()
            file = self._shared / "base-memory.json"
            file.write_text(json.dumps(described))
        return file

    async def is_asleep(self) -> bool:
        """Whether this server put the engine to sleep, or the engine reports within `ASLEEP_S` that it is asleep."""
        # While an adapter is folded in, the engine is paused, which vLLM does not distinguish from asleep.
        if self.asleep or self._lock.locked():
            return self.asleep
        try:
            return bool(await asyncio.wait_for(self.engine.is_sleeping(), ASLEEP_S))
        except TimeoutError:
            return False

    def _check_sleeps(self) -> None:
        if not self.engine.vllm_config.model_config.enable_sleep_mode:
            raise Failure(400, "the server was started without --enable-sleep-mode (server.sleep: true).")

    # Version behind a request -----------------------------------------------------------------------------------

    def serving(self, session: str | None, version: int | None, may_be_base: bool = False) -> Version | None:
        """Return the version that a request names, None for the base; `Failure` if it is not the served one."""
        self._check_usable()
        if not self._is_in_format:
            raise Failure(
                503, f"the base is not in {self.quant_cfg} yet: ask GET /v1/rollout/info first, which sees to it."
            )
        served = self.served
        asked = None if session is None and version is None else (session, version)
        if asked == (served.key if served else None):
            return served
        if asked is None and may_be_base and not self._folded:
            return None
        held = served.name if served else "the base"
        wanted = "the base" if asked is None else f"{session}/{version}"
        raise Failure(409, f"this server serves {held}, not {wanted}.{self.other_trainer(session)}")

    def check_epoch(self, epoch: int, session: str | None) -> None:
        """`Failure` if the weights changed since `epoch`: such an answer belongs to no version."""
        if epoch != self.epoch:
            changed = "the served version changed, or the server went to sleep, during this request."
            raise Failure(409, f"{changed}{self.other_trainer(session)}")

    def other_trainer(self, session: str | None) -> str:
        """Sentence on the trainer that uses this server, if it is not the one of `session`; else empty."""
        others = [one for one in (self.served, *self.staged.values()) if one and session not in (None, one.session)]
        if not others:
            return ""
        one = others[-1]  # the newest
        return (
            f" The trainer of run {one.run} has it (session {one.session}, version {one.version}), and a server has "
            "one: while that one runs, wait for its end or name other servers in rollout.server_urls."
        )


@contextlib.contextmanager
def _timed(seconds: dict[str, float], part: str) -> Iterator[None]:
    started = time.perf_counter()
    try:
        yield
    finally:
        seconds[part] = time.perf_counter() - started


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:300] if not isinstance(error, Failure) else error.text[:300]
