"""Memory of the trainer and of the rollout server by shape and setting: the reference for `launch.plan`.

    python bench/memory_points.py --out memory_points.json                 # one GPU, every point
    python bench/memory_points.py --points trainer --shapes 8b --out x.json
    python bench/memory_points.py --points faster --out memory_points.json # fused, FP8, packs, liger, recompute
    python bench/memory_points.py --tiny --out x.json                      # the same path on a CPU, no memory

Qwen3 shapes with random weights. A trainer point is the second of two steps of the recipe itself on an NF4 base
generated on the card, with a stub sampler (memory_child.py lists what is replaced). Peak and reserved are torch's,
from the end of the rollout to the end of the step; the context is what the process takes of the card beyond that. The
shapes run one after the other, alone on the card, so seconds are meaningful too. Kind `rollout` is also such a step,
but transformers generates its completions in the trainer's process.

A server point is the command that launch.server would run, with `--load-format dummy`. Remerge needs an NF4 copy from
a real base, so that one is a small shape with a base on disk, and folds an adapter in two steps of the recipe. All
servers run at once; after a prefill and a decode of full width each one is ended, and its total is what the card then
gets back: weights, KV cache, graphs, workspace, context.

A failed point keeps its error and the others continue. Points already in --out stay unless measured again. Prints a
table last; exits 1 when a point failed or --limit_s left one out.
"""

import argparse
import dataclasses
import json
import os
import platform
import random
import re
import signal
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from memory_child import CONFIG, SHAPES, add_point, card_used_gib, make_directory, nvidia_smi, parameters, setting

from kit.core.config.load import load_config
from kit.core.errors import CheckFailed
from kit.core.run_directory import write_json
from kit.core.run_files import read_json
from kit.train.record import git_revision, versions
from launch.replicas import Replicas, stop_groups
from launch.vllm_command import gpu_gib, installed_vllm, plans, visible_gpus

ROOT = Path(__file__).parents[1]
# shape, micro-batch, completion tokens, recompute, beta, rank; most wanted first
TRAINER = [
    ("8b", 8, 1024, "full", 0.01, 16),
    ("8b", 1, 2048, "full", 0.01, 16),
    ("8b", 16, 256, "full", 0.0, 16),
    ("8b", 4, 1024, "none", 0.01, 64),
    ("32b", 1, 1024, "full", 0.01, 16),
    ("32b", 4, 1024, "full", 0.01, 16),
    ("1.7b", 4, 1024, "none", 0.01, 16),
    ("1.7b", 8, 2048, "full", 0.0, 16),
    ("14b", 4, 1024, "full", 0.01, 32),
    ("4b", 4, 1024, "full", 0.01, 16),
    ("4b", 1, 2048, "none", 0.01, 16),
    ("0.6b", 16, 1024, "full", 0.01, 16),
    ("0.6b", 8, 256, "none", 0.0, 16),
]
BF16_ADAPTER = ("8b", 8, 1024, "full", 0.01, 16)
IN_PROCESS = ("1.7b", 16, 256, "full", 0.01, 16)
# Switches of a faster step; packs are filled by groups of four, 255 + 4 x 1,024 tokens
FUSED = {"compute": "fused"}
FASTER = [
    (("8b", 8, 1024, "full", 0.01, 16), FUSED),
    (("8b", 8, 1024, "full", 0.01, 16), {"compute": "fp8"}),
    (("8b", 8, 1024, "full", 0.01, 16), FUSED | {"kernels": "liger"}),
    (("8b", 4, 1024, "selective", 0.01, 16), {}),
    (("8b", 4, 1024, "selective", 0.01, 16), FUSED | {"kernels": "liger"}),
    (("8b", 4, 1024, "none", 0.01, 16), FUSED | {"kernels": "liger"}),
    (("8b", 4, 1024, "full", 0.01, 16), FUSED | {"recompute_fraction": 0.5}),
    (("8b", 8, 1024, "full", 0.01, 16), FUSED | {"recompute_offload": True}),
    (("8b", 8, 1024, "full", 0.01, 16), FUSED | {"recompute_offload": True, "embeddings": "host"}),
    (("8b", 8, 1024, "full", 0.01, 16), FUSED | {"micro_batch_tokens": 8704}),
    (("8b", 8, 1024, "full", 0.01, 16), {"compute": "fp8", "kernels": "liger", "micro_batch_tokens": 8704}),
    (("1.7b", 4, 1024, "selective", 0.01, 16), {}),
    (("1.7b", 4, 1024, "none", 0.01, 16), FUSED | {"kernels": "liger"}),
]
# shape, weights, sync, KV cache GiB, sequences, eager
SERVER = [
    ("32b", "fp8_per_channel", "adapter", 2, 128, True),
    ("8b", "fp8_per_channel", "adapter", 4, 256, False),
    ("8b", "bf16", "adapter", 2, 64, True),
    ("14b", "fp8_per_channel", "adapter", 2, 256, False),
    ("4b", "bf16", "adapter", 3, 512, False),
    ("1.7b", "fp8_per_channel", "remerge", 2, 256, False),
]
TINY_TRAINER = [("tiny", 4, 32, "full", 0.01, 8), ("tiny", 1, 16, "none", 0.0, 4)]
TINY_FASTER = [  # liger needs a GPU
    (("tiny", 4, 32, "selective", 0.01, 4), FUSED | {"recompute_offload": True, "embeddings": "host"}),
    (("tiny", 4, 32, "full", 0.01, 4), {"compute": "fp8", "recompute_fraction": 0.5, "micro_batch_tokens": 640}),
]
TINY_SERVER = [("tiny", "fp8_per_channel", "adapter", 1, 8, True), ("tiny", "bf16", "remerge", 1, 8, True)]
KINDS = ["trainer", "faster", "server"]
PROMPT, PORT, RANK, START_S = 256, 8470, 16, 180
LINEARS = "[q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj]"
LOG = {
    "weights_gib": re.compile(r"Model loading took ([\d.]+) GiB"),
    "graphs_gib": re.compile(r"Graph capturing finished in \d+ secs, took (-?[\d.]+) GiB"),
    "max_num_batched_tokens": re.compile(r"Chunked prefill is enabled with max_num_batched_tokens=(\d+)"),
    "kv_cache_tokens": re.compile(r"KV cache size: ([\d,]+) tokens"),
}


