"""The quickstart's model on one GPU, in BF16: does it learn, and does the gain survive?

    python bench/path_tiny.py --base models/tiny-base --work /tmp/pathtiny

Trains 80 steps in process, merges, quantizes and evaluates. Prints rewards per 10 steps, the matrix, and whether step
1's KL is only rounding: the policy with a fresh adapter against the adapter disabled. For samplers see
reward_equality.py.
"""

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from path_8b import ROOT, command

CONFIG = "recipes/configs/grpo-tiny-nf4-cpu.yaml"


def train(name: str, work: Path, base: Path) -> list[dict]:
    launch = ["-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/one_gpu.yaml"]
    keys = ["--run.name", name, "--run.output_dir", str(work / name), "--model.path", str(base)]
    keys += ["--data.path", str(base), "--model.dtype", "bfloat16"]
    seconds, _ = command(name, [*launch, "recipes/grpo_qlora.py", "--config", CONFIG, *keys], work)
    rows = [json.loads(line) for line in (work / name / "metrics.jsonl").read_text().splitlines()]
    print(f"{name}: {seconds:.0f} s", flush=True)
    return rows


def first_step_difference(base: Path) -> None:
    """Largest |Δlogit| between a fresh adapter and none, with and without gradients."""
    import torch
    from peft import get_peft_model

    from kit.core.config.load import load_config
    from kit.policy.load import lora_config
    from kit.weights.frozen_base import load_nf4

    config = load_config(ROOT / CONFIG, ["--run.name", "probe"])
    model = get_peft_model(load_nf4(base, "bfloat16"), lora_config(config.policy))
    tokens = torch.arange(20, 84, device="cuda").repeat(8, 1)  # (B, T)

    def logits(adapter: bool, gradients: bool) -> torch.Tensor:
        with torch.set_grad_enabled(gradients), torch.autocast("cuda", torch.bfloat16):
            if adapter:
                return model(input_ids=tokens).logits.detach().float()
            with model.disable_adapter():
                return model(input_ids=tokens).logits.detach().float()

    plain = logits(False, False)
    for adapter in (False, True):
        for gradients in (False, True):
            gap = (logits(adapter, gradients) - plain).abs().max().item()
            print(
                f"adapter {'on' if adapter else 'off'}, gradients {'on' if gradients else 'off'}: max |Δlogit| {gap}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--base", type=Path, required=True, help="what recipes/tiny_base.py wrote")
    parser.add_argument("--work", type=Path, default=Path("/tmp/pathtiny"))
    options = parser.parse_args()
    work, base = options.work, options.base.resolve()
    work.mkdir(parents=True, exist_ok=True)
    first_step_difference(base)
    rows = train("inproc", work, base)
    run = str(work / "inproc")
    command("merge", ["-m", "merge", "--run", run, "--format", "bf16", "fp8", "w4a16"], work)
    started = time.perf_counter()
    _, text = command("eval", ["-m", "eval", "--run", run, "--eval.batch_size", "300"], work)
    print(text[-2600:], f"eval {time.perf_counter() - started:.0f} s")
    means = [sum(row["reward"] for row in rows[i : i + 10]) / 10 for i in range(0, len(rows), 10)]
    print("reward per 10 steps", " ".join(f"{mean:.3f}" for mean in means))
    print(f"step 1 kl {rows[0]['kl']:.2e}, step seconds {rows[-1]['seconds']}")


if __name__ == "__main__":
    main()
