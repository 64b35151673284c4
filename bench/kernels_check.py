"""Norms, rotary embedding and SwiGLU by torch, liger and torch.compile, and the cost of recomputation, block by block.

    python bench/kernels_check.py                 # one GPU, about a minute
    python bench/kernels_check.py --rehearse      # the path on a CPU: small, without liger, no bounds on time

Four decoder layers of Qwen3-8B's shape with random NF4 weights and LoRA of rank 16 on all linear layers, as the recipe
builds them (`policy.compute` fused or plain), bfloat16. Values: hidden states and the adapter's gradients against
torch's with everything kept. On a GPU the attention backward adds in no fixed order, so equal means within a bound:
`SAME` for recomputation, `HIDDEN` and `GRADIENT` for other kernels, as relative distances (L2). Seconds and peak
memory are those of a forward and a backward pass through the layers, divided by their number; memory counts only what
exceeds the prior allocations. Prints a table last; exits 1 when a bound is missed.
"""

import argparse
import copy
import statistics
import sys
import time
import types
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from kit.core.config.load import config_from_dict
from kit.core.config.schema import Config
from kit.policy.fused_linear import use_fused_linears
from kit.policy.liger import _with_rotary, check_kernels, use_kernels
from kit.policy.recompute import use_recompute

LAYERS, RANK = 4, 16
SHAPE = {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8}
SMALL = {"hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2}
BATCHES, SMALL_BATCHES = [(8, 1024), (8, 2048)], [(2, 64)]
SAME, HIDDEN, GRADIENT = 0.005, 0.02, 0.05
# compute, kernels, recompute; "offload" is "full" with the layers' inputs in host memory
VARIANTS = [
    *(("plain", kernels, "none") for kernels in ("torch", "compile", "liger")),
    *(("fused", kernels, "none") for kernels in ("torch", "compile", "liger")),
    *(("fused", "torch", recompute) for recompute in ("selective", "full", "offload")),
    *(("fused", "liger", recompute) for recompute in ("selective", "full")),
]


def config(compute: str, kernels: str, recompute: str) -> Config:
    policy = {"compute": compute, "kernels": "liger" if kernels == "liger" else "torch", "lora_rank": RANK}
    values = {"run": {"name": "x"}, "model": {"id": "Qwen/Qwen3-8B"}, "policy": policy}
    offloads = recompute == "offload"
    train = {"max_steps": 1, "recompute": "full" if offloads else recompute, "recompute_offload": offloads}
    return config_from_dict(values | {"train": train})


def make(sizes: dict[str, int], device: str) -> Any:
    """A policy with random weights: NF4 linear layers, adapters with both factors nonzero."""
    import bitsandbytes as bnb
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, Qwen3Config

    from kit.weights.frozen_base import disable_cpu_repacking

    torch.manual_seed(0)
    head = sizes["hidden_size"] // sizes["num_attention_heads"]
    facts = Qwen3Config(**sizes, num_hidden_layers=LAYERS, head_dim=head, vocab_size=512)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(facts, dtype=torch.bfloat16)
    for name, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            made = bnb.nn.Linear4bit(
                *(module.in_features, module.out_features), bias=False, compute_dtype=torch.bfloat16, quant_type="nf4"
            )
            weight = module.weight.data
            made.weight = bnb.nn.Params4bit(weight, requires_grad=False, quant_type="nf4", module=made)
            model.set_submodule(name, made.to(device))
    disable_cpu_repacking(model)
    model.requires_grad_(False)
    model = get_peft_model(model, LoraConfig(r=RANK, target_modules="all-linear", task_type="CAUSAL_LM")).to(device)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn_like(parameter, dtype=torch.float32) * parameter.shape[1] ** -0.5
    return model.train()


def use_compiled(model: Any) -> None:
    """Compile norms, rotary embedding and SwiGLU with torch.compile, each function separately."""
    import importlib

    swiglu = torch.compile(lambda gate, up: torch.nn.functional.silu(gate) * up, dynamic=True)
    rotary = torch.compile(
        importlib.import_module("transformers.models.qwen3.modeling_qwen3").apply_rotary_pos_emb, dynamic=True
    )

    def mlp(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))

    for module in list(model.modules()):
        kind = type(module).__name__
        if kind == "Qwen3RMSNorm":
            module.forward = torch.compile(module.forward, dynamic=True)
        elif kind == "Qwen3MLP":
            module.forward = types.MethodType(mlp, module)
        elif kind == "Qwen3Attention":
            module.forward = types.MethodType(_with_rotary(type(module).forward, rotary), module)


