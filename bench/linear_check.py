"""`policy.compute` fused and fp8 on one GPU: bits of the kernels, errors, milliseconds, TFLOP/s, memory.

    python bench/linear_check.py               # about a minute on an H200; --part kernels errors: no clock
    python bench/linear_check.py --rehearse    # tiny shapes on a CPU, kernels in Triton's interpreter

kernels: kit/weights/fp8_kernel.py against its reference implementation in PyTorch, bit for bit, and against vLLM's own
kernel if vllm is installed (linear_kernels.py). errors: output and gradients of one layer, and of q, k and v as one
function, against float64. conversion: ms for all 252 linear layers of a Qwen3-8B shape. pieces: ms of each operation
of one layer, and of two layers with one input. block: the seven linear layers of one decoder layer, forward and
backward, LoRA of rank 16 in float32 on all, autocast, by peft's path, fused and fp8.

A failed case is reported and the others continue. The tables come last; exit 1 when a bound is missed.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.linear_kernels import case, check_kernels, interpret, make_layer, relative, run_parts

# (out, in) of a Qwen3-8B decoder layer; a model has 36.
SHAPES = {
    "q_proj": (4096, 4096),
    "k_proj": (1024, 4096),
    "v_proj": (1024, 4096),
    "o_proj": (4096, 4096),
    "gate_proj": (12288, 4096),
    "up_proj": (12288, 4096),
    "down_proj": (4096, 12288),
}
TINY = {name: (out // 32, in_ // 32) for name, (out, in_) in SHAPES.items()}
LAYERS, RANK = 36, 16
PARTS = ("kernels", "errors", "conversion", "pieces", "block")
MOST_MS = 12.0  # NF4 to FP8, all layers
LEAST_SPEEDUP = {"fused": 1.0, "fp8": 1.25}  # over peft's path, at the most tokens
MOST_ERROR = {"fused": 0.006, "fp8": 0.05}  # relative, of y and dx; dA and dB are BF16 products in both
ROUNDED = 0.006  # of an FP8 product against the same numbers in float32, including BF16 rounding

tables: list[str] = []


def adapted(layer: Any) -> Any:
    """A peft layer around `layer`, with a nonzero adapter in float32."""
    import torch
    from peft import LoraConfig
    from peft.tuners.lora.bnb import Linear4bit

    module = Linear4bit(layer, "default", config=LoraConfig(r=RANK, lora_alpha=2 * RANK), r=RANK, lora_alpha=2 * RANK)
    torch.nn.init.normal_(module.lora_B["default"].weight, std=0.01)
    return module.to(layer.weight.device)


def check_errors(device: str) -> None:
    """Check y, dx, dA, dB of one layer against float64, by every path, and the error of the FP8 products alone."""
    import copy

    import torch

    from kit.policy.fused_linear import use_fused_linears

    lines = ["relative error against float64 | y | dx | dA | dB"]
    tiny = device == "cpu"
    grid = (
        [((96, 128), 40), ((96, 128), 1)]
        if tiny
        else [((12288, 4096), 4096), ((4096, 12288), 1003), ((1024, 4096), 1)]
    )
    for (out, in_), tokens in grid:
        for bias in (False, True):
            module = adapted(make_layer((out, in_), torch.bfloat16, device, bias=bias))
            x = torch.randn(1, tokens, in_, device=device).bfloat16()
            g = (1e-8 * torch.randn(1, tokens, out, device=device)).bfloat16()
            exact = exact_results(module, x, g)
            for compute in ("peft", "fused", "fp8"):
                name = f"{compute}, {out} x {in_}, {tokens} tokens, bias {bias}"
                with case(name):
                    held = torch.nn.ModuleDict({"layer": copy.deepcopy(module)})
                    if compute != "peft":
                        use_fused_linears(held, compute)
                    errors = [relative(*pair) for pair in zip(results(held["layer"], x, g), exact, strict=True)]
                    lines.append(" | ".join([name, *(f"{error:.5f}" for error in errors)]))
                    worst = MOST_ERROR[compute] if compute != "peft" else 1.0
                    assert max(errors[:2]) < worst, f"y {errors[0]:.4f}, dx {errors[1]:.4f}, bound {worst}"
                    assert max(errors[2:]) < 0.012, f"dA {errors[2]:.4f}, dB {errors[3]:.4f}, bound 0.012"
    tables.append("\n".join(lines))
    check_products([(96, 128)] if tiny else [(4096, 12288)], 40 if tiny else 2048, device)
    check_products([(96, 128), (32, 128)] if tiny else [SHAPES["gate_proj"]] * 2, 40 if tiny else 2048, device)
    check_group(TINY if tiny else SHAPES, 40 if tiny else 2048, device)


def check_products(shapes: list[tuple[int, int]], tokens: int, device: str) -> None:
    """Check the FP8 products of layers with one input against the same FP8 numbers multiplied in float64."""
    import torch

    from kit.policy import fused_linear
    from kit.weights import stored_weight

    held = torch.nn.ModuleList(make_layer(shape, torch.bfloat16, device) for shape in shapes)
    fused_linear.use_fused_linears(held, "fp8")
    products = [one.product for one in held]
    scales = [product.scale() for product in products]
    weights = [stored_weight.weight_in_torch(one, scale).double() for one, scale in zip(held, scales, strict=True)]
    x = torch.randn(tokens, shapes[0][1], device=device).bfloat16()
    gs = [torch.randn(tokens, out, device=device).bfloat16() for out, _ in shapes]
    rows = stored_weight.quantize_rows_in_torch(x)
    gradient = stored_weight.quantize_rows_in_torch(
        torch.cat(gs, 1), stored_weight.LEAST_GRADIENT_SCALE, torch.cat(scales)
    )
    for name, found, value, right, by in (
        (
            "forward",
            products[0].forward(x, stored_weight.quantize_rows(x)),
            rows,
            weights[0].t(),
            scales[0].view(1, -1),
        ),
        ("backward", fused_linear.input_gradient(products, gs), gradient, torch.cat(weights), 1.0),
    ):
        with case(f"FP8 product, {name}, {shapes}, {tokens} tokens"):
            error = relative(found, (value[0].double() @ right) * value[1] * by)
            tables.append(f"FP8 product, {name}, {shapes}, against the same numbers in float64: error {error:.5f}")
            assert error < ROUNDED, f"{error:.5f}, bound {ROUNDED}"


def check_group(shapes: dict, tokens: int, device: str) -> None:
    """Check q, k and v as one function: every y, dA and dB, and the sum of their dx, against float64."""
    import torch

    from kit.policy import fused_linear

    names = fused_linear.SAME_INPUT[0]
    for compute in ("fused", "fp8"):
        with case(f"{compute}, q, k and v together, {tokens} tokens"):
            held = torch.nn.ModuleDict(
                {name: adapted(make_layer(shapes[name], torch.bfloat16, device)) for name in names}
            )
            fused_linear.use_fused_linears(held, compute)
            x = torch.randn(1, tokens, shapes["q_proj"][1], device=device).bfloat16()
            gs = [1e-8 * torch.randn(1, tokens, shapes[name][0], device=device).bfloat16() for name in names]
            exact = [exact_results(held[name], x, g) for name, g in zip(names, gs, strict=True)]
            x.requires_grad_()
            with torch.autocast(x.device.type, torch.bfloat16):
                ys = [held[name](x) for name in names]
            assert ys[0].grad_fn is ys[2].grad_fn, "they are not one function"
            torch.autograd.backward(ys, gs)
            errors = {"dx": relative(x.grad, sum(one[1] for one in exact))}
            for name, y, (wanted, _, da, db) in zip(names, ys, exact, strict=True):
                errors[f"y {name}"] = relative(y, wanted)
                errors[f"dA {name}"] = relative(held[name].lora_A["default"].weight.grad, da)
                errors[f"dB {name}"] = relative(held[name].lora_B["default"].weight.grad, db)
            tables.append(f"{compute}, q, k, v: " + ", ".join(f"{key} {error:.5f}" for key, error in errors.items()))
            for key, error in errors.items():
                bound = 0.012 if key.startswith("d") and key != "dx" else MOST_ERROR[compute]
                assert error < bound, f"{key} {error:.4f}, bound {bound}"


def results(module: Any, x: Any, g: Any) -> tuple:
    import torch

    x = x.clone().requires_grad_()
    with torch.autocast(x.device.type, torch.bfloat16):
        y = module(x)
    y.backward(g)
    return y.detach(), x.grad, module.lora_A["default"].weight.grad, module.lora_B["default"].weight.grad


def exact_results(module: Any, x: Any, g: Any) -> tuple:
    """Results in float64 from the numbers that the layer computes with: dequantized weight, adapter in bfloat16."""
    from kit.weights.frozen_base import dequantize

    weight, s = dequantize(module).double(), module.scaling["default"]
    a, b = (part["default"].weight.detach().bfloat16().double() for part in (module.lora_A, module.lora_B))
    rows, gradient = x[0].double(), g[0].double()
    y = rows @ weight.t() + s * (rows @ a.t()) @ b.t()
    if module.base_layer.bias is not None:
        y = y + module.base_layer.bias.double()
    gb = gradient @ b
    return y[None], (gradient @ weight + s * gb @ a)[None], s * gb.t() @ rows, s * gradient.t() @ (rows @ a.t())


def milliseconds(function: Callable[[], Any], device: str, repeats: int = 10) -> float:
    """Median milliseconds of a call; on a GPU by events, after two calls."""
    import torch

    times = []
    for turn in range(repeats + 2):
        if device == "cpu":
            started = time.perf_counter()
            function()
            spent = 1e3 * (time.perf_counter() - started)
        else:
            begin, end = torch.cuda.Event(True), torch.cuda.Event(True)
            begin.record()
            function()
            end.record()
            torch.cuda.synchronize()
            spent = begin.elapsed_time(end)
        times += [spent] if turn >= 2 else []
    return statistics.median(times)


def check_conversion(device: str, shapes: dict) -> None:
    """Time one decoder layer, scaled to all layers of the model; launched ahead of the GPU, as in training."""
    import torch
    from bitsandbytes.functional import dequantize_4bit

    from kit.weights import fp8, fp8_kernel, stored_weight

    layers = [make_layer(shape, torch.bfloat16, device) for shape in shapes.values()]
    scales = [fp8.row_scales(stored_weight.weight_in_torch(layer), fp8.LEAST_SCALE) for layer in layers]
    pairs = list(zip([(one.weight.data, one.weight.quant_state) for one in layers], scales, strict=True))
    ways = {
        "to BF16, bitsandbytes": lambda: [dequantize_4bit(*packed) for packed, _ in pairs * 4],
        "to BF16": lambda: [fp8_kernel.unpack(*packed) for packed, _ in pairs * 4],
        "to FP8": lambda: [fp8_kernel.unpack(*packed, scale) for packed, scale in pairs * 4],
        "to FP8, transposed": lambda: [fp8_kernel.unpack(*packed, scale, True) for packed, scale in pairs * 4],
    }
    lines = [f"NF4, all {LAYERS * len(shapes)} linear layers | ms"]
    for name, way in ways.items():
        with case(f"conversion {name}"):
            spent = milliseconds(way, device) * LAYERS / 4
            lines.append(f"{name} | {spent:.1f}")
            assert device == "cpu" or "FP8" not in name or spent <= MOST_MS, f"{spent:.1f} ms, bound {MOST_MS}"
    tables.append("\n".join(lines))


def measure_pieces(device: str, shape: tuple[int, int], tokens: int) -> None:
    import torch

    from kit.policy import fused_linear
    from kit.weights import stored_weight

    (out, in_), bf16 = shape, torch.bfloat16
    holder = torch.nn.ModuleDict({"layer": make_layer(shape, bf16, device)})
    fused_linear.use_fused_linears(holder, "fp8")
    layer, scale = holder["layer"], holder["layer"].product.scale()
    x, g = (torch.randn(tokens, n, device=device).to(bf16) for n in (in_, out))
    a, b = torch.randn(RANK, in_, device=device).to(bf16), torch.randn(out, RANK, device=device).to(bf16)
    weight, y, dx = stored_weight.weight_of(layer), torch.empty_like(g), torch.empty_like(x)
    codes, turned = stored_weight.weight_of(layer, scale), stored_weight.weight_of(layer, scale, True)
    (xq, xs), (gq, gs) = (
        stored_weight.quantize_rows(x),
        stored_weight.quantize_rows(g, stored_weight.LEAST_GRADIENT_SCALE, scale),
    )
    ones, xa, gb = scale.new_ones(1, in_), x @ a.t(), g @ b
    h, gb2, a2, product = torch.randn_like(g), torch.cat([gb, gb], 1), torch.cat([a, a]), holder["layer"].product

    def slow(left: Any, right: Any, rows: Any, columns: Any) -> Any:
        return torch._scaled_mm(left, right.t(), rows, columns, out_dtype=bf16, use_fast_accum=False)

    ways = {
        "x Wᵀ, BF16": lambda: x @ weight.t(),
        "x Wᵀ, FP8": lambda: stored_weight.scaled_product(xq, codes, xs, scale.view(1, -1), bf16),
        "x Wᵀ, FP8, slow accumulation": lambda: slow(xq, codes, xs, scale.view(1, -1)),
        "g W, BF16": lambda: g @ weight,
        "g W, FP8": lambda: stored_weight.scaled_product(gq, turned, gs, ones, bf16),
        "g W, FP8, slow accumulation": lambda: slow(gq, turned, gs, ones),
        "W to BF16": lambda: stored_weight.weight_of(layer),
        "W to FP8": lambda: stored_weight.weight_of(layer, scale),
        "W to FP8, transposed": lambda: stored_weight.weight_of(layer, scale, True),
        "x to FP8": lambda: stored_weight.quantize_rows(x),
        "g to FP8": lambda: stored_weight.quantize_rows(g, stored_weight.LEAST_GRADIENT_SCALE, scale),
        "x Aᵀ": lambda: x @ a.t(),
        "y += (x Aᵀ) Bᵀ": lambda: fused_linear.add_low_rank(y, xa, b.t(), 2.0),
        "y += (x Aᵀ) Bᵀ, addmm": lambda: y.addmm_(xa, b.t(), alpha=2.0),
        "g B": lambda: g @ b,
        "dx += (g B) A": lambda: fused_linear.add_low_rank(dx, gb, a, 2.0),
        "dx += (g B) A, addmm": lambda: dx.addmm_(gb, a, alpha=2.0),
        "dx += (g B) A, two layers": lambda: fused_linear.add_low_rank(dx, gb2, a2, 2.0),
        "x Aᵀ, two layers": lambda: x @ a2.t(),
        "dA, two layers": lambda: fused_linear.gradient(gb2.t(), x, torch.float32),
        "g to FP8, two layers": lambda: stored_weight.quantize_gradients([g, h], [scale, scale]),
        "dX of two layers, FP8, with all conversions": lambda: fused_linear.input_gradient([product] * 2, [g, h]),
        "dX of one layer, FP8, with all conversions": lambda: fused_linear.input_gradient([product], [g]),
        "dA": lambda: fused_linear.gradient(gb.t(), x, torch.float32),
        "dB": lambda: fused_linear.gradient(g.t(), xa, torch.float32),
    }
    lines = [f"{out} x {in_}, {tokens} tokens | ms | TFLOP/s or GB/s"]
    flops, (wide, narrow) = 2 * out * in_ * tokens, (2 * out * tokens, 2 * in_ * tokens)
    moved = {"x Aᵀ": narrow, "dA": narrow, "g B": wide, "dB": wide, "x to FP8": 1.5 * narrow, "g to FP8": 1.5 * wide}
    moved |= {"y += (x Aᵀ) Bᵀ": 2 * wide, "dx += (g B) A": 2 * narrow, "g to FP8, two layers": 3 * wide}
    moved |= {"y += (x Aᵀ) Bᵀ, addmm": 2 * wide, "dx += (g B) A, addmm": 2 * narrow}
    moved |= {"dx += (g B) A, two layers": 2 * narrow, "x Aᵀ, two layers": narrow, "dA, two layers": narrow}
    moved |= {"W to BF16": 2.53 * out * in_, "W to FP8": 1.53 * out * in_, "W to FP8, transposed": 1.53 * out * in_}
    for name, way in ways.items():
        if device == "cpu" and "slow" in name:  # torch's own emulation has no such kernel
            continue
        with case(f"pieces {name}"):
            spent = milliseconds(way, device)
            work = flops * (2 if name.startswith("dX of two") else 1)
            rate = f"{moved[name] / spent / 1e6:.0f} GB/s" if name in moved else f"{work / spent / 1e9:.0f} TFLOP/s"
            lines.append(f"{name} | {spent:.3f} | {rate}")
    tables.append("\n".join(lines))


def check_block(device: str, shapes: dict, tokens: list[int]) -> None:
    """Counts only the base's products, 4 operations per weight and token; peak memory beyond prior allocations."""
    import torch

    from kit.policy.fused_linear import use_fused_linears

    lines = ["seven linear layers, forward + backward | tokens | ms | TFLOP/s | x peft | peak GiB"]
    count = sum(out * in_ for out, in_ in shapes.values())
    for number in tokens:
        x = torch.randn(number, shapes["q_proj"][1], device=device).bfloat16()
        gradients = {
            name: 1e-4 * torch.randn(number, shapes[name][0], device=device).bfloat16()
            for name in ("k_proj", "v_proj", "up_proj", "down_proj")
        }
        spent: dict[str, float] = {}
        for compute in ("peft", "fused", "fp8"):
            with case(f"block {compute}, {number} tokens"):
                held = torch.nn.ModuleDict(
                    {name: adapted(make_layer(shape, torch.bfloat16, device)) for name, shape in shapes.items()}
                )
                if compute != "peft":
                    use_fused_linears(held, compute)
                spent[compute], peak = ms, peak = run_block(held, x, gradients, device)
                speedup, rate = spent["peft"] / ms, 4 * count * number / ms / 1e9
                lines.append(f"{compute} | {number:,} | {ms:.2f} | {rate:.0f} | {speedup:.2f} | {peak:.2f}")
                least = LEAST_SPEEDUP.get(compute, 0.0) if number == max(tokens) and device != "cpu" else 0.0
                assert speedup >= least, f"{speedup:.2f} times peft's path, bound {least}"
    tables.append("\n".join(lines))


