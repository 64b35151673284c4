"""Fake quantization on one GPU: bits of the kernels, milliseconds, GB/s, a whole model's weights.

    python bench/fake_quant_check.py               # about a minute on an H200; --part bits: no clock
    python bench/fake_quant_check.py --rehearse    # tiny shapes on a CPU, kernels in Triton's interpreter

bits: kit/weights/quantize_kernel.py against its reference implementation in PyTorch, over all formats, bit for bit
except for the signs of zeros. The adapter's factors are chosen so that its sums are exact in any order; for others,
the share of weights that the order changes is printed. If vllm is installed, activations are also compared with its
own kernels. speed: ms and GB/s of a Qwen3-8B decoder layer's seven weights, of the pass that finds their peaks, and of
activations.

A failed case is reported and the others continue. The tables come last; exit 1 when something differs.
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

from bench.linear_kernels import case, interpret, make_layer, missed

# (out, in) of a Qwen3-8B decoder layer; a model has 36.
DECODER = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (12288, 4096), (12288, 4096), (4096, 12288)]
SHAPES = [(4096, 4096), (12288, 4096), (4096, 12288), (1024, 4096), (384, 640)]
TINY = [(128, 128)]
ODD = (72, 192)
LAYERS, RANK, SCALING = 36, 16, 2.0
PARTS = ("bits", "speed")
PEAK = 11.3  # range of static activations
MOST_CHANGED = 1e-3  # share of weights that the order of the adapter's sums may change

tables: list[str] = []


def factors(shape: tuple[int, int], device: str, rank: int = RANK, exact: bool = True) -> tuple[Any, Any]:
    """A (r, in) and B (out, r) in float32; small multiples of 1/64 if `exact`."""
    import torch

    made = [torch.randn(*size, device=device) for size in ((rank, shape[1]), (shape[0], rank))]
    if exact:
        return tuple((one.clamp(-4, 4).round() / 128) for one in made)
    return made[0] * 0.02, made[1] * 0.02


def formats_for(shape: tuple[int, int]) -> list[Any]:
    """Formats whose blocks divide the shape; only one of the two FP4 formats, whose weights are the same."""
    from kit.core.formats import TRAINED

    def fits(fmt: Any) -> bool:
        return not any(block and size % block for size, block in zip(shape, fmt.weight.block, strict=True))

    return [fmt for fmt in TRAINED.values() if fmt.name != "nvfp4" and fits(fmt)]


def differing(found: Any, expected: Any) -> int:
    """Number of differing values; zeros of either sign are equal."""
    assert found.shape == expected.shape, f"shape {tuple(found.shape)}, not {tuple(expected.shape)}"
    assert found.dtype == expected.dtype, f"{found.dtype}, not {expected.dtype}"
    return int((found.float() != expected.float()).sum())


def same(found: Any, expected: Any) -> None:
    if count := differing(found, expected):
        first = [int(n) for n in (found.float() != expected.float()).nonzero()[0]]
        place = tuple(first)
        raise AssertionError(
            f"{count} of {found.numel()} differ, first at {first}: {float(found[place])!r}, not "
            f"{float(expected[place])!r}"
        )


def check_layer(layer: Any, shape: tuple[int, int], name: str, names: list[str], a: Any, b: Any) -> None:
    """Check one layer's weight in the formats `names`, with these factors."""
    from kit.weights import fp8, quantize, quantize_kernel

    source = quantize._source(layer)
    exact = quantize.effective_weight_in_torch(layer, a, b, SCALING)
    with case(f"effective weight {name}"):
        same(quantize_kernel.quantize(source, a, b, SCALING, None, None), exact)
    for fmt in formats_for(shape):
        if fmt.name not in names:
            continue
        peak = quantize.weight_peak(exact, fmt)
        if peak is not None:
            with case(f"{fmt.name} peak {name}"):
                same(quantize_kernel.peak_of(source, a, b, SCALING, fmt), peak)
        with case(f"{fmt.name} weight {name}"):
            found = quantize_kernel.quantize(source, a, b, SCALING, fmt, peak)
            same(found, quantize.fake_quantize_weight_in_torch(exact, fmt, peak))
        if fmt.name == "fp8":
            codes = fp8.to_e4m3(exact, quantize.bf16_scale(peak, quantize.E4M3_MAX))
            with case(f"fp8 codes {name}"):
                same(quantize_kernel.quantize(source, a, b, SCALING, fmt, peak, is_codes=True), codes)


