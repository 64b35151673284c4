"""One or two GPUs: does a run learn as much with one setting as with another? Default: FP8 products of the base.

    python bench/learning.py --base models/tiny-base --seeds 6 --out learning.json
    python bench/learning.py --base models/tiny-base --variants policy.compute=plain train.beta=0.1

The quickstart's small model in BF16, its policy generating in the trainer's process, every run via the recipe's
command line; all seeds of all variants at once, over the cards in turn, so the seconds mean nothing. A variant is
key=value, several joined by commas; the others are compared with the first, seed by seed: the same problems in the
same order. Prints the first and last ten steps of every run, then each variant's mean and its difference to the first
with a 95 % interval (Student's t over the seeds' differences). Exit 1 when a run fails, does not climb by `CLIMB`, or
an interval's lower end is below -`ALLOWED`: such a setting was not shown to learn as much.
"""

import argparse
import json
import os
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parent / "step"))

from path_8b import CONFIG, command
from servers import card
from split import read_jsonl

from eval.stats import runs_interval

CLIMB, ALLOWED = 0.1, 0.05  # of a reward between 0 and 1
ENDS = 10  # steps at each end of a run


def train(work: Path, base: Path, variant: str, seed: int, steps: int, place: int, gpu: int) -> list[float]:
    """Train one run; return its rewards, step by step."""
    name = f"{variant.replace('=', '-').replace(',', '_')}-{seed}"
    keys: dict[str, Any] = {"run.name": name, "run.output_dir": work / name, "run.seed": seed, "model.path": base}
    keys |= {"data.path": base, "model.dtype": "bfloat16", "train.max_steps": steps, "train.save_steps": steps}
    keys |= dict(part.split("=", 1) for part in variant.split(","))
    words = ["-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/one_gpu.yaml"]
    words += ["--gpu_ids", str(gpu), "--main_process_port", str(29700 + place), "recipes/grpo_qlora.py"]
    command(name, [*words, "--config", CONFIG, *(f"--{key}={value}" for key, value in keys.items())], work)
    return [row["reward"] for row in read_jsonl(work / name / "metrics.jsonl")]


def judge(found: dict[str, dict[int, list[float]]], seeds: int) -> list[str]:
    """Print the table; return the claims that fail."""
    problems, last = [], {}
    for variant, runs in found.items():
        problems += [f"{variant}, seed {seed} failed" for seed in range(seeds) if seed not in runs]
        last[variant] = {seed: statistics.mean(rewards[-ENDS:]) for seed, rewards in runs.items()}
        for seed, rewards in runs.items():
            first = statistics.mean(rewards[:ENDS])
            print(f"{variant}, seed {seed}: {first:.3f} -> {last[variant][seed]:.3f}")
            if last[variant][seed] < first + CLIMB:
                problems.append(f"{variant}, seed {seed} did not climb by {CLIMB}")
    first, *others = found
    for variant in found:
        values = [*last[variant].values()]
        if values:
            print(
                f"{variant}: {statistics.mean(values):.3f}, {min(values):.3f} to {max(values):.3f}, {len(values)} runs"
            )
    for variant in others:
        both = sorted(last[first].keys() & last[variant].keys())
        if len(both) < 2:
            problems.append(f"{variant}: {len(both)} pairs of runs, 2 are needed")
            continue
        differences = [last[variant][seed] - last[first][seed] for seed in both]
        low, high = runs_interval(differences)
        print(f"{variant} minus {first}: {statistics.mean(differences):+.3f} [{low:+.3f}, {high:+.3f}]")
        if low < -ALLOWED:
            problems.append(f"{variant}: the interval's lower end {low:+.3f} is below -{ALLOWED}")
    return problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--base", type=Path, required=True, help="what recipes/tiny_base.py wrote")
    parser.add_argument("--variants", nargs="+", default=["policy.compute=plain", "policy.compute=fp8"])
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--work", type=Path, default=Path("/tmp/learning"))
    parser.add_argument("--out", type=Path, help="JSON with every reward")
    options = parser.parse_args()
    import torch

    cards = torch.cuda.device_count()
    if not cards:
        parser.error("torch sees no GPU")
    os.environ["OMP_NUM_THREADS"] = "1"
    options.work.mkdir(parents=True, exist_ok=True)
    runs, base = {}, options.base.resolve()
    wanted = [(variant, seed) for seed in range(options.seeds) for variant in options.variants]
    with ThreadPoolExecutor(len(wanted)) as pool:
        for place, (variant, seed) in enumerate(wanted):
            runs[variant, seed] = pool.submit(
                train, options.work, base, variant, seed, options.steps, place, card(seed % cards)
            )
    found: dict[str, dict[int, list[float]]] = {variant: {} for variant in options.variants}
    for (variant, seed), run in runs.items():
        if run.exception() is None:
            found[variant][seed] = run.result()
        else:
            print(f"{variant}, seed {seed}: {str(run.exception())[:300]}")
    if options.out:
        options.out.write_text(json.dumps(found, indent=1))
    if problems := judge(found, options.seeds):
        raise SystemExit("\n".join(problems))


if __name__ == "__main__":
    main()
