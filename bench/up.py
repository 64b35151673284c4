"""Does `launch.up` put server and trainer on a GPU each, and leave nothing behind: interrupted, killed, completed?

    python bench/up.py --base models/tiny-base --steps 8

The quickstart's small model in BF16, three starts of one run: Ctrl-C in the middle, SIGKILL of `up` in the middle of a
resumed run, and a resumed run to the end. Claims, exit 1 when one fails: the processes see the GPUs of the plan; after
each end no process of the start is alive and every GPU's memory is as before; the run has every step once. Without a
GPU it checks only the processes, so that it can be rehearsed. Prints a table last.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parent))

from path_8b import CONFIG, ROOT

GIB_SLACK = 0.2  # contexts of other processes come and go
GONE_S = 25  # after SIGKILL of `up`, for the servers to end themselves


def gpu_gib() -> list[float]:
    """GiB in use on every GPU; empty without nvidia-smi."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        return [float(line) / 1024 for line in subprocess.run(query, capture_output=True, text=True).stdout.split()]
    except FileNotFoundError:
        return []


def lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def places(family: list[psutil.Process]) -> dict[str, str | None]:
    """CUDA_VISIBLE_DEVICES of the server process and of the trainer process."""
    words = {"server": "vllm.entrypoints.openai.api_server", "trainer": "recipes/grpo_qlora.py"}
    found = {}
    for process in family:
        for name, word in words.items():
            if word in process.cmdline() and "leash.py" not in " ".join(process.cmdline()):
                found[name] = process.environ().get("CUDA_VISIBLE_DEVICES")
    return found


def start(flags: list[str], log: Path, until: int | None, end: signal.Signals | None) -> dict:
    """Start `up` once, to its end or until a signal ends it after a step; return the observations."""
    before, began = gpu_gib(), time.monotonic()
    with open(log, "w") as file:
        words = [sys.executable, "-m", "launch.up", *flags]
        process = subprocess.Popen(words, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)
    family, during = [], []
    while process.poll() is None:
        if not family and f" step {until or 1}/" in log.read_text():
            family, during = psutil.Process(process.pid).children(recursive=True), gpu_gib()
            found = places(family)
            if end:
                process.send_signal(end)
        time.sleep(0.2)
    if not family:
        raise SystemExit(f"step {until or 1} did not come: {log.read_text()[-4000:]}")
    asked = time.monotonic()
    while any(map(lives, family)) and time.monotonic() - asked < GONE_S:
        time.sleep(0.2)
    waited = time.monotonic() - asked
    time.sleep(2 if before else 0)  # the driver takes a moment to release memory
    return {
        "code": process.returncode,
        "seconds": time.monotonic() - began,
        "gone_s": waited,
        "left": [str(one) for one in family if lives(one)],
        "gpus": found,
        "gib": (before, during, gpu_gib()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--base", type=Path, required=True, help="what recipes/tiny_base.py wrote")
    parser.add_argument("--work", type=Path, default=Path("/tmp/up"))
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    work, base = options.work, options.base.resolve()
    work.mkdir(parents=True, exist_ok=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    keys = {"run.name": "up", "run.output_dir": work / "run", "model.path": base, "data.path": base}
    keys |= {"model.dtype": "bfloat16", "rollout.backend": "server", "server.base": work / "base"}
    keys |= {"server.gpu_memory_utilization": 0.1, "train.max_steps": options.steps, "train.save_steps": 1}
    flags = ["--config", CONFIG, *(f"--{key}={value}" for key, value in keys.items())]
    found = {
        "Ctrl-C": start(flags, work / "interrupted.log", 2, signal.SIGINT),
        "SIGKILL": start([*flags, "--resume"], work / "killed.log", options.steps - 2, signal.SIGKILL),
        "to the end": start([*flags, "--resume"], work / "whole.log", options.steps, None),
    }
    wanted = {"server": "0", "trainer": "1"} if len(gpu_gib()) > 1 else None
    problems = []
    for (name, fact), code in zip(found.items(), (130, -9, 0), strict=True):
        before, during, after = fact["gib"]
        print(
            f"{name:<11} exit {fact['code']:>4}, {fact['seconds']:.0f} s, gone after {fact['gone_s']:.1f} s, "
            f"GPUs {fact['gpus']}, GiB before, during, after: "
            + ", ".join("/".join(f"{value:.1f}" for value in values) or "–" for values in (before, during, after))
        )
        if fact["code"] != code:
            problems.append(f"{name}: exit code {fact['code']}, not {code}; see the logs in {work}")
        if fact["left"]:
            problems.append(f"{name}: {fact['left']} live")
        if wanted and fact["gpus"] != wanted:
            problems.append(f"{name}: GPUs are {fact['gpus']}, not {wanted}")
        if any(now > was + GIB_SLACK for was, now in zip(before, after, strict=True)):
            problems.append(f"{name}: GiB on the GPUs before {before}, after {after}")
    steps = [line.split(",")[0] for line in (work / "run" / "metrics.jsonl").read_text().splitlines()]
    if steps != [f'{{"step": {step}' for step in range(1, options.steps + 1)]:
        problems.append(f"steps: {steps}")
    if problems:
        raise SystemExit("\n".join(problems))


if __name__ == "__main__":
    main()