def check_weights(device: str, shapes: list[tuple[int, int]]) -> None:
    import torch

    every, few = ["fp8", "fp8_block", "fp8_static", "w4a16", "nvfp4a16"], ["fp8", "nvfp4a16"]
    for shape in shapes:
        layer = make_layer(shape, torch.bfloat16, device)
        a, b = factors(shape, device)
        check_layer(layer, shape, f"{shape} with adapter", every, a, b)
        if shape[0] * shape[1] <= 1 << 24:
            check_layer(layer, shape, f"{shape} without", few if device == "cpu" else every, None, None)
        plain = torch.nn.Linear(shape[1], shape[0], bias=False, dtype=torch.bfloat16, device=device)
        check_layer(plain, shape, f"{shape}, BF16 base", few, a, b)
    small = shapes[-1]
    for dtype, double in ((torch.bfloat16, False), (torch.float32, True)):
        layer = make_layer(small, dtype, device, double)
        check_layer(layer, small, f"{small}, {str(dtype)[6:]}, double {double}", few, *factors(small, device))
    layer = make_layer(ODD, torch.bfloat16, device)
    check_layer(layer, ODD, f"{ODD}, rank 5", few if device == "cpu" else every, *factors(ODD, device, rank=5))
    check_layer(layer, ODD, f"{ODD}, rank 48", few[1:], *factors(ODD, device, rank=48))
    for fmt in formats_for(shapes[0]):
        with case(f"{fmt.name} weight with zeros, huge and small values"):
            check_nasty(shapes[0], fmt, device)


def check_nasty(shape: tuple[int, int], fmt: Any, device: str) -> None:
    import torch

    from kit.weights import quantize, quantize_kernel

    weight = 0.02 * torch.randn(shape, device=device) * torch.logspace(-18, 3, shape[0], device=device)[:, None]
    weight[3], weight[5, :128], weight[7, 9], weight[9] = 0, 0, 3e4, -0.0
    weight = weight.bfloat16()
    peak = quantize.weight_peak(weight, fmt)
    source = quantize_kernel.Source(weight, None, shape, weight.dtype)
    found = quantize_kernel.quantize(source, None, None, 1.0, fmt, peak, is_rounded=False)
    same(found, quantize.fake_quantize_weight_in_torch(weight, fmt, peak))


def check_order(device: str, shape: tuple[int, int]) -> None:
    """Measure the share of weights that the order of the adapter's sums changes."""
    import torch

    from kit.weights import quantize, quantize_kernel

    layer = make_layer(shape, torch.bfloat16, device)
    a, b = factors(shape, device, exact=False)
    exact, source = quantize.effective_weight_in_torch(layer, a, b, SCALING), quantize._source(layer)
    for fmt in (None, *formats_for(shape)[:: 4 if device == "cpu" else 1]):
        with case(f"{fmt.name if fmt else 'effective'} weight, {shape}, any adapter"):
            peak = quantize.weight_peak(exact, fmt) if fmt else None
            expected = quantize.fake_quantize_weight_in_torch(exact, fmt, peak) if fmt else exact
            count = differing(quantize_kernel.quantize(source, a, b, SCALING, fmt, peak), expected)
            share = count / expected.numel()
            tables.append(f"{fmt.name if fmt else 'BF16'}: {share:.1e} of {shape} weights differ by the sums' order")
            assert share < MOST_CHANGED, f"{share:.1e}, bound {MOST_CHANGED}"


def activations(fmt: Any, columns: int) -> bool:
    return fmt.activation is not None and (fmt.activation.per != "block" or not columns % fmt.activation.group)


