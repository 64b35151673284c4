"""Seconds a token position of generation in the trainer's process: weights dequantized for every token, weights kept
for the rollout, and plain transformers on the dequantized model without adapter.

    OMP_NUM_THREADS=1 python tests/evidence/generation_speed.py --model models/smollm2-135m
    python tests/evidence/generation_speed.py --model models/smollm2-135m --device cuda --tokens 64 --positions 64

All sides generate in one process, in turns, --rounds times. Prints the median of all positions, its quartiles, the CPU
seconds of all threads, which other work on the machine changes less, and the ratios to the kept side. --positions
limits the side that dequantizes, whose seconds a position do not depend on how many there are. On a CPU this side and
the kept one must sample the same tokens from the same scores, bit for bit; else it ends with 1.
"""

import argparse
import json
import statistics
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LogitsProcessorList

from kit.policy.fused_linear import use_fused_linears
from kit.policy.kept_weights import keeping_weights
from kit.weights.frozen_base import dequantize, load_nf4, plain_name, stored_linears

SIDES = ("dequantized for every token", "kept for the rollout", "plain transformers, no adapter")


class Clock:
    """A logits processor that notes when each position's scores (B, V) were there, and keeps the scores."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.cpu_times: list[float] = []
        self.scores: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if scores.is_cuda:
            torch.cuda.synchronize()
        else:
            self.scores.append(scores.clone())
        self.times.append(time.perf_counter())
        self.cpu_times.append(time.process_time())
        return scores

    @property
    def seconds(self) -> list[tuple[float, float]]:
        """Seconds, and seconds of all CPU threads, of every position behind the prompts' pass."""
        return [
            (self.times[place + 1] - self.times[place], self.cpu_times[place + 1] - self.cpu_times[place])
            for place in range(len(self.times) - 1)
        ]


def make_policy(options: argparse.Namespace) -> Any:
    """An NF4 base with an adapter that is not zero, as the recipe has it."""
    model = load_nf4(options.model, options.dtype, device=options.device)
    torch.manual_seed(0)
    model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.01)
    if options.compute != "plain":
        use_fused_linears(model, options.compute)
    return model.eval()


def make_plain(options: argparse.Namespace, policy: Any) -> Any:
    """The dequantized base as transformers loads any model."""
    dtype = getattr(torch, options.dtype)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).to(options.device)
    layers = {plain_name(name): policy.get_submodule(name) for name in stored_linears(policy)}
    for name, layer in layers.items():
        model.get_submodule(name).weight.data.copy_(dequantize(layer))
    return model.eval()


def sample(model: Any, options: argparse.Namespace, tokens: int) -> tuple[Clock, torch.Tensor]:
    """When each of `tokens` positions was sampled, and the token ids (rows, prompt + tokens)."""
    torch.manual_seed(1)
    ids = torch.randint(10, model.config.vocab_size - 10, (options.rows, options.prompt), device=options.device)
    clock = Clock()
    settings = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": True, "top_k": 0, "top_p": 1.0}
    # As the trainer generates: autocast of its dtype, no gradients.
    autocast = torch.autocast(ids.device.type, torch.bfloat16) if options.dtype == "bfloat16" else nullcontext()
    with torch.no_grad(), autocast:
        made = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            logits_processor=LogitsProcessorList([clock]),
            **settings,
        )
    return clock, made


def measure(options: argparse.Namespace) -> tuple[dict[str, list[tuple[float, float]]], bool]:
    """Seconds of each position by side, and whether the first two sampled the same."""
    policy = make_policy(options)
    plain = make_plain(options, policy)
    seconds: dict[str, list[tuple[float, float]]] = {side: [] for side in SIDES}
    is_same, few = True, min(options.positions, options.tokens)
    sample(plain, options, 4)  # warm up
    for _ in range(options.rounds):
        slow, slow_ids = sample(policy, options, few)
        with keeping_weights(policy, "always"):
            kept, kept_ids = sample(policy, options, options.tokens)
        bare, _ = sample(plain, options, options.tokens)
        for side, clock in zip(SIDES, (slow, kept, bare), strict=True):
            seconds[side] += clock.seconds
        width = options.prompt + few
        is_same &= torch.equal(slow_ids, kept_ids[:, :width])
        is_same &= all(map(torch.equal, slow.scores[: few - 1], kept.scores[: few - 1]))
    return seconds, is_same


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--model", required=True, help="directory of an unquantized checkpoint")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default=None, choices=["float32", "bfloat16"], help="default: bfloat16 on a GPU")
    parser.add_argument("--compute", default="plain", choices=["plain", "fused", "fp8"], help="policy.compute")
    parser.add_argument("--rows", type=int, default=32, help="completions")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of every prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of every completion")
    parser.add_argument("--positions", type=int, default=6, help="tokens at most where every one dequantizes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    options.dtype = options.dtype or ("bfloat16" if options.device == "cuda" else "float32")
    seconds, is_same = measure(options)
    rows = {}
    for side, found in seconds.items():
        low, middle, high = statistics.quantiles([wall for wall, _ in found], n=4)
        rows[side] = {"median_s": middle, "quartiles_s": [low, high], "tokens_per_s": options.rows / middle}
        rows[side]["cpu_s"] = statistics.median(cpu for _, cpu in found)
    for row in rows.values():
        row |= {f"times_{key}": row[key] / rows[SIDES[1]][key] for key in ("median_s", "cpu_s")}
    if options.json:
        print(json.dumps({"options": vars(options), "same": is_same, "sides": rows}))
    else:
        threads = torch.get_num_threads()
        print(f"{options.rows} rows, {options.dtype}, policy.compute {options.compute}, {threads} CPU threads")
        print("| weights | s a position | quartiles | tokens/s | CPU s a position | times kept: s, CPU s |")
        print("|---|---|---|---|---|---|")
        for side, row in rows.items():
            low, high = row["quartiles_s"]
            print(
                f"| {side} | {row['median_s']:.4f} | {low:.4f} to {high:.4f} | {row['tokens_per_s']:.0f} | "
                f"{row['cpu_s']:.3f} | {row['times_median_s']:.2f}, {row['times_cpu_s']:.2f} |"
            )
        print(f"same tokens and scores: {is_same}")
    return 1 if options.device == "cpu" and not is_same else 0


if __name__ == "__main__":
    sys.exit(main())
