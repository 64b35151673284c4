"""Two CPU cores: does replacing or replaying groups raise the reward sooner, at the same wall clock?

    python bench/dynamic_sampling.py --base models/tiny-base --seeds 5 --out dynamic
    python bench/dynamic_sampling.py --base models/tiny-base --seeds 5 --out dynamic --arm replay

The quickstart's run (recipes/configs/grpo-tiny-nf4-cpu.yaml) with and without `rollout.resample_rounds`, or
`rollout.replay_steps`, by the recipe's command line. For every seed both run at the same time, each on one core with
one thread, so they share what else the machine does; with every second seed they change cores. Their clock is the sum
of their steps' seconds without the held-out measurements, and they are compared up to the end of the one that ends
first.

Prints, for each quarter of that time, the mean reward of the steps in it (of the problems that the data's order drew,
before any group is replaced), held-out accuracy, and what was sampled for it; the difference has a 95 %
interval (Student's t over the seeds' differences). The numbers go to OUT/result-ARM.json; runs in OUT that have ended
are not repeated. Exit 1 only when a run fails.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from eval.stats import runs_interval

ROOT = Path(__file__).parents[1]
CONFIG = "recipes/configs/grpo-tiny-nf4-cpu.yaml"
KEY = {"dynamic": "rollout.resample_rounds", "replay": "rollout.replay_steps"}  # of an arm beside `plain`
QUARTERS = 4


def start(work: Path, base: Path, arm: str, seed: int, arguments: argparse.Namespace) -> subprocess.Popen | None:
    """Start a run on one core; None if it has ended already."""
    run = work / f"{arm}-{seed}"
    lines = (run / "metrics.jsonl").read_text().splitlines() if (run / "metrics.jsonl").exists() else []
    if len(lines) == arguments.steps:
        return None
    keys = {"run.name": run.name, "run.output_dir": run, "run.seed": seed, "model.path": base, "data.path": base}
    keys |= {"train.max_steps": arguments.steps, "train.save_steps": arguments.steps, "watch.completions_every": 0}
    keys |= {"watch.eval_every": 10, "watch.eval_problems": 128}
    if arm in KEY:
        keys |= {KEY[arm]: arguments.value}
    words = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/cpu.yaml"]
    words += ["--main_process_port", str(29800 + 2 * seed + (arm in KEY)), "recipes/grpo_qlora.py"]
    words += ["--config", CONFIG, *(f"--{key}={value}" for key, value in keys.items()), "--overwrite"]
    core = sorted(os.sched_getaffinity(0))[((arm in KEY) + seed) % 2]
    words = ["taskset", "-c", str(core), *words]
    with open(work / f"{run.name}.log", "w") as log:
        return subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"})


def clocked(run: Path) -> list[dict]:
    """The steps of a run, each with its `clock`: seconds from the start to its end."""
    rows, clock = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()], 0.0
    for row in rows:
        clock += row["seconds"]["step"] - row["seconds"].get("heldout", 0.0)
        row["clock"] = clock
    return rows


def figures(rows: list[dict], until: float) -> dict[str, float]:
    """A run's numbers up to a clock."""
    rows = [row for row in rows if row["clock"] <= until + 1e-6]
    found = {}
    for quarter in range(QUARTERS):
        low, high = until * quarter / QUARTERS, until * (quarter + 1) / QUARTERS + 1e-6
        found[f"reward, quarter {quarter + 1}"] = statistics.mean(
            r["reward"] for r in rows if low < r["clock"] <= high
        )
    found["held-out accuracy, last"] = [r["heldout_accuracy"] for r in rows if r["heldout_accuracy"] is not None][-1]
    later = [r["heldout_accuracy"] for r in rows if r["heldout_accuracy"] is not None and r["clock"] > until / 2]
    found["held-out accuracy, mean of the second half"] = statistics.mean(later)
    found["steps"] = len(rows)
    found["seconds a step"] = rows[-1]["clock"] / len(rows)
    found["tokens sampled"] = sum(row["completion_tokens"] for row in rows)
    found["tokens of dropped groups"] = sum(row["dropped_tokens"] or 0 for row in rows)
    flat = [
        row["no_signal_fraction"] if row["no_signal_fraction"] is not None else row["zero_spread_fraction"]
        for row in rows
    ]
    found["groups without signal in the update"] = statistics.mean(flat)
    found["groups without signal as drawn"] = statistics.mean(row["zero_spread_fraction"] for row in rows)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True, help="directory that recipes/tiny_base.py made")
    parser.add_argument("--out", type=Path, required=True, help="directory of the runs and of their figures")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each kind")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps of a run")
    parser.add_argument("--arm", choices=KEY, default="dynamic", help="compared with the plain run")
    parser.add_argument("--value", type=int, default=3, help="rollout.resample_rounds, or replay_steps, of that arm")
    arguments = parser.parse_args()
    arms = ("plain", arguments.arm)
    work, base = arguments.out.absolute(), arguments.base.absolute()
    work.mkdir(parents=True, exist_ok=True)
    pairs = []
    for seed in range(arguments.seeds):
        started = {arm: start(work, base, arm, seed, arguments) for arm in arms}
        for arm, process in started.items():
            if process and process.wait():
                sys.exit(f"{arm}, seed {seed} failed: {work / f'{arm}-{seed}.log'}")
        runs = {arm: clocked(work / f"{arm}-{seed}") for arm in arms}
        until = min(rows[-1]["clock"] for rows in runs.values())
        pairs.append({arm: figures(rows, until) for arm, rows in runs.items()} | {"until": until})
        print(f"seed {seed}: compared over {until:.0f} s", flush=True)
    (work / f"result-{arguments.arm}.json").write_text(json.dumps(pairs, indent=1))
    print(f"\n| | {' | '.join(arms)} | difference [95 %] |\n|---|---|---|---|")
    for name in pairs[0]["plain"]:
        means = [statistics.mean(pair[arm][name] for pair in pairs) for arm in arms]
        differences = [pair[arguments.arm][name] - pair["plain"][name] for pair in pairs]
        interval = ""
        if len(pairs) > 1:
            low, high = runs_interval(differences)
            interval = f" [{low:+.3f}, {high:+.3f}]"
        print(f"| {name} | {means[0]:,.3f} | {means[1]:,.3f} | {statistics.mean(differences):+,.3f}{interval} |")


if __name__ == "__main__":
    main()
