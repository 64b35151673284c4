"""Two GPUs: does a trainer of two processes with one server learn what one process learns, however it is split?

    python bench/split.py --base models/tiny-base --steps 25 --out split.json
    python bench/split.py --base models/tiny-base --steps 25 --setups "one process" "ZeRO-3 x 2" "FSDP2 x 2"

The quickstart's small model in BF16, every run via the recipe's command line with a server of its own on GPU 1: one
process on GPU 0, so that trainer and server have a card each; two processes on both, by DDP, ZeRO-2, ZeRO-3 and FSDP2.
All at once, so the seconds mean little. Claims, exit 1 when one fails: one process of each run publishes, once per
optimizer step; every completion was sampled from the newest version; the reward climbs; k3 stays small; two processes
end where one ends; all hashed the same base. ZeRO needs deepspeed. Prints the table last; GiB is the peak that the
main process allocated in rollout and in update. For what a split saves see path_8b.py: this base is too small.
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

SETUPS = {
    "one process": ("one_gpu", 1),
    "DDP x 2": ("ddp", 2),
    "ZeRO-2 x 2": ("zero2", 2),
    "ZeRO-3 x 2": ("zero3", 2),
    "FSDP2 x 2": ("fsdp2", 2),
}
COMPLETIONS = 64  # per step, over all processes
# Three seeds in one process differ by .007 to .04 in the last ten of 40 steps (reward_equality.py); here are fewer.
SPREAD, CLIMB, LARGEST_K3 = 0.1, 0.1, 0.01


def run_flags(work: Path, base: Path, name: str, processes: int, steps: int, port: int) -> list[str]:
    """Command line shared by the trainer and its server."""
    keys: dict[str, Any] = {"run.name": name, "run.output_dir": work / name, "model.path": base, "data.path": base}
    keys |= {"model.dtype": "bfloat16", "train.max_steps": steps, "train.save_steps": steps}
    keys |= {"train.per_device_train_batch_size": COMPLETIONS // processes, "watch.completions_every": 1}
    keys |= {"rollout.backend": "server", "rollout.sync": "remerge", "rollout.max_sampler_k3": 1}
    keys |= {"rollout.server_urls": f"['http://127.0.0.1:{port}']", "server.base": work / "base"}
    keys |= {"server.weights": "bf16", "server.gpus": "[1]", "server.gpu_memory_utilization": 0.1}
    return ["--config", CONFIG, *(f"--{key}={value}" for key, value in keys.items())]


def train(work: Path, base: Path, setup: str, steps: int, place: int) -> Path:
    """Train one run with its server; return its directory."""
    launcher, processes = SETUPS[setup]
    flags = run_flags(work, base, launcher, processes, steps, 8300 + place)
    launch = ["-m", "accelerate.commands.launch", "--config_file", f"accelerate_configs/{launcher}.yaml"]
    # The runs share the machine, so each needs its own rendezvous port.
    launch += ["--num_processes", str(processes), "--main_process_port", str(29600 + place)]
    command(f"{launcher}-server", ["-m", "launch.server", *flags, "--detach"], work)
    try:
        command(launcher, [*launch, "recipes/grpo_qlora.py", *flags], work)
    finally:
        command(f"{launcher}-stop", ["-m", "launch.server", "stop", *flags], work)
    return work / launcher


def read_jsonl(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def facts(run: Path) -> dict[str, Any]:
    """Figures from the files of a run."""
    rows = read_jsonl(run / "metrics.jsonl")
    rewards = [row["reward"] for row in rows]
    sessions = [folder for folder in (run / "sync").iterdir() if folder.is_dir()]
    sampled = {
        row["step"]: [
            line["adapter_version"] for line in read_jsonl(run / f"completions/step-{row['step']:06d}.jsonl")
        ]
        for row in rows
    }
    return {
        "steps": len(rows),
        "syncs": sum(row["sync_seconds"] is not None for row in rows),
        "publishers": len(sessions),
        "last_published": max(json.loads((one / "canary.json").read_text())["version"] for one in sessions),
        "stale_steps": [step for step, versions in sampled.items() if versions != [step - 1] * COMPLETIONS],
        "first": statistics.mean(rewards[:5]),
        "last": statistics.mean(rewards[-5:]),
        "last_ten": statistics.mean(rewards[-10:]),
        "k3": max(row["sampler_k3"] for row in rows),
        "canary": max(row["canary_delta"] or 0.0 for row in rows),
        "step_s": statistics.median(row["seconds"]["step"] for row in rows),
        "sync_s": statistics.median(row["seconds"]["sync"] for row in rows),
        "peak_gib": {phase: max(row["peak_gib"][phase] for row in rows) for phase in ("rollout", "update")},
        "base": json.loads((run / "base.json").read_text())["hash"],
        "problems": [line["problem_ids"] for line in read_jsonl(run / "ledger.jsonl")],
        "rewards": rewards,
    }


def failures(found: dict[str, dict[str, Any]], steps: int) -> list[str]:
    """The claims that fail, each as a sentence with its numbers."""
    problems = []
    for setup, fact in found.items():
        counts = (fact["steps"], fact["syncs"], fact["publishers"], fact["last_published"])
        if counts != (steps, steps, 1, steps - 1):
            problems.append(f"{setup}: steps, syncs, publishers, last version are {counts}, not {steps} syncs by one")
        if fact["stale_steps"]:
            problems.append(f"{setup}: completions of another version than the newest in steps {fact['stale_steps']}")
        if fact["last"] < fact["first"] + CLIMB:
            problems.append(f"{setup}: reward {fact['first']:.3f} -> {fact['last']:.3f}, a gain under {CLIMB}")
        if not fact["k3"] < LARGEST_K3:
            problems.append(f"{setup}: k3 {fact['k3']:.2e}, the limit is {LARGEST_K3}")
    if len(bases := {fact["base"] for fact in found.values()}) > 1:
        problems.append(f"the bases differ: {sorted(bases)}")
    alone = found.get("one process", {}).get("last_ten")
    for setup, fact in found.items():
        if alone is not None and abs(fact["last_ten"] - alone) > SPREAD:
            problems.append(f"{setup}: last ten steps {fact['last_ten']:.3f}, one process {alone:.3f}")
    return problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--base", type=Path, required=True, help="what recipes/tiny_base.py wrote")
    parser.add_argument("--work", type=Path, default=Path("/tmp/split"))
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--setups", nargs="+", choices=SETUPS, default=list(SETUPS))
    parser.add_argument("--out", type=Path, help="JSON with every number")
    options = parser.parse_args()
    work, base = options.work, options.base.resolve()
    work.mkdir(parents=True, exist_ok=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    keys = ["--config", CONFIG, f"--model.path={base}", "--model.dtype=bfloat16", f"--server.base={work / 'base'}"]
    command("base", ["-m", "merge", "base", *keys], work)
    with ThreadPoolExecutor(len(options.setups)) as pool:
        runs = {
            setup: pool.submit(train, work, base, setup, options.steps, place)
            for place, setup in enumerate(options.setups)
        }
    # A failed run leaves the figures of the others intact.
    found = {setup: facts(run.result()) for setup, run in runs.items() if run.exception() is None}
    problems = [f"{setup} did not finish" for setup in runs if setup not in found]
    if options.out:
        options.out.write_text(json.dumps(found, indent=1))
    heads = f"{'syncs':>5} {'reward, 5 steps':>16} {'last 10':>8} {'k3':>8} {'canary':>8} {'step s':>7} {'sync s':>7}"
    print(f"{'':<12} {heads} {'GiB':>11}")
    for setup, fact in found.items():
        reward = f"{fact['first']:.3f} -> {fact['last']:.3f}"
        print(
            f"{setup:<12} {fact['syncs']:>5} {reward:>16} {fact['last_ten']:>8.3f} {fact['k3']:>8.1e} "
            f"{fact['canary']:>8.1e} {fact['step_s']:>7.2f} {fact['sync_s']:>7.3f} "
            f"{fact['peak_gib']['rollout']:>5.2f} {fact['peak_gib']['update']:>5.2f}"
        )
    ledgers = [fact["problems"] for fact in found.values()]
    print(f"the same problems in every step: {all(one == ledgers[0] for one in ledgers)}")
    if problems := problems + failures(found, options.steps):
        raise SystemExit("\n".join(problems))


if __name__ == "__main__":
    main()
