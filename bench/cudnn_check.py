"""cuDNN's attention for packed rows on one GPU: is it available and correct, what does a plan cost, does it win?

    python bench/cudnn_check.py             # under a minute
    python bench/cudnn_check.py --rehearse  # tiny, on a CPU, with stand-ins for the kernels

Needs the package nvidia-cudnn-frontend. One layer's attention, 32 heads on 8 of 128, BF16. Rows: one and two groups of
8 x 1,024 tokens after a prompt of 249 each (8,448 and 16,896 tokens), 8 x 2,048 without shared prompts, and 64
sequences of log-normal lengths (median 400, sigma .8, cut at 2,048), in groups of 8 after prompts of 249 and without.
Last, 8 x 704 with all scores far below zero, where cuDNN's backward is known to give NaN on Hopper if it takes keys
beyond a sequence's end for part of it.

Ways: `flash`, FlashAttention for both parts; `cudnn+flash`, cuDNN for a segment's attention to itself and
FlashAttention for its attention to a shared prompt; `cudnn`, cuDNN for both; `flash joined` and `cudnn joined`, one
call with a prompt's keys before those of each segment; `cudnn forward`, only forward so; `cudnn exact`, without the
empty sequences that fill up a bucket; `cudnn wide`, with buckets four times as large in sequences and length, which
shows the cost of coarser ones. Per way: milliseconds of forward and backward (median of 20, CUDA events), the time
that the process takes to queue a forward, relative errors of output, dq, dk and dv against float32 with all free
memory set to NaN before, the memory taken beyond inputs and outputs, the first call, in which plans are built, and the
first call of a row of other lengths in the same buckets, with the number of plans it built (none wanted; joined rows
may have more keys than a bucket).

For comparison, sdpa's cuDNN kernels on 8 padded rows of 2,048, and torch's own operators on consecutive sequences
(`aten._cudnn_attention_forward` and `_backward`): whether each call builds a new plan.

Bounds: relative errors .01, or 1.5 times those of `flash`; no plan for a row of other lengths. Exit 1 when one is
missed or a part fails.
"""

import argparse
import contextlib
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

HEADS, KEY_HEADS, DIM, REPEATS, LAYERS = 32, 8, 128, 20, 36
ERROR = 0.01
WAYS = {"flash": ("flash", "flash"), "cudnn+flash": ("cudnn", "flash")}
JOINED = {"flash joined": ("flash",), "cudnn joined": ("cudnn",), "cudnn forward": ()}  # and what is backward
WAYS |= {"flash joined": ("flash", "flash")}
WAYS |= dict.fromkeys(("cudnn", "cudnn joined", "cudnn forward", "cudnn exact", "cudnn wide"), ("cudnn", "cudnn"))

table: list[str] = []
missed: list[str] = []


@contextlib.contextmanager
def part(name: str) -> Iterator[None]:
    """Record an exception of a part, so that the next one runs."""
    started = time.perf_counter()
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        table.append(f"{name}: FAILED {type(error).__name__}: {str(error)[:400]}")
        missed.append(f"{name}: {type(error).__name__}: {str(error)[:200]}")
    print(f"{name}: {time.perf_counter() - started:.1f} s", flush=True)


def synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(call: Callable[[], Any]) -> float:
    """Seconds of one call, including the work it queued."""
    synchronize()
    started = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - started


def milliseconds(call: Callable[[], Any]) -> float:
    """Median device time of a call."""
    import torch

    call()
    if not torch.cuda.is_available():
        return seconds(call) * 1e3
    found = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end))
    return statistics.median(found)


def queueing(call: Callable[[], Any]) -> float:
    """Median milliseconds until a call returns, with the device still working."""
    found = []
    for _ in range(REPEATS):
        synchronize()
        started = time.perf_counter()
        call()
        found.append((time.perf_counter() - started) * 1e3)
    synchronize()
    return statistics.median(found)


def group(prompt: int, completions: list[list[int]]) -> Any:
    """The packed row of groups, padded to a multiple of 16."""
    from kit.policy.packed.attention import Sequences, row_length

    lengths = [prompt] * len(completions) + [one for lengths in completions for one in lengths]
    if fill := row_length(sum(lengths), "flash") - sum(lengths):
        lengths.append(fill)
    return Sequences(lengths, [prompt] * len(completions), [sum(one) for one in completions])