def check_activations(device: str, sizes: list[tuple[int, int]]) -> None:
    import torch

    from kit.core.formats import TRAINED
    from kit.weights import quantize, quantize_kernel

    peak = torch.tensor(PEAK, device=device)
    for tokens, columns in sizes:
        x = torch.randn(tokens, columns, device=device) * torch.logspace(-7, 1, tokens, device=device)[:, None]
        x[tokens // 2] = 0
        x[0, columns // 3] = 60.0
        for dtype in (torch.bfloat16, torch.float32):
            rows = x.to(dtype)
            for fmt in TRAINED.values():
                if activations(fmt, columns):
                    with case(f"{fmt.name} activations {tokens} x {columns}, {str(dtype)[6:]}"):
                        expected = quantize.fake_quantize_activation_in_torch(rows, fmt.activation, peak)
                        same(quantize_kernel.fake_quantize_activation(rows, fmt.activation, peak), expected)


def check_against_vllm(device: str) -> None:
    """Measure the share of activations that vLLM's own kernels quantize differently; printed, not judged."""
    import torch

    from kit.core.formats import TRAINED
    from kit.weights import quantize

    try:
        from vllm import _custom_ops
        from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8
        from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import ref_nvfp4_quant_dequant
    except Exception as error:
        print(f"without vllm ({type(error).__name__}): its kernels are not compared", flush=True)
        return
    x = torch.randn(1024, 4096, device=device).bfloat16()
    peak = torch.tensor(PEAK, device=device)

    def of_codes(codes: Any, scale: Any) -> Any:
        return (codes.float().unflatten(1, (scale.shape[-1], -1)) * scale[..., None]).flatten(1).to(x.dtype)

    def static() -> Any:
        scale = quantize.bf16_scale(peak, quantize.E4M3_MAX)
        return of_codes(_custom_ops.scaled_fp8_quant(x, scale)[0], scale.expand(len(x), 1))

    theirs = {
        "fp8": lambda: of_codes(*_custom_ops.scaled_fp8_quant(x, use_per_token_if_dynamic=True)),
        "fp8_block": lambda: of_codes(*per_token_group_quant_fp8(x, 128)),
        "fp8_static": static,
        "nvfp4": lambda: ref_nvfp4_quant_dequant(x, 448.0 * 6 / peak.view(1), 16),
    }
    for name, make in theirs.items():
        with case(f"{name} activations against vLLM's"):
            count = differing(quantize.fake_quantize_activation(x, TRAINED[name].activation, peak), make())
            tables.append(f"{name} activations: {count / x.numel():.1e} of {x.numel()} are other numbers than vLLM's")


def median_ms(run: Callable[[], Any], device: str, times: int = 10) -> float:
    """Median milliseconds of a call; a single call on a CPU."""
    import torch

    if device == "cpu":
        started = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - started)
    run()
    found = []
    for _ in range(times):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(stop))
    return statistics.median(found)


