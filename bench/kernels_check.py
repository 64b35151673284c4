"""Norms, rotary embedding and SwiGLU by torch, liger, torch.compile and the kit, and the cost of recomputation.

    python bench/kernels_check.py                 # one GPU, about a minute
    python bench/kernels_check.py --rehearse      # on a CPU: small, without liger, the kit's kernels interpreted

Four decoder layers of Qwen3-8B's shape with random NF4 weights and LoRA of rank 16 on all linear layers, as the recipe
builds them (`policy.compute` fused or plain), bfloat16. Values: hidden states and the adapter's gradients against
torch's with everything kept. On a GPU the attention backward adds in no fixed order, so equal means within a bound:
`SAME` for recomputation, `HIDDEN` and `GRADIENT` for other kernels, as relative distances (L2). Seconds and peak
memory are those of a forward and a backward pass through the layers, divided by their number; memory counts only what
exceeds the prior allocations. Before, the kernels of kit/policy/norm_kernel.py against their reference implementation,
with milliseconds and GB/s on a GPU. Prints tables last; exits 1 when a bound is missed.
"""

import argparse
import copy
import os
import statistics
import sys
import time
import types
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
if "--rehearse" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

import torch

from bench.linear_check import milliseconds
from bench.linear_kernels import case, interpret, run_parts
from kit.core.config.load import config_from_dict
from kit.core.config.schema import Config
from kit.policy.fused_linear import use_fused_linears
from kit.policy.layer_kernels import check_kernels, use_kernels
from kit.policy.liger import with_rotary
from kit.policy.recompute import use_recompute