def run_block(held: Any, x: Any, gradients: dict, device: str) -> tuple[float, float]:
    import torch

    def once() -> None:
        x.requires_grad_().grad = None
        with torch.autocast(x.device.type, torch.bfloat16):
            q, k, v = (held[name](x) for name in ("q_proj", "k_proj", "v_proj"))
            hidden = held["o_proj"](q)
            gate, up = held["gate_proj"](hidden), held["up_proj"](hidden)
            down = held["down_proj"](gate)
        torch.autograd.backward([k, v, up, down], list(gradients.values()))

    once()
    if device == "cpu":
        return milliseconds(once, device, 1), 0.0
    torch.cuda.synchronize()
    x.grad, before = None, torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    once()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30
    return milliseconds(once, device), peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes on a CPU; no bound on a clock")
    options = parser.parse_args()
    device, shapes, tokens = ("cpu", TINY, [64]) if options.rehearse else ("cuda", SHAPES, [2048, 8192, 16384])
    if options.rehearse:
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
        interpret()
    import torch

    if not options.rehearse and not torch.cuda.is_available():
        raise SystemExit("there is no GPU; --rehearse runs tiny shapes on a CPU")
    torch.manual_seed(0)
    parts: dict[str, Callable[[], None]] = {
        "kernels": lambda: check_kernels(device, sorted(set(SHAPES.values()))),
        "errors": lambda: check_errors(device),
        "conversion": lambda: check_conversion(device, shapes),
        "pieces": lambda: [measure_pieces(device, shapes[name], tokens[-1]) for name in ("gate_proj", "down_proj")],
        "block": lambda: check_block(device, shapes, tokens),
    }
    run_parts(parts, options.part, options.rehearse, tables)


if __name__ == "__main__":
    main()
