"""`policy.compute` fused and fp8 on one GPU: bits of the kernels, errors, milliseconds, TFLOP/s, memory.

    python tests/gpu/linear_check.py               # about a minute on an H200; --part kernels errors: no clock
    python tests/gpu/linear_check.py --rehearse    # tiny shapes on a CPU, kernels in Triton's interpreter

kernels: recipes/parts/fp8_kernel.py against its definition in PyTorch, bit for bit, and against vLLM's own kernel
where vllm is installed. errors: output and gradients of one layer against float64. conversion: ms for all 252 linear
layers of a Qwen3-8B shape. pieces: ms of each operation of one layer. block: the seven linear layers of one decoder
layer, forward and backward, LoRA of rank 16 in float32 on all, autocast, by peft's path, fused and fp8.

A case that fails says so and the others go on. The tables come last; exit 1 when a bound is missed.
"""

import argparse
import contextlib
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

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
ROUNDED = 0.006  # of a product of FP8 numbers against the same in float32, BF16 rounding included

missed: list[str] = []
tables: list[str] = []


@contextlib.contextmanager
def case(name: str) -> Iterator[None]:
    """One case: what it raises is noted, and the next one runs."""
    try:
        yield
        print(f"ok      {name}", flush=True)
    except AssertionError as error:
        missed.append(f"{name}: {error}")
        print(f"missed  {name}: {error}", flush=True)
    except Exception as error:
        missed.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
        print(f"missed  {name}\n{traceback.format_exc()}", flush=True)


def same_bits(found: Any, expected: Any) -> None:
    """`AssertionError` that says how many bytes differ and where first."""
    import torch

    assert found.shape == expected.shape, f"shape {tuple(found.shape)}, not {tuple(expected.shape)}"
    assert found.dtype == expected.dtype, f"{found.dtype}, not {expected.dtype}"
    differs = found.contiguous().view(torch.uint8) != expected.contiguous().view(torch.uint8)
    if count := int(differs.sum()):
        first = [int(n) for n in differs.nonzero()[0]]
        raise AssertionError(f"{count} of {differs.numel()} bytes differ, first at {first}")


def relative(found: Any, expected: Any) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def make_layer(shape: tuple[int, int], dtype: Any, device: str, double: bool = True, bias: bool = False) -> Any:
    import bitsandbytes as bnb
    import torch

    out, in_ = shape
    layer = bnb.nn.Linear4bit(
        in_, out, bias=bias, compute_dtype=dtype, compress_statistics=double, quant_type="nf4"
    ).requires_grad_(False)
    layer.weight.data = (0.02 * torch.randn(out, in_, device=device)).to(dtype).cpu()
    layer.support_avx512bf16_for_cpu = False
    if bias:
        layer.bias.data = layer.bias.data.to(dtype)
    return layer.to(device)


def adapted(layer: Any) -> Any:
    """A peft layer around `layer`, adapter in float32 and not zero."""
    import torch
    from peft import LoraConfig
    from peft.tuners.lora.bnb import Linear4bit

    module = Linear4bit(layer, "default", config=LoraConfig(r=RANK, lora_alpha=2 * RANK), r=RANK, lora_alpha=2 * RANK)
    torch.nn.init.normal_(module.lora_B["default"].weight, std=0.01)
    return module.to(layer.weight.device)


def interpret() -> None:
    """Triton's kernels on a CPU. Its interpreter truncates to FP8 and BF16, a GPU rounds: those come from torch."""
    import numpy as np
    import torch
    import triton.language as tl
    from triton.runtime import interpreter

    from recipes.parts import fp8_kernel

    plain = interpreter._convert_float
    types = {tl.float8e4nv: (torch.float8_e4m3fn, np.uint8), tl.bfloat16: (torch.bfloat16, np.uint16)}

    def convert(values: Any, source: Any, target: Any, mode: Any) -> Any:
        if source != tl.float32 or target not in types:
            return plain(values, source, target, mode)
        dtype, bits = types[target]
        rounded = torch.from_numpy(np.ascontiguousarray(values).view(np.float32)).to(dtype)
        return rounded.view(torch.uint8).numpy().view(bits).reshape(values.shape)

    interpreter._convert_float = convert
    fp8_kernel._on = lambda tensor: contextlib.nullcontext()


