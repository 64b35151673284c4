"""The kernels part of `linear_check.py`: kit/weights/fp8_kernel.py against its reference implementation in PyTorch."""

import contextlib
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

missed: list[str] = []


@contextlib.contextmanager
def case(name: str) -> Iterator[None]:
    """One case: an exception is recorded, and the next case runs."""
    try:
        yield
        print(f"ok      {name}", flush=True)
    except AssertionError as error:
        missed.append(f"{name}: {error}")
        print(f"missed  {name}: {error}", flush=True)
    except Exception as error:
        missed.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
        print(f"missed  {name}\n{traceback.format_exc()}", flush=True)


def run_parts(parts: dict[str, Callable[[], Any]], chosen: list[str], rehearse: bool, tables: list[str]) -> None:
    """Run the chosen parts, print their tables and the missed cases, and exit (with 1 if there are any)."""
    import torch

    for name in chosen:
        started = time.perf_counter()
        with case(f"part {name}"):
            parts[name]()
        print(f"part {name}: {time.perf_counter() - started:.0f} s", flush=True)
    card = "CPU, rehearsal" if rehearse else torch.cuda.get_device_name()
    print(f"\n{card}, torch {torch.__version__}\n\n" + "\n\n".join(tables))
    print(f"\n{len(missed)} missed" + "".join(f"\n  {line}" for line in missed))
    raise SystemExit(1 if missed else 0)


def same_bits(found: Any, expected: Any) -> None:
    """Raise `AssertionError` with the number of differing bytes and the first position."""
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


def interpret() -> None:
    """Run Triton's kernels on a CPU. Its interpreter truncates to FP8 and BF16, unlike a GPU: torch rounds instead."""
    import numpy as np
    import torch
    import triton.language as tl
    from triton.runtime import interpreter

    from kit.weights import fp8_kernel

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


def check_kernels(device: str, shapes: list[tuple[int, int]]) -> None:
    """Check the kernels; `shapes` are (out, in) of the weights."""
    import torch

    from kit.weights import fp8, fp8_kernel, stored_weight

    cpu = device == "cpu"
    shapes = [(128, 128), (200, 320)] if cpu else [*shapes, (200, 320), (16, 64), (40, 27648)]
    for shape in shapes:
        for double in (True, False):
            for dtype in (torch.bfloat16, torch.float32):
                name = f"{shape}, double {double}, {str(dtype)[6:]}"
                layer = make_layer(shape, dtype, device, double)
                packed, state = layer.weight.data, layer.weight.quant_state
                packed.view(torch.uint8).view(shape[0], -1)[3] = 0x77  # a row of zeros
                scale = fp8.row_scales(stored_weight.weight_in_torch(layer), fp8.LEAST_SCALE)
                with case(f"unpack {name}"):
                    same_bits(fp8_kernel.unpack(packed, state), stored_weight.weight_in_torch(layer))
                with case(f"unpack to FP8 {name}"):
                    same_bits(fp8_kernel.unpack(packed, state, scale), stored_weight.weight_in_torch(layer, scale))
                with case(f"unpack to FP8, transposed, {name}"):
                    turned = fp8_kernel.unpack(packed, state, scale, transposed=True)
                    same_bits(turned, stored_weight.weight_in_torch(layer, scale, transposed=True))
                with case(f"unpack to FP8, transposed, beside others, {name}"):
                    wide = turned.new_zeros(shape[1], shape[0] + 96)
                    fp8_kernel.unpack(packed, state, scale, True, wide[:, 32 : 32 + shape[0]])
                    same_bits(wide[:, 32 : 32 + shape[0]], turned)
                    rest = torch.cat([wide[:, :32], wide[:, 32 + shape[0] :]], 1)
                    assert not rest.view(torch.uint8).any(), "wrote beside its place"
    for columns in (64, 130) if cpu else (64, 130, 4096, 12288, 27648):
        for tokens in (1, 37) if cpu else (1, 1003):
            check_rows(tokens, columns, device)
    for widths in ((64, 16, 48), (64, 130)) if cpu else ((4096, 1024, 1024), (12288, 12288), (16, 5000, 48)):
        check_rows_together(37 if cpu else 1003, widths, device)
    for sizes in ((70, 200, 16), (1, 16, 5)) if cpu else ((16384, 12288, 16), (1003, 4096, 48), (1, 1000, 5)):
        check_low_rank(*sizes, device)
    if not cpu:
        check_far_offsets(device)
        check_against_vllm(device)