def trainer_points(tiny: bool) -> list[dict[str, Any]]:
    """Settings of every trainer point, without figures."""
    settings = [(one, "float32", "server") for one in (TINY_TRAINER if tiny else TRAINER)]
    settings += [(TINY_TRAINER[0] if tiny else IN_PROCESS, "float32", "in_process")]
    settings += [] if tiny else [(BF16_ADAPTER, "bfloat16", "server")]
    return _points(settings)


def faster_points(tiny: bool) -> list[dict[str, Any]]:
    """Settings of the points with the switches of a faster step, without figures."""
    rows = TINY_FASTER if tiny else FASTER
    points = _points([(one, "float32", "server") for one, _ in rows])
    return [point | switches for point, (_, switches) in zip(points, rows, strict=True)]


def _points(settings: list[tuple]) -> list[dict[str, Any]]:
    found = []
    for (shape, micro, tokens, recompute, beta, rank), dtype, backend in settings:
        found.append(
            {"kind": "trainer" if backend == "server" else "rollout", "shape": shape, "model": SHAPES[shape]}
            | {"micro_batch": micro, "completions": max(4, 2 * micro), "prompt_tokens": PROMPT}
            | {"completion_tokens": tokens, "recompute": recompute, "beta": beta}
            | {"lora_rank": rank, "adapter_dtype": dtype, "backend": backend}
        )
    return found


def server_points(tiny: bool) -> list[dict[str, Any]]:
    """Settings of every server point, without figures."""
    names = ("shape", "weights", "sync", "kv_cache_gib", "max_num_seqs", "enforce_eager")
    rows = [dict(zip(names, one, strict=True)) for one in (TINY_SERVER if tiny else SERVER)]
    extra = {"lora_rank": RANK, "nf4_copy": "gpu", "prompt_tokens": PROMPT, "completion_tokens": 256}
    return [{"kind": "server", "model": SHAPES[row["shape"]], **row, **extra} for row in rows]