def check_kernels(device: str) -> None:
    import torch

    from recipes.parts import fp8_kernel, linear

    cpu = device == "cpu"
    shapes = [(128, 128), (200, 320)] if cpu else [*set(SHAPES.values()), (200, 320), (16, 64), (40, 27648)]
    for shape in shapes:
        for double in (True, False):
            for dtype in (torch.bfloat16, torch.float32):
                name = f"{shape}, double {double}, {str(dtype)[6:]}"
                layer = make_layer(shape, dtype, device, double)
                packed, state = layer.weight.data, layer.weight.quant_state
                packed.view(torch.uint8).view(shape[0], -1)[3] = 0x77  # a row of zeros
                scale = linear.row_scales(linear.weight_in_torch(layer), linear.LEAST_SCALE)
                with case(f"unpack {name}"):
                    same_bits(fp8_kernel.unpack(packed, state), linear.weight_in_torch(layer))
                with case(f"unpack to FP8 {name}"):
                    same_bits(fp8_kernel.unpack(packed, state, scale), linear.weight_in_torch(layer, scale))
                with case(f"unpack to FP8, transposed, {name}"):
                    turned = fp8_kernel.unpack(packed, state, scale, transposed=True)
                    same_bits(turned, linear.weight_in_torch(layer, scale, transposed=True))
    for columns in (64, 130) if cpu else (64, 130, 4096, 12288, 27648):
        for tokens in (1, 37) if cpu else (1, 1003):
            check_rows(tokens, columns, device)
    if not cpu:
        check_far_offsets(device)
        check_against_vllm(device)


