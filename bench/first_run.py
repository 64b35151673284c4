"""From a clone to a running 8B GRPO on two GPUs with a new user's three commands: doctor, plan, up.

    python bench/first_run.py [--steps 3] [--layers 36]

The recipe is recipes/configs/grpo-qwen3_8b-nf4-fp8-gsm8k-2gpu.yaml. Its model (that shape, random weights) and
problems (the quickstart's, which the small tokenizer can read) are replaced, because neither can be downloaded here.
Claims, exit 1 when one fails: every command exits with 0; each step is recorded and sampled from the newest version;
no process and no memory is left on the GPUs; no phase takes more of a card than the plan's high estimate. Prints a
table last: seconds of each command, of a step by phase, and the cards' memory beside the plan's.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from path_8b import command
from up import GIB_SLACK, gpu_gib

CONFIG = "recipes/configs/grpo-qwen3_8b-nf4-fp8-gsm8k-2gpu.yaml"


class Peak(threading.Thread):
    """Peak GiB in use on each GPU, sampled twice a second."""

    def __init__(self):
        super().__init__(daemon=True)
        self.gib, self.over = gpu_gib(), threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.5):
            self.gib = [max(pair) for pair in zip(self.gib, gpu_gib(), strict=True)]


def flags(work: Path, steps: int) -> list[str]:
    keys: dict[str, Any] = {"run.name": "first", "run.output_dir": work / "run", "server.base": work / "base"}
    keys |= {"model.path": work / "model", "data.path": work / "tiny", "data.eval_split": "heldout"}
    keys |= {"data.answer_format": "plain", "train.max_steps": steps, "train.save_steps": steps}
    keys |= {"data.chat_template_kwargs": {}}  # the small tokenizer's template takes none
    # Random weights amplify FP8 rounding; a trained model stays far below both defaults.
    keys |= {"rollout.max_sampler_k3": 5, "rollout.max_canary_delta": 5}
    return ["--config", CONFIG, *(f"--{key}={value}" for key, value in keys.items())]


def planned(text: str) -> dict[str, tuple[float, float]]:
    """Expected and high GiB of each GPU, at its largest phase, from `launch.plan --json`."""
    return {
        gpu["name"]: tuple(max(phase[name] for phase in gpu["phases"].values()) for name in ("expected", "high"))
        for gpu in json.loads(text)["gpus"]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--work", type=Path, default=Path("/tmp/first"))
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--without_doctor", action="store_true", help="its vLLM check takes half a minute")
    options = parser.parse_args()
    work = options.work
    work.mkdir(parents=True, exist_ok=True)
    os.environ["OMP_NUM_THREADS"] = "8"
    if not (work / "model").is_dir():
        command("tiny", ["recipes/tiny_base.py", "--out", str(work / "tiny"), "--steps", "0"], work)
        # In a separate process: this one must hold no memory on a card.
        made = f"import path_8b; path_8b.make_model(*map(path_8b.Path, {[str(work / 'model'), str(work / 'tiny')]}), "
        place = {**os.environ, "PYTHONPATH": f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}"}
        subprocess.run([sys.executable, "-c", f"{made}{options.layers}, 0.1)"], env=place, check=True)
    words, seconds = flags(work, options.steps), {}
    if not options.without_doctor:
        seconds["doctor"], text = command("doctor", ["-m", "launch.doctor", *words], work)
        print(text)
    seconds["plan"], text = command("plan", ["-m", "launch.plan", *words], work)
    print(text)
    _, plan = command("plan-json", ["-m", "launch.plan", *words, "--json"], work)
    before, peak = gpu_gib(), Peak()
    peak.start()
    seconds["up"], _ = command("up", ["-m", "launch.up", *words], work)
    peak.over.set()
    time.sleep(3)
    report(work, options.steps, seconds, before, peak.gib, plan)


def report(work: Path, steps: int, seconds: dict, before: list, peak: list, plan: str) -> None:
    """Print the table; exit if a claim does not hold."""
    rows = [json.loads(line) for line in (work / "run" / "metrics.jsonl").read_text().splitlines()]
    print({name: round(value, 1) for name, value in seconds.items()})
    for row in rows:
        print(
            f"step {row['step']}: {row['seconds']} s, rollout {row['rollout_tokens_per_s']:.0f} tok/s, update "
            f"{row['update_tokens_per_s']:.0f} tok/s, {row['completion_length']:.0f} tokens a completion, "
            f"k3 {row['sampler_k3']:.1e}, GiB {row['peak_gib']}"
        )
    print(f"GiB of the cards before {before}, most {peak}, after {gpu_gib()}")
    problems = []
    if [row["step"] for row in rows] != list(range(1, steps + 1)):
        problems.append(f"steps: {[row['step'] for row in rows]}")
    if any(row["adapter_version"] != row["step"] - 1 for row in rows):
        problems.append(f"versions: {[row['adapter_version'] for row in rows]}")
    if any(now > was + GIB_SLACK for was, now in zip(before, gpu_gib(), strict=True)):
        problems.append(f"GiB before {before}, after {gpu_gib()}")
    for (gpus, (expected, high)), gib in zip(planned(plan).items(), peak, strict=False):
        print(f"{gpus}: planned {expected:.1f}, at most {high:.1f}, measured {gib:.1f} GiB")
        if gib > high:
            problems.append(f"{gpus} took {gib:.1f} GiB, the plan says at most {high:.1f}")
    if problems:
        raise SystemExit("\n".join(problems))


if __name__ == "__main__":
    main()
