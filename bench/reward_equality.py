"""Does GRPO learn the same from every sampler? FP8 remerge, FP8 adapter, BF16 in the trainer's process; same seeds.

    python bench/reward_equality.py --base models/tiny-base --steps 40 --out rewards.json

The quickstart's small model in BF16 on one GPU, every run via the recipe's command line, the servers via
`python -m launch.server`. All runs at once, so the seconds mean nothing. Prints the table last.
"""

import argparse
import json
import os
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from path_8b import CONFIG, command

MODES = {
    "fp8 remerge": {"rollout.backend": "server", "rollout.sync": "remerge"},
    "fp8 adapter": {"rollout.backend": "server", "rollout.sync": "adapter"},
    "bf16 in process": {},
}


def train(work: Path, base: Path, mode: str, seed: int, steps: int, port: int) -> list[dict]:
    """Train one run, with a server of its own if the mode needs one; return the rows of its metrics.jsonl."""
    name = f"{mode.replace(' ', '-')}-{seed}"
    keys = {"run.name": name, "run.seed": seed, "run.output_dir": work / name, "model.path": base}
    keys |= {"data.path": base, "model.dtype": "bfloat16", "train.max_steps": steps, "train.save_steps": steps}
    keys |= {"server.base": work / "base", "server.kv_cache_gib": 1, "server.enforce_eager": "true"}
    keys |= {"server.weights": "fp8_per_channel", "rollout.server_urls": f"['http://127.0.0.1:{port}']", **MODES[mode]}
    flags = ["--config", CONFIG, *(f"--{key}={value}" for key, value in keys.items())]
    with_server = keys.get("rollout.backend") == "server"
    if with_server:
        command(f"{name}-server", ["-m", "launch.server", *flags, "--detach"], work)
    try:
        command(name, ["recipes/grpo_qlora.py", *flags], work)
    finally:
        if with_server:
            command(f"{name}-stop", ["-m", "launch.server", "stop", *flags], work)
    return [json.loads(line) for line in (work / name / "metrics.jsonl").read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--base", type=Path, required=True, help="what recipes/tiny_base.py wrote")
    parser.add_argument("--work", type=Path, default=Path("/tmp/rewards"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, help="JSON with every number")
    options = parser.parse_args()
    work, base = options.work, options.base.resolve()
    work.mkdir(parents=True, exist_ok=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    keys = ["--config", CONFIG, f"--model.path={base}", "--model.dtype=bfloat16", f"--server.base={work / 'base'}"]
    command("base", ["-m", "merge", "base", *keys], work)
    jobs = [(mode, seed) for mode in MODES for seed in range(options.seeds)]
    with ThreadPoolExecutor(len(jobs)) as pool:
        runs = {
            job: pool.submit(train, work, base, *job, options.steps, 8200 + place) for place, job in enumerate(jobs)
        }
        rows = {job: run.result() for job, run in runs.items()}
    if options.out:
        options.out.write_text(json.dumps({f"{mode}|{seed}": found for (mode, seed), found in rows.items()}))
    print(f"reward, {options.steps} steps, seeds 0 to {options.seeds - 1}: first 10 -> last 10; worst sampler k3")
    means = {}
    for mode in MODES:
        found = [rows[mode, seed] for seed in range(options.seeds)]
        first = [statistics.mean(row["reward"] for row in one[:10]) for one in found]
        last = [statistics.mean(row["reward"] for row in one[-10:]) for one in found]
        k3 = max((row["sampler_k3"] for one in found for row in one if row["sampler_k3"] is not None), default=0.0)
        spread = statistics.stdev(last) if len(last) > 1 else 0.0
        curves = "  ".join(f"{a:.3f} -> {b:.3f}" for a, b in zip(first, last, strict=True))
        means[mode] = statistics.mean(last)
        print(f"{mode:<16}{curves}   mean {statistics.mean(last):.3f} sd {spread:.3f}   k3 {k3:.1e}")
    if max(means.values()) - min(means.values()) > 0.05:
        raise SystemExit(f"the rewards differ by more than 0.05: {means}")


if __name__ == "__main__":
    main()