def prepare(model: Any, compute: str, kernels: str, recompute: str) -> Any:
    made, settings = copy.deepcopy(model), config(compute, kernels, recompute)
    if compute != "plain":
        use_fused_linears(made, compute)
    if kernels == "compile":
        use_compiled(made)
    use_kernels(made, settings)
    use_recompute(made, settings)
    if recompute != "none":
        made.gradient_checkpointing_enable()
    return made


def step(model: Any, hidden: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Run forward and backward through the decoder layers; return their hidden states (B, T, H)."""
    model.zero_grad(set_to_none=True)
    with torch.autocast(hidden.device.type, dtype=torch.bfloat16):
        found = model.get_base_model().model(inputs_embeds=hidden, use_cache=False).last_hidden_state
    found.backward(gradient.clone())  # liger's last norm overwrites it
    return found.detach()


def measure(model: Any, hidden: torch.Tensor, gradient: torch.Tensor, repeats: int) -> tuple[float, float]:
    """Median ms of a layer's forward and backward pass, and peak GiB of all layers divided by their number."""
    seconds, peak, cuda = [], 0.0, hidden.is_cuda
    for number in range(repeats + 2):
        model.zero_grad(set_to_none=True)
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        started = time.perf_counter()
        step(model, hidden, gradient)
        if cuda:
            torch.cuda.synchronize()
            peak = (torch.cuda.max_memory_allocated() - before) / 2**30
        if number >= 2:  # the first ones compile
            seconds.append(time.perf_counter() - started)
    return 1e3 * statistics.median(seconds) / LAYERS, peak / LAYERS


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found.float() - wanted.float()).norm() / wanted.float().norm()).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--rehearse", action="store_true", help="on a CPU: small, without liger and torch.compile")
    parser.add_argument("--repeats", type=int, default=5, help="timed passes of each variant")
    options = parser.parse_args()
    device = "cpu" if options.rehearse else "cuda"
    sizes, batches = (SMALL, SMALL_BATCHES) if options.rehearse else (SHAPE, BATCHES)
    variants = [one for one in VARIANTS if not options.rehearse or one[1] == "torch"]
    check_kernels(config("plain", "torch" if options.rehearse else "liger", "none"), "qwen3")
    model, rows, missed = make(sizes, device), [], []
    for batch in batches:
        torch.manual_seed(1)
        hidden = torch.randn(*batch, sizes["hidden_size"], device=device, dtype=torch.bfloat16).requires_grad_()
        gradient = torch.randn_like(hidden)
        wanted: dict[str, Any] = {}
        for compute, kernels, recompute in variants:
            made = prepare(model, compute, kernels, recompute)
            found = step(made, hidden, gradient)
            gradients = {name: one.grad.clone() for name, one in made.named_parameters() if one.grad is not None}
            # Compare with the same kernels and products with everything kept, else with torch's kernels.
            same = wanted.get((compute, kernels))
            states, others = (
                same or wanted.get((compute, "torch")) or wanted.get(("plain", "torch")) or (found, gradients)
            )
            far = distance(found, states)
            furthest = max(distance(gradients[name], others[name]) for name in others)
            bounds = (SAME, SAME) if same else (HIDDEN, GRADIENT)
            if not (far <= bounds[0] and furthest <= bounds[1]):
                missed.append(f"{compute} {kernels} {recompute}: {far:.4f}, {furthest:.4f}, bounds {bounds}")
            if recompute == "none":
                wanted[compute, kernels] = (found, gradients)
            milliseconds, peak = measure(made, hidden, gradient, options.repeats)
            shown = (f"{batch[0]} x {batch[1]}", compute, kernels, recompute, f"{far:.5f}", f"{furthest:.5f}")
            rows.append((*shown, f"{milliseconds:.2f}", f"{peak:.3f}"))
            print("POINT", *rows[-1], flush=True)
            del made, found, gradients
    head = ("tokens", "compute", "kernels", "recompute", "hidden off", "gradient off", "ms a layer", "GiB a layer")
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print("\n".join(["missed: " + one for one in missed]) or "every bound held")
    raise SystemExit(bool(missed))


if __name__ == "__main__":
    main()