class ServerPoint:
    """One server: started by `bring_up`, ended by `take_down`, with its figures in `point`."""

    def __init__(self, work: Path, point: dict[str, Any], number: int):
        self.point, self.work = point, work / f"server-{number}"
        self.group: int | None = None
        self.model, self.base = self.work / "model", self.work / "base"
        # Here rather than in its thread: transformers' lazy imports are not thread-safe.
        make_directory(self.model, point["shape"], PROMPT)
        point["params"] = parameters(point["shape"])
        keys: dict[str, Any] = {"run.name": "points", "run.output_dir": self.work / "run", "model.path": self.model}
        keys |= {"model.dtype": "bfloat16", "data.path": self.model, "policy.lora_rank": RANK}
        keys |= {"policy.target_modules": LINEARS, "rollout.backend": "server", "rollout.sync": point["sync"]}
        keys |= {"rollout.server_urls": f"['http://127.0.0.1:{PORT + number}']", "rollout.max_prompt_length": PROMPT}
        keys |= {
            "rollout.max_completion_length": point["completion_tokens"],
            "rollout.max_sampler_k3": 1e9,
            "rollout.max_canary_delta": 1e9,
        }
        keys |= {"server.base": self.base, "server.weights": point["weights"], "server.gpu_memory_utilization": 0.05}
        keys |= {f"server.{key}": point[key] for key in ("kv_cache_gib", "max_num_seqs")}
        keys |= {"server.enforce_eager": str(point["enforce_eager"]).lower(), "train.max_steps": 2}
        keys |= {"train.per_device_train_batch_size": 2, "train.gradient_accumulation_steps": 4}
        keys |= {"train.save_steps": 2, "train.recompute": "full"}
        self.flags = ["--config", CONFIG, *(f"--{key}={value}" for key, value in keys.items())]

    def command(self, name: str, words: list[str]) -> None:
        with open(self.work / f"{name}.log", "w") as log:
            done = subprocess.run([sys.executable, *words], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        if done.returncode:
            raise CheckFailed(f"{name} failed: " + (self.work / f"{name}.log").read_text()[-600:])

    def bring_up(self, deadline: float) -> None:
        """Start, wait, use; any error goes into the point."""
        try:
            self.start(deadline)
        except Exception as error:
            self.point["error"] = f"{type(error).__name__}: {error}"[-600:]

    def start(self, deadline: float) -> None:
        if remerges := self.point["sync"] == "remerge":
            self.command("checkpoint", ["bench/memory_child.py", "checkpoint", "--work", str(self.model)])
            self.command("base", ["-m", "merge", "base", *self.flags])
        else:
            self.base = self.model
        vllm, config = installed_vllm(), load_config(CONFIG, self.flags[2:])
        (plan,) = plans(config, vllm, *((None, None) if vllm.is_cpu else (visible_gpus(), gpu_gib())))
        if not remerges:
            options = plan.options | {"model": str(self.model.resolve()), "load_format": "dummy"}
            plan = dataclasses.replace(plan, options=options)
        replicas, started = Replicas([plan], detach=True), time.time()
        replicas.start()
        self.group = replicas.running[0].process.pid
        replicas.wait_ready(max(1.0, deadline - time.time()), lambda plan, info: None)
        self.point["start_s"] = time.time() - started
        if remerges:
            self.command("recipe", ["recipes/grpo_qlora.py", *self.flags])
        self.use(plan)
        self.read_log(plan.log.read_text(errors="replace"))

    def use(self, plan: Any) -> None:
        """Run the widest prefill that vLLM makes, then a decode of as many sequences as it may run."""
        sequences, url = self.point["max_num_seqs"], f"http://127.0.0.1:{plan.port}/v1/completions"
        for count, length, new in ((40, PROMPT, 2), (sequences, 16, 24)):
            prompts = [[random.randrange(3, 250) for _ in range(length)] for _ in range(count)]
            body = {"model": plan.options["model"], "prompt": prompts, "max_tokens": new, "ignore_eos": True}
            data = json.dumps(body | {"logprobs": 0, "temperature": 1.0}).encode()
            request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
            urllib.request.urlopen(request, timeout=120).read()

    def read_log(self, text: str) -> None:
        for key, pattern in LOG.items():
            found = pattern.findall(text)
            self.point[key] = float(found[-1].replace(",", "")) if found else None

    def take_down(self, before: float | None) -> float | None:
        """End the server; its total is the memory that the card gets back. `before` and the result: memory in use."""
        stop_groups([self.group])
        after = settled_gib()
        if "error" not in self.point:
            self.point["total_gib"] = before - after if before is not None and after is not None else None
        return after


def settled_gib() -> float | None:
    """Memory in use on the card once it has been stable for a second."""
    seen = [card_used_gib()]
    while seen[-1] is not None and len(seen) < 40 and (len(seen) < 3 or max(seen[-3:]) - min(seen[-3:]) > 0.01):
        time.sleep(0.5)
        seen.append(card_used_gib())
    return seen[-1]


def measure_servers(work: Path, points: list[dict[str, Any]], out: Path, deadline: float) -> None:
    """Start all servers at once, then end them one by one."""
    servers = [ServerPoint(work, point, number) for number, point in enumerate(points)]
    ready_by = min(deadline, time.time() + START_S)
    try:
        with ThreadPoolExecutor(len(servers)) as pool:
            list(pool.map(lambda server: server.bring_up(ready_by), servers))
    finally:
        used = settled_gib()
        for server in servers:
            if server.group is not None:
                used = server.take_down(used)
            add_point(out, server.point)
            print(json.dumps(server.point), flush=True)


class TrainerShape:
    """Process of one shape's trainer points; it imports at once and measures when its turn comes."""

    def __init__(self, work: Path, shape: str, points: list[dict[str, Any]], out: Path):
        self.log, self.points, self.shape = work / f"trainer-{shape}.log", points, shape
        words = [sys.executable, "bench/memory_child.py", "trainer", "--work", str(work), "--out", str(out)]
        words += ["--points", json.dumps(points)]
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                words, cwd=ROOT, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, text=True
            )

    def run(self, deadline: float) -> None:
        """Let it measure until `deadline`, plus a minute for the point in progress."""
        started = time.time()
        try:
            self.process.communicate(f"{deadline}\n", timeout=max(1.0, deadline + 60 - time.time()))
        except (subprocess.TimeoutExpired, BrokenPipeError) as error:
            print(f"{self.shape}: {type(error).__name__}", flush=True)
        finally:
            self.end()
        text = self.log.read_text(errors="replace")
        lines = [line for line in text.splitlines() if line.startswith("POINT ")]
        print(f"{self.shape}: {len(lines)} of {len(self.points)} points, {time.time() - started:.0f} s", flush=True)
        print("\n".join(lines) if len(lines) == len(self.points) else text[-3000:], flush=True)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def show(value: Any, digits: int = 2) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else f"{value:.{digits}f}" if isinstance(value, float) else str(value)


