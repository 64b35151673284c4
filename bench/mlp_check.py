"""`policy.fused_mlp` on one GPU: numbers of its kernels, milliseconds and memory of an MLP beside its modules.

    python bench/mlp_check.py               # about a minute on an H100
    python bench/mlp_check.py --rehearse    # tiny shapes on a CPU, kernels in Triton's interpreter
    python bench/mlp_check.py --tiles       # also the kernels' time by size of their tiles

kernels: kit/policy/swiglu_kernel.py against its reference implementation in PyTorch, in float64 where sums are
compared. mlp: forward and backward of an MLP of Qwen3-8B's shape, NF4 base, LoRA of rank 16 in float32 on its three
layers, autocast: by modules with liger's SwiGLU where it is installed, and as one function; in fused and fp8. A failed
case is reported and the others continue. The tables come last; exit 1 when a bound is missed.
"""

import argparse
import copy
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.linear_check import RANK, adapted, milliseconds
from bench.linear_kernels import case, interpret, make_layer, relative, run_parts

HIDDEN, WIDTH, TINY = 4096, 12288, (64, 192)
TOKENS = (2048, 8704, 16384)
PARTS = ("kernels", "mlp")
MOST_OTHER = 0.02  # share of values that round to another number, as last bits of sigmoid and of sums differ
SUMS = 0.004  # relative error of the products with A and B in BF16
MOST_APART = {"fused": 0.012, "fp8": 0.05}  # gradients of the one function against the modules'
# Rows, columns, warps and stages of a program, and the columns of its range.
TILES = [(64, 64, 4, stages, 1024) for stages in (1, 2, 3, 4)] + [(64, 32, 4, stages, 1024) for stages in (3, 4)]
TILES += [(32, 64, 4, 3, 1024), (128, 64, 8, 3, 1024), (64, 64, 4, 3, 512), (64, 64, 4, 3, 2048)]

tables: list[str] = []


def inputs(tokens: int, width: int, ranks: tuple[int, int, int], device: str) -> tuple[list[Any], list[Any]]:
    """(gate, up and the gradient of SwiGLU's output; the adapters' parts of gate, up and down's gradient)."""
    import torch

    from kit.policy.fused_linear import LowRank

    torch.manual_seed(tokens + width)

    def random(*shape: int) -> torch.Tensor:
        # The interpreter has no BF16 products.
        return torch.randn(shape, device=device).to(torch.float16 if device == "cpu" else torch.bfloat16)

    tensors = [random(tokens, width) for _ in range(3)]
    lefts = [*random(tokens, sum(ranks[:2])).split(ranks[:2], 1), random(tokens, ranks[2])]  # gate's beside up's
    rights = [random(width, r).mul_(r**-0.5).t() for r in ranks[:2]]
    rights.append(random(ranks[2], width).mul_(ranks[2] ** -0.5))
    given = zip(lefts, rights, ranks, strict=True)
    return tensors, [LowRank(left, right, 0.75) if rank else None for left, right, rank in given]


def exact_sum(y: Any, low: Any) -> Any:
    """y and an adapter's part, rounded once: cuBLAS may round the product before it adds y."""
    if low is None:
        return y.clone()
    return (y.double() + low.scaling * (low.left.double() @ low.right.double())).to(y.dtype)


def same(name: str, found: Any, expected: Any) -> None:
    """Raise `AssertionError` unless values are equal, but for a few that round to a neighbour."""
    import torch

    distance = (found.double() - expected.double()).abs()
    worst = float((distance - 2 * torch.finfo(found.dtype).eps * expected.double().abs()).max())
    share = float((distance != 0).double().mean())
    assert torch.isfinite(found).all(), f"{name} is not finite"
    assert worst < 1e-2 and share < MOST_OTHER, f"{name}: {share:.4f} differ, the worst by {worst:.2g} too much"