LAYERS, RANK = 4, 16
PARTS = ("kernels", "layers")
SHAPE = {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8}
SMALL = {"hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2}
BATCHES, SMALL_BATCHES = [(8, 1024), (8, 2048)], [(2, 64)]
SAME, HIDDEN, GRADIENT = 0.005, 0.02, 0.05
MOST_OTHER = 0.02  # share of values that round to another number than the reference's
# compute, kernels, recompute; "offload" is "full" with the layers' inputs in host memory
VARIANTS = [
    *(("plain", kernels, "none") for kernels in ("torch", "compile", "liger", "fused")),
    *(("fused", kernels, "none") for kernels in ("torch", "compile", "liger", "fused")),
    *(("fused", "torch", recompute) for recompute in ("selective", "full", "offload")),
    *(("fused", kernels, recompute) for kernels in ("liger", "fused") for recompute in ("selective", "full")),
]

tables: list[str] = []


def config(compute: str, kernels: str, recompute: str) -> Config:
    policy = {"compute": compute, "kernels": "torch" if kernels == "compile" else kernels, "lora_rank": RANK}
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
            module.forward = types.MethodType(with_rotary(type(module).forward, rotary), module)


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


def check_norm_kernels(sizes: dict[str, int], device: str) -> None:
    """Compare every kernel of norm_kernel.py with its reference implementation, and time it on a GPU."""
    from kit.policy import fused_norms, norm_kernel

    cuda, rows = device == "cuda", ["kernel | shape | ms | GB/s"]
    hidden, heads, others = (sizes[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    dim, tokens = hidden // heads, 16384 if cuda else 24

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).bfloat16()

    def compare(title: str, name: str, passes: int, x: torch.Tensor, *others: Any) -> None:
        """Call both functions of a name with x, which may be written over, and the others."""
        kernel, reference = getattr(norm_kernel, name), getattr(fused_norms, f"{name}_in_torch")

        def call(function: Any, given: torch.Tensor) -> list[torch.Tensor]:
            found = function(given, *others)
            return [*found] if isinstance(found, tuple) else [found]

        with case(f"{title}, {tuple(x.shape)}"):
            for wanted, found in zip(call(reference, x), call(kernel, x.clone()), strict=True):
                off = (found.float() - wanted.float()).abs()
                assert torch.isfinite(found).all() and found.shape == wanted.shape
                worst = (off - 2**-6 * wanted.float().abs()).max().item()  # two of the last bits of BF16
                assert worst < 2e-2, f"off by {worst:.4f} more than two of the last bits"
                assert (share := (off != 0).float().mean().item()) < MOST_OTHER, f"{share:.4f} of the values differ"
        if cuda:
            spent = milliseconds(lambda: call(kernel, x), device)
            rows.append(f"{title} | {tuple(x.shape)} | {spent:.3f} | {passes * x.numel() * 2 / spent / 1e6:.0f}")

    torch.manual_seed(0)
    weight = random(hidden)
    for count in (tokens, 3):
        x, more, past, grad = (random(1, count, hidden) for _ in range(4))
        compare("norm", "norm", 2, x, None, weight, 1e-6)
        compare("sum and norm", "norm", 4, x, more, weight, 1e-6)
        compare("norm, gradient", "norm_gradient", 3, grad, None, x, weight, 1e-6)
        compare("norm, gradient and the other", "norm_gradient", 4, grad, past, x, weight, 1e-6)
    gate, up = (random(tokens, sizes["intermediate_size"]) for _ in range(2))
    compare("SwiGLU", "swiglu", 3, gate, up)
    compare("SwiGLU, gradient", "swiglu_gradient", 5, gate, up, random(tokens, sizes["intermediate_size"]))
    weight = random(dim)
    for batch, positions, count in ((1, tokens, heads), (1, tokens, others), (2, 5, 3)):
        x, grad = (random(batch, positions, count, dim).transpose(1, 2) for _ in range(2))
        turns = 1e4 ** -torch.linspace(0, 1, dim // 2, device=device)
        angle = torch.outer(torch.arange(positions, device=device), turns)
        cos, sin = (torch.cat((one, one), -1)[None].bfloat16() for one in (angle.cos(), angle.sin()))
        if batch > 1:
            cos, sin = (torch.cat((one, one.flip(1))) for one in (cos, sin))
            sin = torch.stack((sin, sin), -1)[..., 0]  # strided
        compare("rotary embedding", "rotate", 2, x, None, 0.0, cos, sin)
        compare("of the heads' norm", "rotate", 2, x, weight, 1e-6, cos, sin)
        compare("rotary embedding, gradient", "rotate_gradient", 2, grad, None, None, 0.0, cos, sin)
        compare("of the heads' norm, gradient", "rotate_gradient", 3, grad, x, weight, 1e-6, cos, sin)
    tables.extend(["\n".join(rows)] * cuda)


def check_layers(sizes: dict[str, int], rehearse: bool, repeats: int) -> None:
    """Values, time and memory of decoder layers by kernels, products and recomputation."""
    device, batches = ("cpu", SMALL_BATCHES) if rehearse else ("cuda", BATCHES)
    variants = [one for one in VARIANTS if not rehearse or one[1] in ("torch", "fused")]
    check_kernels(config("plain", "torch" if rehearse else "liger", "none"), "qwen3")
    model = make(sizes, device)
    head = ("tokens", "compute", "kernels", "recompute", "hidden off", "gradient off", "ms a layer", "GiB a layer")
    rows = ["| " + " | ".join(head) + " |\n|" + "---|" * len(head)]
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
            with case(f"{batch[0]} x {batch[1]}, {compute}, {kernels}, {recompute}"):
                assert far <= bounds[0] and furthest <= bounds[1], f"{far:.4f}, {furthest:.4f}, bounds {bounds}"
            if recompute == "none":
                wanted[compute, kernels] = (found, gradients)
            milliseconds, peak = measure(made, hidden, gradient, repeats)
            shown = (f"{batch[0]} x {batch[1]}", compute, kernels, recompute, f"{far:.5f}", f"{furthest:.5f}")
            rows.append("| " + " | ".join((*shown, f"{milliseconds:.2f}", f"{peak:.3f}")) + " |")
            del made, found, gradients
    tables.append("\n".join(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rehearse", action="store_true", help="on a CPU: small, without liger and torch.compile")
    parser.add_argument("--repeats", type=int, default=5, help="timed passes of each variant")
    options = parser.parse_args()
    if options.rehearse:
        interpret()
    sizes = SMALL if options.rehearse else SHAPE
    parts = {
        "kernels": lambda: check_norm_kernels(sizes, "cpu" if options.rehearse else "cuda"),
        "layers": lambda: check_layers(sizes, options.rehearse, options.repeats),
    }
    run_parts(parts, options.part, options.rehearse, tables)


if __name__ == "__main__":
    main()