def table(points: list[dict[str, Any]]) -> None:
    """Print the points as two tables; a failed one shows its error."""
    kinds = {
        ("trainer", "rollout"): [
            *("kind", "shape", "micro_batch", "completion_tokens", "recompute", "recompute_fraction", "beta"),
            "recompute_offload",
            *(
                "lora_rank",
                "compute",
                "kernels",
                "embeddings",
                "micro_batch_tokens",
                "adapter_dtype",
                "peak_gib",
                "reserved_gib",
                "context_gib",
                "update_s",
                "update_tokens_per_s",
            ),
            "rollout_peak_gib",
        ],
        ("server",): [
            *("kind", "shape", "weights", "sync", "kv_cache_gib", "max_num_seqs", "enforce_eager", "weights_gib"),
            *("graphs_gib", "total_gib", "start_s"),
        ],
    }
    for wanted, columns in kinds.items():
        rows = [one for one in points if one["kind"] in wanted]
        cells = [columns, *([show(one.get(key)) for key in columns] for one in rows)] if rows else []
        widths = [max(len(row[i]) for row in cells) for i in range(len(columns))] if rows else []
        for row, one in zip(cells, [{}, *rows], strict=False):
            error = f"  {one['error'].splitlines()[0][:100]}" if "error" in one else ""
            print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) + error)


def begin(out: Path) -> None:
    """Write the file's head, keeping the points of an earlier call."""
    head = {
        "card": nvidia_smi("name,memory.total,driver_version") or platform.machine(),
        "versions": versions(),
        "date": time.strftime("%Y-%m-%d"),
    }
    head |= {"command": " ".join(["python", "bench/memory_points.py", *sys.argv[1:]]), "commit": git_revision()}
    write_json(out, head | {"points": read_json(out)["points"] if out.is_file() else []})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--points", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, help="default: all but tiny")
    parser.add_argument("--tiny", action="store_true", help="the smallest shape, on a CPU: the path, no memory")
    parser.add_argument("--work", type=Path, default=Path("/tmp/memory_points"))
    parser.add_argument("--limit_s", type=float, default=420, help="start no further point after this")
    parser.add_argument("--out", type=Path, required=True, help="JSON with every point, written after each")
    options = parser.parse_args()
    deadline = time.time() + options.limit_s
    work, out = options.work.resolve(), options.out.resolve()
    work.mkdir(parents=True, exist_ok=True)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    os.chdir(ROOT)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that started processes are ended
    begin(out)

    def chosen(points: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
        shapes = options.shapes or [one["shape"] for one in points]
        return [one for one in points if one["shape"] in shapes] if kind in options.points else []

    trainers, servers = chosen(trainer_points(options.tiny), "trainer"), chosen(server_points(options.tiny), "server")
    trainers += chosen(faster_points(options.tiny), "faster")
    shapes = list(dict.fromkeys(one["shape"] for one in trainers))
    children = [TrainerShape(work, s, [one for one in trainers if one["shape"] == s], out) for s in shapes]
    try:
        if servers:
            measure_servers(work, servers, out, deadline)
        for child in children:
            child.run(deadline)
    finally:
        for child in children:
            child.end()
    points = read_json(out)["points"]
    table(points)
    asked = [setting(one) for one in trainers + servers]
    good = [one for one in points if "error" not in one and setting(one) in asked]
    print(f"{len(good)} of {len(asked)} points measured ({options.limit_s:g} s allowed), {len(points)} in {out}")
    raise SystemExit(len(good) < len(asked))


if __name__ == "__main__":
    main()
