"""Time of one training step on the card: its kernels, grouped by what they compute.

A kernel is grouped first by its own name (dequantization, attention, norms, optimizer), then by the operator that
launched it and that operator's shapes: a product with a dimension of the adapter's rank is LoRA, one with a dimension
of the vocabulary is the head, every other is the base's. Elementwise kernels on activations, including the residual
sums, count as norm, rope, activation.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

GROUPS = (
    "base products",
    "LoRA",
    "dequantization",
    "attention",
    "norm, rope, activation",
    "head",
    "optimizer",
    "other",
)
TOP, GAPS = 25, 6
TRL_CHUNK = 32768  # vocabulary entries that TRL 1.16 projects at once
# The first match decides.
ATTENTION = r"flash|fmha|attention|attn|flex|sdpa|cudnn.*sdp"
BY_NAME = (
    ("optimizer", r"adam|multi_tensor|foreach|lpnorm|clip_grad|optimizer"),
    ("head", r"log_?prob|logsumexp|entropy|online_softmax|cross_entropy"),
    ("dequantization", r"quant|nf4|_4bit|to_fp8|fp8_cast|unpack"),
    ("norm, rope, activation", r"rms|norm|rope|rotary|silu|swiglu|glu_"),
)
PRODUCT = r"gemm|cutlass|nvjet|xmma|cublas|addmm|bmm|::mm|_mm\b|scaled_mm|wgmma|gemv|splitk"


def group_of(kernel: str, operator: str, sizes: Iterable[int], rank: int, head: set[int]) -> str:
    """Group of a kernel, from its name, the operator that launched it and the sizes in that operator's shapes. `head`
    holds sizes that occur only in the output layer."""
    kernel, sizes = kernel.lower(), {*sizes}
    if re.search(ATTENTION, f"{kernel} {operator.lower()}"):
        return "attention"
    if re.search(PRODUCT, kernel) or (operator.startswith("aten::") and re.search(PRODUCT, operator)):
        return "head" if head & sizes else "LoRA" if rank in sizes else "base products"
    for name in (kernel, operator.lower()):
        for group, pattern in BY_NAME:
            if re.search(pattern, name):
                return group
    if head & sizes:
        return "head"
    if rank in sizes:
        return "LoRA"
    return "norm, rope, activation" if operator.startswith("aten::") and sizes else "other"


def profile_step(step: Callable[[], Any], config: Any, rank: int, cuda: bool) -> dict[str, Any]:
    """Seconds by group and the TOP kernels of one step: {"seconds", "groups": {group: s}, "kernels": [...], "idle"}.

    `idle` has the seconds between the first and the last kernel in which none ran, and the longest gaps. Without a GPU
    the operators' own CPU times replace the kernels'.
    """
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * cuda
    with profile(activities=activities, record_shapes=True) as profiler:
        step()
    vocabulary = config.get_text_config().vocab_size
    head = {vocabulary, TRL_CHUNK, vocabulary % TRL_CHUNK}
    times: dict[tuple[str, str], float] = defaultdict(float)
    calls: dict[tuple[str, str], int] = defaultdict(int)
    for kernel, operator, sizes, microseconds in _launches(profiler, cuda):
        key = (group_of(kernel, operator, sizes, rank, head), kernel)
        times[key] += microseconds / 1e6
        calls[key] += 1
    groups = dict.fromkeys(GROUPS, 0.0)
    for (group, _), seconds in times.items():
        groups[group] += seconds
    top = sorted(times, key=times.get, reverse=True)[:TOP]
    kernels = [{"group": key[0], "kernel": key[1][:110], "seconds": times[key], "calls": calls[key]} for key in top]
    return {"seconds": sum(times.values()), "groups": groups, "kernels": kernels, "idle": _idle(profiler)}


def _idle(profiler: Any) -> dict[str, Any]:
    """Seconds without a kernel, and the GAPS longest such times with the kernels around them."""
    from torch.autograd import DeviceType

    ran = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
    )
    gaps, (until, last) = [], (ran[0][1], ran[0][2]) if ran else (0.0, "")
    for start, end, name in ran:
        if start > until:
            gaps.append((start - until, last[:60], name[:60]))
        if end > until:
            until, last = end, name
    gaps.sort(reverse=True)
    longest = [{"seconds": us / 1e6, "after": before, "before": after} for us, before, after in gaps[:GAPS]]
    return {"seconds": sum(us for us, *_ in gaps) / 1e6, "gaps": len(gaps), "longest": longest}


def _launches(profiler: Any, cuda: bool) -> Iterable[tuple[str, str, set[int], float]]:
    """(kernel, operator, sizes in the operator's shapes, microseconds) of every kernel; kernels that no operator
    launched have an empty operator."""
    from torch.autograd import DeviceType

    claimed: dict[str, float] = defaultdict(float)
    for event in profiler.events():
        if event.device_type != DeviceType.CPU:
            continue
        sizes = {size for shape in event.input_shapes or [] for size in _flat(shape)}
        if not cuda:
            yield event.name, event.name, sizes, event.self_cpu_time_total
            continue
        for kernel in event.kernels:
            claimed[kernel.name] += kernel.duration
            yield kernel.name, event.name, sizes, kernel.duration
    total: dict[str, float] = defaultdict(float)
    for event in profiler.events():
        if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False):
            total[event.name] += event.time_range.elapsed_us()
    for name, microseconds in total.items():
        if (left := microseconds - claimed[name]) > 1:
            yield name, "", set(), left


def _flat(shape: Any) -> Iterable[int]:
    for one in shape if isinstance(shape, list | tuple) else [shape]:
        if isinstance(one, list | tuple):
            yield from _flat(one)
        elif isinstance(one, int):
            yield one


def show(name: str, found: dict[str, Any]) -> None:
    """Print both tables."""
    total = found["seconds"] or 1.0
    idle = found["idle"]
    print(f"\nprofile of {name}: {found['seconds']:.3f} s of kernels, {idle['seconds']:.3f} s idle")
    for gap in idle["longest"]:
        print(f"{gap['seconds'] * 1e3:9.1f} ms idle after {gap['after']}, before {gap['before']}")
    for group, seconds in sorted(found["groups"].items(), key=lambda item: -item[1]):
        print(f"{group:<24} {seconds * 1e3:9.1f} ms {seconds / total:7.1%}")
    for one in found["kernels"]:
        ms, share = one["seconds"] * 1e3, one["seconds"] / total
        print(f"{ms:9.1f} ms {share:6.1%} {one['calls']:6d} x  {one['group']:<23} {one['kernel']}")