def check_kernels(device: str) -> None:
    import torch

    from kit.policy import fused_mlp, swiglu_kernel

    cpu = device == "cpu"
    sizes = [(70, 200), (1, 64), (64, 1088)] if cpu else [(16384, 12288), (1003, 8960), (1, 64), (70, 27648)]
    ranks = [(16, 16, 16), (5, 40, 3)] + ([] if cpu else [(64, 64, 64)])
    grid = [(size, rank, "all") for size in sizes for rank in ranks]
    grid += [(sizes[0], ranks[0], left) for left in ("gate", "up", "down", "none")]
    for (tokens, width), rank, left in grid:
        (gate, up, grad), lows = inputs(tokens, width, rank, device)
        lows = [low if left in ("all", name) else None for low, name in zip(lows, ("gate", "up", "down"), strict=True)]
        a = None if lows[2] is None else lows[2].right
        with case(f"SwiGLU, {tokens} x {width}, ranks {rank}, adapters: {left}"):
            act, acta = swiglu_kernel.swiglu(gate, up, *lows[:2], a)
            sums = [exact_sum(*pair) for pair in zip((gate, up), lows[:2], strict=True)]
            same("SwiGLU", act, fused_mlp.swiglu_in_torch(*sums, None, None, None)[0])
            del sums
            assert (acta is None) == (a is None)
            if a is not None:
                assert (error := relative(acta, act.double() @ a.double().t())) < SUMS, f"A's product: {error:.5f}"
        with case(f"its gradient, {tokens} x {width}, ranks {rank}, adapters: {left}"):
            ours = [one.clone() for one in (gate, up, grad)]
            theirs = [exact_sum(*pair) for pair in zip((gate, up, grad), lows, strict=True)]
            parts = swiglu_kernel.swiglu_gradient(*ours, *lows)
            fused_mlp.swiglu_gradient_in_torch(*theirs, None, None, None)
            for name, one, other in zip(("gate", "up", "SwiGLU"), ours, theirs, strict=True):
                same(name, one, other)
            for name, one, low, part in zip(("gate", "up"), ours, lows, parts, strict=False):
                assert (part is None) == (low is None)
                if low is not None:
                    error = relative(part, one.double() @ low.right.double().t())
                    assert error < SUMS, f"product with B of {name}: {error:.5f}"
        del gate, up, grad
    if not cpu:
        torch.cuda.empty_cache()


def make_mlp(hidden: int, width: int, device: str) -> Any:
    import torch

    mlp = torch.nn.Module()
    for name, shape in (("gate_proj", (width, hidden)), ("up_proj", (width, hidden)), ("down_proj", (hidden, width))):
        mlp.add_module(name, adapted(make_layer(shape, torch.bfloat16, device)))
    return mlp


def forward_of_modules(mlp: Any) -> Any:
    """liger's SwiGLU where it is installed and runs, torch's otherwise."""
    import torch

    try:
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction

        multiply = LigerSiLUMulFunction.apply if mlp.gate_proj.weight.is_cuda else None
    except ImportError:
        multiply = None
    swiglu = multiply or (lambda gate, up: torch.nn.functional.silu(gate) * up)
    return lambda x: mlp.down_proj(swiglu(mlp.gate_proj(x), mlp.up_proj(x)))


