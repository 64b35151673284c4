"""Run the whole path on this machine: a starting model, GRPO on its NF4 form, merge, quantize, evaluate, gate.

    python -m recipes.quickstart            # what `make quickstart` runs after installing
    python -m recipes.quickstart --seed 1   # another seed; the starting model is made once and reused

Each step is the command a user would type; it is printed before it runs. Exit code: that of the first step that
fails, otherwise the gate's.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from kit.core.config.recipe import PLAIN
from kit.core.errors import BAD_INPUT, CHECK_FAILED, BadInput, CheckFailed, run_command
from kit.core.file_kinds import EVALUATION
from kit.core.run_directory import RunDir
from kit.core.run_files import read_object
from launch.starting.trainer_command import CPU, in_checkout

BASE = Path("models/tiny-base")
CONFIG = "recipes/configs/grpo-tiny-nf4-cpu.yaml"
Step = tuple[str, list[str], tuple[int, ...]]  # name, arguments of python, accepted exit codes


def step(name: str, command: list[str], seconds: dict[str, float], accepted: tuple[int, ...] = (0,)) -> int:
    """Run one command of the path, timed; raise `BadInput` or `CheckFailed` if its exit code is not accepted."""
    shown = " ".join(["python" if part == sys.executable else part for part in command])
    print(f"\n== {name}\n$ {shown}", flush=True)
    started = time.perf_counter()
    # accelerate would give one process every core, and on two cores two threads train slower than one.
    environment = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **os.environ}
    code = subprocess.run(command, env=environment).returncode
    seconds[name] = time.perf_counter() - started
    if code not in accepted:
        kind = BadInput if code == BAD_INPUT else CheckFailed
        raise kind(f"{name} ended with exit code {code} after {seconds[name]:.0f} s. The command was: {shown}")
    return code


def walk(steps: list[Step], seconds: dict[str, float], dry_run: bool = False) -> int:
    """Run the steps in order, timed, and return the last one's exit code; with `dry_run` only print them."""
    code = 0
    for name, command, accepted in steps:
        if dry_run:
            print("$ python " + " ".join(command))
        else:
            code = step(name, [sys.executable, *command], seconds, accepted)
    return code


def free_run(name: str) -> Path:
    """The first of runs/<name>, runs/<name>-2, … that does not exist."""
    number = 1
    while (path := Path("runs") / (name if number == 1 else f"{name}-{number}")).exists():
        number += 1
    return path


def judging_steps(path: Path, formats: tuple[str, ...] = ("bf16", "fp8", "w4a16"), nf4: bool = True) -> list[Step]:
    """Steps after training: merge into `formats` and, with `nf4`, into the run's own; the gate comes last."""
    merge = ["-m", "merge", "--run", str(path), "--format"]
    # Refused (exit 1) if quantizing to NF4 again would round away more than half of the update.
    again = [("merge to nf4", [*merge, "nf4", "--policy", "grpo"], (0, CHECK_FAILED))] if nf4 else []
    return [
        ("plot", ["-m", "launch.watch", str(path), "--plot"], (0,)),
        ("merge and quantize", [*merge, *formats], (0,)),
        *again,
        ("eval", ["-m", "eval", "--run", str(path)], (0,)),
        ("gate", ["-m", "eval", "gate", "--run", str(path)], (0, CHECK_FAILED)),
    ]


def mean_reward(rows: list[dict]) -> float:
    return sum(row["reward"] for row in rows) / len(rows)


def summary(run: RunDir, seconds: dict[str, float]) -> str:
    """Results of the run, from the files of its directory."""
    rows = run.metrics()
    result = read_object(run.eval_file, EVALUATION)
    matrix, ends = result["matrix"], min(10, -(-len(rows) // 2))
    cells = {name: (matrix["base"][name], matrix["grpo"][name]) for name in matrix["base"]}
    judged = next(iter(cells))  # nf4, the policy as trained, if it was measured
    gain = result["gain"][judged]

    def percent(cell: dict) -> str:
        low, high = cell["interval"]
        return f"{cell['accuracy']:5.1%} [{low:.1%}, {high:.1%}]"

    low, high = gain["interval"]
    lines = [
        "",
        f"training reward     {mean_reward(rows[:ends]):.3f} (first {ends} steps) -> "
        f"{mean_reward(rows[-ends:]):.3f} (last)",
        f"held-out accuracy   {percent(cells[judged][0])} -> {percent(cells[judged][1])}, 95 % Wilson, "
        f"n = {result['n']}",
        f"gain                {gain['difference']:+.1%} [{low:+.1%}, {high:+.1%}], paired bootstrap",
        "",
        f"{'format':<8}{'base':<24}{'GRPO':<24}gain survival (gain there - gain in bf16)",
    ]
    for name, (base, grpo) in cells.items():
        survival = result["gain_survival"].get(name)
        text = "-"
        if survival and name != "bf16":
            text = f"{survival['difference']:+.1%} [{survival['interval'][0]:+.1%}, {survival['interval'][1]:+.1%}]"
        lines.append(f"{name:<8}{percent(base):<24}{percent(grpo):<24}{text}")
    lines += ["", result["conclusion"], ""]
    lines += [f"{name:<22}{value:6.0f} s" for name, value in seconds.items()]
    lines += [f"{'total':<22}{sum(seconds.values()):6.0f} s", ""]
    lines += [f"files: {run.path}/ (metrics.jsonl, health.png, eval.md, eval.png, merged/grpo/<format>/)"]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--seed", type=int, default=0, help="seed of the GRPO run")
    parser.add_argument("--dry_run", action="store_true", help="print the commands, run none")
    options = parser.parse_args()
    seconds: dict[str, float] = {}
    launch = ["-m", "accelerate.commands.launch", "--config_file", in_checkout(CPU)]
    path = free_run("tiny" if options.seed == 0 else f"tiny-seed{options.seed}")
    run = RunDir(path)
    chosen = ["--run.name", path.name, "--run.seed", str(options.seed)]
    steps = [
        ("GRPO", [*launch, in_checkout(PLAIN), "--config", in_checkout(CONFIG), *chosen], (0,)),
        *judging_steps(path),
    ]
    if not BASE.exists():
        steps.insert(0, ("starting model", [in_checkout("recipes/tiny_base.py"), "--out", str(BASE)], (0,)))
    code = walk(steps, seconds, options.dry_run)
    if options.dry_run:
        return 0
    print(summary(run, seconds), flush=True)
    return code


if __name__ == "__main__":
    run_command(main)