def rows(rehearse: bool, other: bool) -> dict[str, Any]:
    """Packed rows by name; with `other`, rows of other lengths that fall into the same buckets."""
    from kit.policy.packed.attention import Sequences

    scale = 64 if rehearse else 1
    draw, less = random.Random(0), 5 * other // scale + other
    prompt, length, longer = 249 // scale - less, 1024 // scale - less, 2048 // scale - less
    some = [max(1, min(longer, round(draw.lognormvariate(0, 0.8) * 400 / scale) - less)) for _ in range(64)]
    some[0] = longer  # same longest sequence
    return {
        "8 x 1,024 shared": group(prompt, [[length] * 8]),
        "2 x 8 x 1,024 shared": group(prompt, [[length] * 8] * 2),
        "8 x 2,048": Sequences([longer] * 8, [], []),
        "64 log-normal shared": group(prompt, [some[n : n + 8] for n in range(0, 64, 8)]),
        "64 log-normal": Sequences(some, [], []),
        "8 x 704 negative": Sequences([704 // scale - other * (64 // scale)] * 8, [], []),
    }


def inputs(tokens: int, rehearse: bool, negative: bool = False) -> tuple[list, Any]:
    """Query, key, value (T, heads, D) and the gradient of an output; with `negative`, scores are about -110."""
    import torch

    device, dtype = ("cpu", torch.float32) if rehearse else ("cuda", torch.bfloat16)
    heads = (4, 2, 2) if rehearse else (HEADS, KEY_HEADS, KEY_HEADS)
    dim = 16 if rehearse else DIM
    query, key, value = (torch.randn(tokens, h, dim, device=device, dtype=dtype, requires_grad=True) for h in heads)
    if negative:
        with torch.no_grad():
            query.normal_(3.2, 0.3)
            key.normal_(-3.2, 0.3).mul_((DIM / dim) ** 0.5)
    return [query, key, value], torch.randn_like(query)


def reference(sequences: Any, given: list, grad: Any) -> list:
    """Output and gradients in float32, segment by segment, with the prompt in front of the segments that see it."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    query, key, value = (one.detach().float().requires_grad_() for one in given)
    ends = list(accumulate(sequences.lengths, initial=0))
    first, then = sum(sequences.prompts), sum(sequences.prompts) + sum(sequences.behind)
    prompts, behind = (list(accumulate(one, initial=0)) for one in (sequences.prompts, sequences.behind))
    outputs = []
    for start, end in pairwise(ends):
        shared = slice(0, 0)
        if first <= start < then:
            which = next(n for n, last in enumerate(behind[1:]) if start - first < last)
            shared = slice(prompts[which], prompts[which + 1])
        k, v = (torch.cat([one[shared], one[start:end]]).transpose(0, 1)[None] for one in (key, value))
        mask = torch.ones(end - start, k.shape[2], dtype=torch.bool, device=query.device).tril(
            shared.stop - shared.start
        )
        q = query[start:end].transpose(0, 1)[None]
        outputs.append(scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1))
    output = torch.cat(outputs)
    return [output.detach(), *torch.autograd.grad(output, (query, key, value), grad.float())]


def relative(found: Any, expected: Any) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def plans() -> int:
    from kit.policy.packed import cudnn as cudnn_packed

    return sum(one.cache_info().misses for one in (cudnn_packed._forward, cudnn_packed._backward))


@contextlib.contextmanager
def buckets(way: str) -> Iterator[None]:
    """Clear the cached plans; use the bucket sizes of `way`, and join rows as it does."""
    from kit.policy.packed import cudnn as cudnn_packed
    from kit.policy.packed import flash

    for one in (cudnn_packed._forward, cudnn_packed._backward):
        one.cache_clear()
    step, other = cudnn_packed._step, {}
    if way == "cudnn wide":
        other = {"_step": lambda *given: step(*given) * 4}
    if way == "cudnn exact":
        other = {"filled_up": list}
    joined = {"MOST_JOINED": 2.0 if way in JOINED else 0.0, "JOINED_BACKWARD": JOINED.get(way, ())}
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(flash, **joined))
        if other:
            stack.enter_context(mock.patch.multiple(cudnn_packed, **other))
        yield


def poison() -> None:
    """Fill free memory with NaN, so that reads of unwritten memory show."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.full((2**30,), torch.nan, device="cuda")


def measure(
    name: str, way: str, sequences: Any, other: Any, rehearse: bool, wanted: list, given: list, grad: Any
) -> tuple[float, list[float]]:
    """Add one line to the table; return the milliseconds of forward plus backward, and the errors."""
    import torch

    from kit.policy.packed.flash import FlashMask, flash_attention

    device, scale = given[0].device, given[0].shape[-1] ** -0.5

    def run(row: Any, given: list, grad: Any) -> list:
        out = flash_attention(*given, FlashMask(*row, device, WAYS[way]), scale)
        return [out, *torch.autograd.grad(out, given, grad)]

    first = seconds(lambda: run(sequences, given, grad))
    poison()
    errors = [relative(*pair) for pair in zip(run(sequences, given, grad), wanted, strict=True)]
    others, built = inputs(sum(other.lengths), rehearse), plans()
    again = seconds(lambda: run(other, *others))
    built = plans() - built
    mask = FlashMask(*sequences, device, WAYS[way])
    with torch.no_grad():
        forward = milliseconds(lambda: flash_attention(*given, mask, scale))
        queued = queueing(lambda: flash_attention(*given, mask, scale))
    output = flash_attention(*given, mask, scale)
    backward = milliseconds(lambda: torch.autograd.grad(output, given, grad, retain_graph=True))
    extra = 0.0
    if not rehearse:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        answers = sum(one.nbytes for one in run(sequences, given, grad))
        extra = (torch.cuda.max_memory_allocated() - before - answers) / 2**20
    table.append(
        f"{name:<22}{way:<12} forward {forward:6.2f}  backward {backward:6.2f}  both {forward + backward:6.2f} ms  "
        f"queued {queued:5.2f} ms  errors {' '.join(f'{one:.4f}' for one in errors)}  extra {extra:5.0f} MiB  "
        f"first {first:5.2f} s  other lengths {again * 1e3:6.1f} ms, {built} plans"
    )
    if built and "cudnn" in way and way not in JOINED:
        missed.append(f"{name}, {way}: {built} plans were built for a row of other lengths in the same buckets")
    return forward + backward, errors


def compare(rehearse: bool) -> None:
    """Measure every row by every way, and the savings."""
    import torch

    from kit.policy.packed import flash

    other = rows(rehearse, True)
    for name, sequences in rows(rehearse, False).items():
        with part(name):
            given, grad = inputs(sum(sequences.lengths), rehearse, "negative" in name)
            wanted, took, allowed = reference(sequences, given, grad), {}, [ERROR] * 4
            for way in WAYS:
                if (way in JOINED or way == "cudnn+flash") and not sequences.prompts:
                    continue
                with part(f"  {way}"), buckets(way):
                    took[way], errors = measure(name, way, sequences, other[name], rehearse, wanted, given, grad)
                    if way == "flash":
                        allowed = [max(ERROR, 1.5 * one) for one in errors]
                    if not all(one <= most for one, most in zip(errors, allowed, strict=True)):
                        missed.append(f"{name}, {way}: relative errors {errors}, at most {allowed} wanted")
            if len(took) > 1 and "flash" in took:
                best = min(took, key=took.get)
                saved = (took["flash"] - took[best]) * LAYERS
                table.append(f"  best: {best}; {saved:.0f} ms saved in {LAYERS} layers ({len(given[0]):,} tokens)\n")
            merged(sequences, given, flash)
            del given, grad, wanted
            if not rehearse:
                torch.cuda.empty_cache()


def merged(sequences: Any, given: list, flash_packed: Any) -> None:
    """Measure the milliseconds of merging two parts, the same in both ways."""
    import torch

    if not sequences.prompts:
        return
    out = given[0].detach().clone()
    lse = torch.randn(out.shape[1::-1], device=out.device)
    some = slice(sum(sequences.prompts), sum(sequences.prompts) + sum(sequences.behind))
    other, more = torch.randn_like(out[some]), torch.randn_like(lse[:, some])
    took = milliseconds(lambda: flash_packed.merge(out[some], lse[:, some], other, more))
    table.append(f"  of it merging the parts: {took:.3f} ms")


def padded() -> None:
    """Measure sdpa's dense cuDNN kernels on padded rows."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    given = [
        torch.randn(8, 2048, h, DIM, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
        for h in (HEADS, KEY_HEADS, KEY_HEADS)
    ]
    for name, backend in (("cuDNN", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):
        with part(f"padded, {name}"), sdpa_kernel(backend):

            def call() -> Any:
                return scaled_dot_product_attention(*given, is_causal=True, enable_gqa=True)

            first = seconds(call)
            with torch.no_grad():
                forward = milliseconds(call)
            output = call()
            grad = torch.randn_like(output)
            first += seconds(lambda: torch.autograd.grad(output, given, grad, retain_graph=True))  # noqa: B023
            backward = milliseconds(lambda: torch.autograd.grad(output, given, grad, retain_graph=True))  # noqa: B023
            table.append(
                f"{'8 x 2,048 padded':<22}sdpa {name:<7} forward {forward:6.2f}  backward {backward:6.2f}  both "
                f"{forward + backward:6.2f} ms  first {first:5.2f} s"
            )


def operators() -> None:
    """Measure torch's own operators: each of several equal calls."""
    import torch

    aten = torch.ops.aten
    for one in (aten._cudnn_attention_forward, aten._cudnn_attention_backward):
        table.append(f"{one.default._schema}")
    ends = torch.arange(0, 8 * 2048 + 1, 2048, dtype=torch.int32, device="cuda")
    for name, heads in (("grouped", KEY_HEADS), ("expanded", HEADS)):
        q, k, v = (torch.randn(8 * 2048, h, DIM, device="cuda", dtype=torch.bfloat16) for h in (HEADS, heads, heads))
        grad, answer = torch.randn_like(q), []

        def forward() -> None:
            answer[:] = aten._cudnn_attention_forward(  # noqa: B023
                *(q, k, v, None, ends, ends, 2048, 2048, True, 0.0, True, False),  # noqa: B023
                scale=DIM**-0.5,
            )

        def backward() -> None:
            out, lse, seed, offset = (answer[n] for n in (0, 1, 6, 7))  # noqa: B023
            aten._cudnn_attention_backward(
                *(grad, q, k, v, out, lse, seed, offset, None, ends, ends, 2048, 2048, 0.0, True),  # noqa: B023
                scale=DIM**-0.5,
            )

        for what, call in (("forward", forward), ("backward", backward)):
            with part(f"aten, {name}, {what}"):
                took = " ".join(f"{seconds(call) * 1e3:.1f}" for _ in range(4))
                table.append(
                    f"aten, {name} heads, {what}: {took} ms a call; log-sum-exp {tuple(answer[1].shape)} "
                    f"{answer[1].dtype}"
                )


@contextlib.contextmanager
def stand_ins() -> Iterator[None]:
    """Replace all kernels by their PyTorch definitions."""
    from kit.policy.packed import cudnn as cudnn_packed
    from kit.policy.packed import flash
    from tests.unit.test_flash_packed import backward_stand_in, forward_stand_in

    given = {"attention": forward_stand_in, "attention_backward": backward_stand_in}
    with (
        mock.patch.multiple(flash, **given),
        mock.patch.multiple(cudnn_packed, filled_up=list, **given),
    ):
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--rehearse", action="store_true", help="tiny, for a CPU")
    options = parser.parse_args()
    started = time.perf_counter()
    import torch

    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    about = f"CPU, torch {torch.__version__}"
    if options.rehearse:
        with stand_ins():
            compare(True)
    else:
        from kit.policy.packed.cudnn import fault

        with part("cuDNN"):
            about = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
            if why := fault(DIM):
                raise RuntimeError(why)
            import cudnn

            about += f", cuDNN {cudnn.backend_version()} (torch's {torch.backends.cudnn.version()}), its package "
            about += cudnn.__version__
        compare(False)
        padded()
        with part("operators"):
            operators()
    print(f"\n{about}, {time.perf_counter() - started:.0f} s")
    print("\n".join(table))
    print("\n".join(f"MISSED {line}" for line in missed) or "every bound is kept")
    raise SystemExit(bool(missed))


if __name__ == "__main__":
    main()