def measure_weights(device: str, shapes: list[tuple[int, int]]) -> None:
    import torch

    from kit.core.formats import TRAINED
    from kit.weights import quantize, quantize_kernel

    layers = [make_layer(shape, torch.bfloat16, device) for shape in shapes]
    adapters = [factors(shape, device, exact=False) for shape in shapes]
    sources = [quantize._source(layer) for layer in layers]
    count = sum(out * in_ for out, in_ in shapes)
    bits = sum(
        layer.weight.numel() + layer.weight.quant_state.absmax.numel() + 4 * (a.numel() + b.numel())
        for layer, (a, b) in zip(layers, adapters, strict=True)
    )  # bytes read
    lines = [
        f"rank {RANK} | ms a decoder layer | GB/s | ms a model | peaks: ms a layer | ms a model | PyTorch: ms a layer"
    ]
    kinds: list[tuple[str, Any, bool]] = [("effective BF16", None, False)]
    kinds += [(name, fmt, False) for name, fmt in TRAINED.items() if name != "nvfp4"]
    kinds += [("fp8 codes", TRAINED["fp8"], True)]
    for name, fmt, is_codes in kinds:
        with case(f"speed of {name}"):
            peaks = [None] * len(sources)
            if fmt is not None and quantize._has_peak(fmt):
                pairs = zip(sources, adapters, strict=True)
                peaks = [quantize_kernel.peak_of(source, a, b, SCALING, fmt) for source, (a, b) in pairs]

            def write(fmt: Any = fmt, peaks: list = peaks, is_codes: bool = is_codes) -> None:
                for source, (a, b), peak in zip(sources, adapters, peaks, strict=True):
                    quantize_kernel.quantize(source, a, b, SCALING, fmt, peak, is_codes=is_codes)

            def find(fmt: Any = fmt) -> None:
                for source, (a, b) in zip(sources, adapters, strict=True):
                    quantize_kernel.peak_of(source, a, b, SCALING, fmt)

            def define(fmt: Any = fmt, peaks: list = peaks) -> None:
                for layer, (a, b), peak in zip(layers, adapters, peaks, strict=True):
                    weight = quantize.effective_weight_in_torch(layer, a, b, SCALING)
                    quantize.fake_quantize_weight_in_torch(weight, fmt, peak)

            ms = median_ms(write, device)
            peak_ms = median_ms(find, device) if peaks[0] is not None and not is_codes else 0.0
            torch_ms = median_ms(define, device, 3) if fmt is not None and not is_codes else 0.0
            moved = bits + count * (1 if is_codes else 2)
            row = [ms, moved / ms / 1e6, LAYERS * ms, peak_ms, LAYERS * peak_ms, torch_ms]
            lines.append(" | ".join([name, *(f"{one:.3f}" if one else "" for one in row)]))
    tables.append("\n".join(lines))


def measure_activations(device: str, sizes: list[tuple[int, int]]) -> None:
    import torch

    from kit.core.formats import TRAINED
    from kit.weights import quantize

    lines = ["activations, BF16 | size | ms | GB/s | PyTorch ms"]
    peak = torch.tensor(PEAK, device=device)
    for tokens, columns in sizes:
        x = torch.randn(tokens, columns, device=device).bfloat16()
        for name, fmt in TRAINED.items():
            if activations(fmt, columns):
                with case(f"speed of {name} activations, {tokens} x {columns}"):
                    one = fmt.activation
                    ms = median_ms(lambda one=one, x=x: quantize.fake_quantize_activation(x, one, peak), device)
                    slow = median_ms(
                        lambda one=one, x=x: quantize.fake_quantize_activation_in_torch(x, one, peak), device, 3
                    )
                    lines.append(
                        f"{name} | {tokens} x {columns} | {ms:.3f} | {4 * x.numel() / ms / 1e6:.0f} | {slow:.3f}"
                    )
    tables.append("\n".join(lines))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes on a CPU")
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    arguments = parser.parse_args()
    if arguments.rehearse:
        os.environ["TRITON_INTERPRET"] = "1"
    import torch

    started, device = time.perf_counter(), "cpu" if arguments.rehearse else "cuda"
    if device == "cpu":
        interpret()
    else:
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    torch.manual_seed(0)
    if "bits" in arguments.part:
        check_weights(device, TINY if device == "cpu" else SHAPES)
        check_order(device, TINY[0] if device == "cpu" else SHAPES[0])
        check_activations(device, [(5, 256), (3, 80)] if device == "cpu" else [(1003, 4096), (517, 12288), (3, 80)])
        if device != "cpu":
            check_against_vllm(device)
    if "speed" in arguments.part:
        measure_weights(device, TINY if device == "cpu" else DECODER)
        measure_activations(device, [(5, 256)] if device == "cpu" else [(8192, 4096), (8192, 12288)])
    print("\n" + "\n\n".join(tables))
    print(f"\n{len(missed)} missed, {time.perf_counter() - started:.0f} s")
    for one in missed:
        print(f"  {one}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