def check_mlp(device: str, with_tiles: bool) -> None:
    import torch

    from kit.core.config.load import config_from_dict
    from kit.policy.fused_linear import use_fused_linears
    from kit.policy.fused_mlp import use_fused_mlps

    cpu = device == "cpu"
    hidden, width = TINY if cpu else (HIDDEN, WIDTH)
    plain = make_mlp(hidden, width, device)
    rows = [f"MLP of {hidden} and {width}, rank {RANK} | tokens | ms | of it forward | kept GiB | dx, dA, dB apart"]
    for compute in ("fused", "fp8"):
        held = {}
        for name in ("modules", "one function"):
            holder = torch.nn.ModuleDict({"mlp": copy.deepcopy(plain)})
            use_fused_linears(holder, compute)
            holder["mlp"].forward = forward_of_modules(holder["mlp"])
            values = {"compute": compute, "fused_mlp": name != "modules"}
            given = {"run": {"name": "x"}, "model": {"id": "x"}, "policy": values, "train": {"max_steps": 1}}
            use_fused_mlps(holder, config_from_dict(given))
            held[name] = holder["mlp"]
        for tokens in (40,) if cpu else TOKENS:
            torch.manual_seed(0)
            x = torch.randn(1, tokens, hidden, device=device).bfloat16()
            g = 1e-4 * torch.randn(1, tokens, hidden, device=device).bfloat16()
            expected = results(held["modules"], x, g)
            for name, mlp in held.items():
                with case(f"{compute}, {name}, {tokens} tokens"):
                    found = results(mlp, x, g)
                    apart = {key: relative(value, expected[key]) for key, value in found.items()}
                    both = milliseconds(lambda mlp=mlp, x=x, g=g: results(mlp, x, g), device)
                    first = milliseconds(lambda mlp=mlp, x=x: forward(mlp, x.requires_grad_()), device)
                    worst = {
                        kind: max(v for k, v in apart.items() if kind in k) for kind in ("dx", "lora_A", "lora_B")
                    }
                    rows.append(
                        f"{compute}, {name} | {tokens} | {both:.3f} | {first:.3f} | {kept_gib(mlp, x):.3f} | "
                        + ", ".join(f"{one:.4f}" for one in worst.values())
                    )
                    assert max(apart.values()) < MOST_APART[compute], f"apart {apart}"
    tables.append("\n".join(rows))
    if with_tiles:
        tables.append(tile_table(16384, width, device))


def forward(mlp: Any, x: Any) -> Any:
    import torch

    with torch.autocast(x.device.type, torch.bfloat16):
        return mlp.forward(x)


def results(mlp: Any, x: Any, g: Any) -> dict[str, Any]:
    """{name: gradient} of the input and of every factor, and the output."""
    x = x.detach().requires_grad_()
    for parameter in mlp.parameters():
        parameter.grad = None
    y = forward(mlp, x)
    y.backward(g)
    found = {name: one.grad for name, one in mlp.named_parameters() if one.grad is not None}
    return found | {"dx": x.grad, "y": y.detach()}


def kept_gib(mlp: Any, x: Any) -> float:
    """GiB allocated once the forward pass is done; 0 on a CPU."""
    import torch

    if not x.is_cuda:
        return 0.0
    before = torch.cuda.memory_allocated()
    y = forward(mlp, x.requires_grad_())
    return (torch.cuda.memory_allocated() - before - y.numel() * y.element_size()) / 2**30


def tile_table(tokens: int, width: int, device: str) -> str:
    """Milliseconds and GB/s of both kernels by the sizes of a program."""
    from kit.policy import swiglu_kernel

    (gate, up, grad), lows = inputs(tokens, width, (RANK, RANK, RANK), device)
    moved = {"SwiGLU": 3, "gradient": 6}  # matrices read or written
    rows = ["kernel | rows, columns, warps, stages, range | ms | GB/s"]
    for tile in TILES:
        for name, value in zip(("ROWS", "COLUMNS", "WARPS", "STAGES", "RANGE"), tile, strict=True):
            setattr(swiglu_kernel, name, value)
        swiglu_kernel.GRADIENT_COLUMNS = dict.fromkeys(range(20), tile[1])
        for name in moved:
            with case(f"tile {tile}, {name}"):
                if name == "SwiGLU":
                    spent = milliseconds(lambda: swiglu_kernel.swiglu(gate, up, *lows[:2], lows[2].right), device)
                else:
                    spent = milliseconds(lambda: swiglu_kernel.swiglu_gradient(gate, up, grad, *lows), device)
                rate = moved[name] * gate.numel() * 2 / spent / 1e6
                rows.append(f"{name} | {tile} | {spent:.3f} | {rate:.0f}")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--tiles", action="store_true", help="also time the kernels by size of their tiles")
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes on a CPU")
    options = parser.parse_args()
    if options.rehearse:
        os.environ["TRITON_INTERPRET"] = "1"
    import torch

    if options.rehearse:
        interpret()
    elif not torch.cuda.is_available():
        raise SystemExit("there is no GPU; --rehearse runs it on a CPU")
    device = "cpu" if options.rehearse else "cuda"
    parts = {"kernels": lambda: check_kernels(device), "mlp": lambda: check_mlp(device, options.tiles)}
    run_parts(parts, options.part, options.rehearse, tables)


if __name__ == "__main__":
    main()