def check_rows(tokens: int, columns: int, device: str) -> None:
    import torch

    from recipes.parts import fp8_kernel, linear

    x = torch.randn(tokens, 2 * columns, device=device) * torch.logspace(-9, 2, tokens, device=device)[:, None]
    x = x.bfloat16()[:, :columns]  # rows that do not follow each other in memory
    x[tokens // 2] = 0
    by_column = 1e-4 * torch.rand(columns, device=device)
    for by in (None, by_column):
        for floor in (linear.LEAST_SCALE, linear.LEAST_GRADIENT_SCALE):
            kind = "plain" if by is None else "by column"
            with case(f"rows {tokens} x {columns}, {kind}, floor {floor:.1e}"):
                codes, scale = fp8_kernel.quantize_rows([x], floor, None if by is None else [by])
                expected = linear.quantize_rows_in_torch(x, floor, by)
                same_bits(scale, expected[1])
                same_bits(codes, expected[0])
    with case(f"rows {tokens} x {columns}: what is not a number stays none"):
        for bad in (torch.nan, torch.inf):
            x[0, columns // 3] = bad
            codes, scale = fp8_kernel.quantize_rows([x], linear.LEAST_SCALE)
            assert not torch.isfinite((codes.float() * scale)[0].sum()), f"{bad} became a number"
            assert tokens == 1 or torch.isfinite((codes.float() * scale)[1:].sum()), f"{bad} reached another row"


def check_far_offsets(device: str) -> None:
    """Weights and rows beyond 2^31 values, made of bytes; the last rows against the same bytes alone."""
    import torch
    from bitsandbytes.functional import QuantState, get_4bit_type

    from recipes.parts import fp8_kernel, linear

    rows, columns, last = 65664, 32768, 64
    with case(f"unpack {rows} x {columns}, beyond 2^31 weights"):
        packed = torch.randint(0, 256, (rows * columns // 2, 1), dtype=torch.uint8, device=device)
        absmax = torch.rand(rows * columns // 64, device=device)
        scale = torch.rand(rows, 1, device=device) / 400 + 0.001
        facts = {"blocksize": 64, "quant_type": "nf4", "dtype": torch.bfloat16}
        facts["code"] = get_4bit_type("nf4", device=device)
        state = QuantState(absmax=absmax, shape=torch.Size((rows, columns)), **facts)
        tail = QuantState(absmax=absmax[-last * columns // 64 :], shape=torch.Size((last, columns)), **facts)
        expected = fp8_kernel.unpack(packed[-last * columns // 2 :], tail, scale[-last:])
        same_bits(fp8_kernel.unpack(packed, state, scale)[-last:], expected)
        same_bits(fp8_kernel.unpack(packed, state, scale, transposed=True)[:, -last:], expected.t())
    with case("rows 180,000 x 12,288, beyond 2^31 values"):
        x = torch.randn(180000, 12288, dtype=torch.bfloat16, device=device)
        codes, scale = fp8_kernel.quantize_rows([x], linear.LEAST_SCALE)
        expected = linear.quantize_rows_in_torch(x[-last:])
        same_bits(codes[-last:], expected[0])
        same_bits(scale[-last:], expected[1])


def check_against_vllm(device: str) -> None:
    import torch

    from recipes.parts import fp8_kernel, linear

    try:
        from vllm import _custom_ops
    except Exception as error:
        print(f"without vllm ({type(error).__name__}): its kernel is not compared", flush=True)
        return
    for tokens, columns in ((1003, 4096), (17, 12288)):
        with case(f"rows {tokens} x {columns} against vLLM's dynamic quantization per token"):
            x = torch.randn(tokens, columns, dtype=torch.bfloat16, device=device)
            codes, scale = fp8_kernel.quantize_rows([x], linear.LEAST_SCALE)
            theirs, their_scale = _custom_ops.scaled_fp8_quant(x, use_per_token_if_dynamic=True)
            same_bits(scale, their_scale)
            same_bits(codes, theirs)


def check_errors(device: str) -> None:
    """y, dx, dA, dB of one layer against float64, by every path; the error of the FP8 products alone."""
    import copy

    import torch

    from recipes.parts.linear import use_fused_linears

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
    check_products((96, 128) if tiny else (4096, 12288), 40 if tiny else 2048, device)


def check_products(shape: tuple[int, int], tokens: int, device: str) -> None:
    """The FP8 products against the same FP8 numbers multiplied in float32."""
    import torch

    from recipes.parts import linear

    out, in_ = shape
    holder = torch.nn.ModuleDict({"layer": make_layer(shape, torch.bfloat16, device)})
    linear.use_fused_linears(holder, "fp8")
    product = holder["layer"].product
    x, g = (torch.randn(tokens, n, device=device).bfloat16() for n in (in_, out))
    scale = product.scale()
    weight = linear.weight_in_torch(holder["layer"], scale).double()
    rows = linear.quantize_rows_in_torch(x)
    gradient = linear.quantize_rows_in_torch(g, linear.LEAST_GRADIENT_SCALE, scale)
    for name, found, value, right, by in (
        ("forward", product.forward(x, linear.quantize_rows(x)), rows, weight.t(), scale.view(1, -1)),
        ("backward", linear.input_gradient([product], [g]), gradient, weight, 1.0),
    ):
        with case(f"FP8 product, {name}, {out} x {in_}, {tokens} tokens"):
            error = relative(found, (value[0].double() @ right) * value[1] * by)
            tables.append(f"FP8 product, {name}, against the same numbers in float64: relative error {error:.5f}")
            assert error < ROUNDED, f"{error:.5f}, bound {ROUNDED}"


def results(module: Any, x: Any, g: Any) -> tuple:
    import torch

    x = x.clone().requires_grad_()
    with torch.autocast(x.device.type, torch.bfloat16):
        y = module(x)
    y.backward(g)
    return y.detach(), x.grad, module.lora_A["default"].weight.grad, module.lora_B["default"].weight.grad


def exact_results(module: Any, x: Any, g: Any) -> tuple:
    """Of the numbers that the layer computes with: the dequantized weight, the adapter in bfloat16."""
    from merge.base import dequantize

    weight, s = dequantize(module).double(), module.scaling["default"]
    a, b = (part["default"].weight.detach().bfloat16().double() for part in (module.lora_A, module.lora_B))
    rows, gradient = x[0].double(), g[0].double()
    y = rows @ weight.t() + s * (rows @ a.t()) @ b.t()
    if module.base_layer.bias is not None:
        y = y + module.base_layer.bias.double()
    gb = gradient @ b
    return y[None], (gradient @ weight + s * gb @ a)[None], s * gb.t() @ rows, s * gradient.t() @ (rows @ a.t())


def milliseconds(function: Callable[[], Any], device: str, repeats: int = 10) -> float:
    """Median; on a GPU by events, after two calls."""
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
    """One decoder layer at a time, times the layers of the model; launched ahead of the GPU, as in training."""
    import torch
    from bitsandbytes.functional import dequantize_4bit

    from recipes.parts import fp8_kernel, linear

    layers = [make_layer(shape, torch.bfloat16, device) for shape in shapes.values()]
    scales = [linear.row_scales(linear.weight_in_torch(layer), linear.LEAST_SCALE) for layer in layers]
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

    from recipes.parts import linear

    (out, in_), bf16 = shape, torch.bfloat16
    holder = torch.nn.ModuleDict({"layer": make_layer(shape, bf16, device)})
    linear.use_fused_linears(holder, "fp8")
    layer, scale = holder["layer"], holder["layer"].product.scale()
    x, g = (torch.randn(tokens, n, device=device).to(bf16) for n in (in_, out))
    a, b = torch.randn(RANK, in_, device=device).to(bf16), torch.randn(out, RANK, device=device).to(bf16)
    weight, y, dx = linear.weight_of(layer), torch.empty_like(g), torch.empty_like(x)
    codes, turned = linear.weight_of(layer, scale), linear.weight_of(layer, scale, True)
    (xq, xs), (gq, gs) = linear.quantize_rows(x), linear.quantize_rows(g, linear.LEAST_GRADIENT_SCALE, scale)
    ones, xa, gb = scale.new_ones(1, in_), x @ a.t(), g @ b

    def slow(left: Any, right: Any, rows: Any, columns: Any) -> Any:
        return torch._scaled_mm(left, right.t(), rows, columns, out_dtype=bf16, use_fast_accum=False)

    ways = {
        "x Wᵀ, BF16": lambda: x @ weight.t(),
        "x Wᵀ, FP8": lambda: linear.scaled_product(xq, codes, xs, scale.view(1, -1), bf16),
        "x Wᵀ, FP8, slow accumulation": lambda: slow(xq, codes, xs, scale.view(1, -1)),
        "g W, BF16": lambda: g @ weight,
        "g W, FP8": lambda: linear.scaled_product(gq, turned, gs, ones, bf16),
        "g W, FP8, slow accumulation": lambda: slow(gq, turned, gs, ones),
        "W to BF16": lambda: linear.weight_of(layer),
        "W to FP8": lambda: linear.weight_of(layer, scale),
        "W to FP8, transposed": lambda: linear.weight_of(layer, scale, True),
        "x to FP8": lambda: linear.quantize_rows(x),
        "g to FP8": lambda: linear.quantize_rows(g, linear.LEAST_GRADIENT_SCALE, scale),
        "x Aᵀ": lambda: x @ a.t(),
        "y += (x Aᵀ) Bᵀ": lambda: y.addmm_(xa, b.t(), alpha=2.0),
        "g B": lambda: g @ b,
        "dx += (g B) A": lambda: dx.addmm_(gb, a, alpha=2.0),
        "dA": lambda: linear._gradient(gb.t(), x, torch.float32),
        "dB": lambda: linear._gradient(g.t(), xa, torch.float32),
    }
    lines = [f"{out} x {in_}, {tokens} tokens | ms | TFLOP/s or GB/s"]
    flops, (wide, narrow) = 2 * out * in_ * tokens, (2 * out * tokens, 2 * in_ * tokens)
    moved = {"x Aᵀ": narrow, "dA": narrow, "g B": wide, "dB": wide, "x to FP8": 1.5 * narrow, "g to FP8": 1.5 * wide}
    moved |= {"y += (x Aᵀ) Bᵀ": 2 * wide, "dx += (g B) A": 2 * narrow}
    moved |= {"W to BF16": 2.53 * out * in_, "W to FP8": 1.53 * out * in_, "W to FP8, transposed": 1.53 * out * in_}
    for name, way in ways.items():
        if device == "cpu" and "slow" in name:  # torch's own emulation has no such kernel
            continue
        with case(f"pieces {name}"):
            spent = milliseconds(way, device)
            rate = f"{moved[name] / spent / 1e6:.0f} GB/s" if name in moved else f"{flops / spent / 1e9:.0f} TFLOP/s"
            lines.append(f"{name} | {spent:.3f} | {rate}")
    tables.append("\n".join(lines))


def check_block(device: str, shapes: dict, tokens: list[int]) -> None:
    """Counts only the base's products, 4 operations a weight and token; peak memory beyond what was held before."""
    import torch

    from recipes.parts.linear import use_fused_linears

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
    device, shapes, tokens = ("cpu", TINY, [64]) if options.rehearse else ("cuda", SHAPES, [8192, 16384])
    if options.rehearse:
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
        interpret()
    import torch

    if not options.rehearse and not torch.cuda.is_available():
        raise SystemExit("there is no GPU; --rehearse runs tiny shapes on a CPU")
    torch.manual_seed(0)
    parts: dict[str, Callable[[], None]] = {
        "kernels": lambda: check_kernels(device),
        "errors": lambda: check_errors(device),
        "conversion": lambda: check_conversion(device, shapes),
        "pieces": lambda: [measure_pieces(device, shapes[name], tokens[-1]) for name in ("gate_proj", "down_proj")],
        "block": lambda: check_block(device, shapes, tokens),
    }
    for name in options.part:
        started = time.perf_counter()
        with case(f"part {name}"):
            parts[name]()
        print(f"part {name}: {time.perf_counter() - started:.0f} s", flush=True)
    card = "CPU, rehearsal" if options.rehearse else torch.cuda.get_device_name()
    print(f"\n{card}, torch {torch.__version__}\n\n" + "\n\n".join(tables))
    print(f"\n{len(missed)} missed" + "".join(f"\n  {line}" for line in missed))
    raise SystemExit(1 if missed else 0)


if __name__ == "__main__":
    main()