def check_rows(tokens: int, columns: int, device: str) -> None:
    import torch

    from kit.weights import fp8, fp8_kernel, stored_weight

    x = torch.randn(tokens, 2 * columns, device=device) * torch.logspace(-9, 2, tokens, device=device)[:, None]
    x = x.bfloat16()[:, :columns]  # rows that are not contiguous in memory
    x[tokens // 2] = 0
    by_column = 1e-4 * torch.rand(columns, device=device)
    for by in (None, by_column):
        for floor in (fp8.LEAST_SCALE, stored_weight.LEAST_GRADIENT_SCALE):
            kind = "plain" if by is None else "by column"
            with case(f"rows {tokens} x {columns}, {kind}, floor {floor:.1e}"):
                codes, scale = fp8_kernel.quantize_rows([x], floor, None if by is None else [by])
                expected = stored_weight.quantize_rows_in_torch(x, floor, by)
                same_bits(scale, expected[1])
                same_bits(codes, expected[0])
    with case(f"rows {tokens} x {columns}: what is not a number stays none"):
        for bad in (torch.nan, torch.inf):
            x[0, columns // 3] = bad
            codes, scale = fp8_kernel.quantize_rows([x], fp8.LEAST_SCALE)
            assert not torch.isfinite((codes.float() * scale)[0].sum()), f"{bad} became a number"
            assert tokens == 1 or torch.isfinite((codes.float() * scale)[1:].sum()), f"{bad} reached another row"


def check_rows_together(tokens: int, widths: tuple[int, ...], device: str) -> None:
    import torch

    from kit.weights import fp8_kernel, stored_weight

    size = torch.logspace(-9, 2, tokens, device=device)[:, None]
    parts = [(10.0**-n * torch.randn(tokens, 2 * width, device=device) * size) for n, width in enumerate(widths)]
    parts = [part.bfloat16()[:, :width] for part, width in zip(parts, widths, strict=True)]
    by = [1e-4 * torch.rand(width, 1, device=device) for width in widths]
    for order in (slice(None), slice(None, None, -1)):
        with case(f"rows {tokens} x {widths[order]}, by column, one scale"):
            codes, scale = fp8_kernel.quantize_rows(parts[order], stored_weight.LEAST_GRADIENT_SCALE, by[order])
            expected = stored_weight.quantize_rows_in_torch(
                torch.cat(parts[order], 1), stored_weight.LEAST_GRADIENT_SCALE, torch.cat(by[order])
            )
            same_bits(scale, expected[1])
            same_bits(codes, expected[0])


def check_low_rank(tokens: int, columns: int, rank: int, device: str) -> None:
    """Check y += s · left · right against float64, no worse than torch's; right as the adapter's B and as its A."""
    import torch

    from kit.weights import fp8_kernel

    dtype = torch.float16 if device == "cpu" else torch.bfloat16  # the interpreter has no BF16 products
    y, left = (torch.randn(tokens, n, device=device).to(dtype) for n in (columns, 3 * rank))
    left, right = left[:, rank : 2 * rank], torch.randn(columns, rank, device=device).to(dtype).t()
    exact = y.double() + 0.7 * left.double() @ right.double()
    for kind, factor in (("B", right), ("A", right.contiguous())):
        with case(f"y += left · right, {tokens} x {columns}, rank {rank}, as {kind}"):
            found, theirs = y.clone(), y.clone().addmm_(left, factor, alpha=0.7)
            fp8_kernel.add_low_rank(found, left, factor, 0.7)
            error, other = relative(found, exact), relative(theirs, exact)
            assert error < max(1.01 * other, 0.0025 if tokens == 1 else 0.0), f"{error:.6f}, torch's {other:.6f}"


def check_far_offsets(device: str) -> None:
    """Check weights and rows beyond 2^31 values, made of random bytes; the last rows against the same bytes alone."""
    import torch
    from bitsandbytes.functional import QuantState, get_4bit_type

    from kit.weights import fp8, fp8_kernel, stored_weight

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
    with case("y += left · right, 180,000 x 12,288, beyond 2^31 values"):
        y = torch.randn(180000, 12288, dtype=torch.bfloat16, device=device)
        left, right = (torch.randn(*size, dtype=torch.bfloat16, device=device) for size in ((180000, 16), (16, 12288)))
        expected = y[-last:].clone()
        fp8_kernel.add_low_rank(expected, left[-last:], right, 1.0)
        fp8_kernel.add_low_rank(y, left, right, 1.0)
        same_bits(y[-last:], expected)
        del y
    with case("rows 180,000 x 12,288, beyond 2^31 values"):
        x = torch.randn(180000, 12288, dtype=torch.bfloat16, device=device)
        codes, scale = fp8_kernel.quantize_rows([x], fp8.LEAST_SCALE)
        expected = stored_weight.quantize_rows_in_torch(x[-last:])
        same_bits(codes[-last:], expected[0])
        same_bits(scale[-last:], expected[1])


def check_against_vllm(device: str) -> None:
    import torch

    from kit.weights import fp8, fp8_kernel

    try:
        from vllm import _custom_ops
    except Exception as error:
        print(f"without vllm ({type(error).__name__}): its kernel is not compared", flush=True)
        return
    for tokens, columns in ((1003, 4096), (17, 12288)):
        with case(f"rows {tokens} x {columns} against vLLM's dynamic quantization per token"):
            x = torch.randn(tokens, columns, dtype=torch.bfloat16, device=device)
            codes, scale = fp8_kernel.quantize_rows([x], fp8.LEAST_SCALE)
            theirs, their_scale = _custom_ops.scaled_fp8_quant(x, use_per_token_if_dynamic=True)
            same_bits(scale, their_scale)
            same_bits(codes, theirs)
