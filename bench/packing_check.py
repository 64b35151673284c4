"""Packed rows against padded ones on one GPU: log-probs, adapter gradients, tokens per second, compile time.

    python bench/packing_check.py             # about a minute
    python bench/packing_check.py --rehearse  # a tiny shape on a CPU, where packed rows take sdpa

Four layers of a Qwen3-8B shape with random weights (vocabulary 8,192, so that the head does not hide the layers), NF4
base, LoRA of rank 16 on all linear layers in float32, BF16 autocast, full recomputation. A batch is 2 prompts of 250
tokens with 8 completions each, lengths log-normal (median 400, sigma .8), cut at 2,048. `padded` is TRL's own pass
over all 16 rows at once. Tokens count the real ones of all rows, every prompt 8 times, in all lines, so the lines are
comparable.

First the attention alone, 32 heads on 8 of 128, in BF16: `flex`, `flash` and, if installed, `cudnn`
(`train.packed_attention`) over a packed row, with and without shared prompts, against sdpa in float32 with the dense
mask, and milliseconds; for comparison, the padded rows by sdpa as transformers calls it. Once more, milliseconds only,
with completions of 1,024 tokens each.

Then the model. `first` is the call that compiles, with an empty compile cache; `recompiled` counts graphs compiled
over 5 further batches of other lengths. `reference` is the pass without gradients and adapter. `noise` measures what
rounding to BF16 alone changes in log-probs: the padded pass against itself in batches of 4 rows with sdpa's MATH
backend, and with its own backend. Last, a small model in float32, where packed and padded rows differ only by
float32's rounding.

Bounds: relative error of the attention and its gradients .01; log-probs against the padded pass in BF16, mean at most
1.5 times the noise, max .25 nats, in float32 mean 1e-4; gradient cosine .998, norm within 2 %; no recompilation. Exit
1 when one is missed.
"""

import argparse
import contextlib
import functools
import os
import random
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

CONFIG = str(ROOT / "recipes/configs/grpo-tiny-nf4-cpu.yaml")
SHAPE = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 4, "head_dim": 128}
SHAPE |= {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 8192}
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256}
EXACT = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2, "head_dim": 64}
EXACT |= {"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 1024}
HEADS, KEY_HEADS, DIM = (SHAPE[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
ATTENTION_ERROR, NOISES, MAX_NATS, EXACT_NATS, COSINE, NORM = 0.01, 1.5, 0.25, 1e-4, 0.998, 0.02
GROUPS, GROUP, BATCHES, REPEATS, SIGMA = 2, 8, 5, 3, 0.8

missed: list[str] = []
table: list[str] = []


@contextlib.contextmanager
def part(name: str):
    """Record an exception of a part, so that the next one runs."""
    started = time.perf_counter()
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        missed.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
    print(f"{name}: {time.perf_counter() - started:.1f} s", flush=True)


def bound(name: str, value: float, limit: float, least: bool = False) -> None:
    if not (value >= limit if least else value <= limit):
        missed.append(f"{name} {value:.4g}, {'at least' if least else 'at most'} {limit:g} wanted")


def synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(call: Callable[[], Any], repeats: int = REPEATS) -> float:
    """Median seconds of a call, including the device's work."""

    found = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        synchronize()
        found.append(time.perf_counter() - started)
    return statistics.median(found)


def relative(found: Any, expected: Any) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def make_batch(seed: int, rehearse: bool, device: str, length_of_all: int | None = None) -> tuple[Any, Any, int]:
    """TRL's padded ids and mask (16, W) and the number of completion columns, with rows shuffled."""
    import torch

    draw, vocabulary = random.Random(seed), (TINY if rehearse else SHAPE)["vocab_size"]
    prompt, median, most = (25, 40, 80) if rehearse else (250, 400, 2048)
    rows = []
    for _ in range(GROUPS):
        ids = draw.choices(range(1, vocabulary), k=prompt)
        for _ in range(GROUP):
            length = length_of_all or max(1, min(most, int(draw.lognormvariate(0, SIGMA) * median)))
            rows.append((ids, draw.choices(range(1, vocabulary), k=length)))
    draw.shuffle(rows)
    width = max(len(c) for _, c in rows)
    ids = torch.tensor([p + c + [0] * (width - len(c)) for p, c in rows], device=device)
    real = torch.tensor([[1] * (prompt + len(c)) + [0] * (width - len(c)) for _, c in rows], device=device)
    return ids, real, width


def make_model(shape: dict, dtype: str) -> Any:
    import torch
    from memory_child import random_nf4
    from peft import get_peft_model
    from transformers import Qwen3Config
    from trl.trainer.utils import add_fused_lm_head

    from kit.core.config.load import load_config
    from kit.policy.load import lora_config, set_adapter_dtype
    from kit.policy.packed.attention import use_packed_attention

    with tempfile.TemporaryDirectory() as folder:
        Qwen3Config(**shape, pad_token_id=0, max_position_embeddings=8192).save_pretrained(folder)
        config = load_config(CONFIG, [f"--model.path={folder}", f"--model.dtype={dtype}"])
        base = random_nf4(config, branches=0.1)
    add_fused_lm_head(base, outputs=("log_probs", "entropy"))
    model = get_peft_model(base, lora_config(config.policy))
    set_adapter_dtype(model, "float32")
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.01)
    use_packed_attention(base)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    return model.train()


def make_trainer(in_bf16: bool) -> Any:
    """Stand-in with what the passes need of a trainer."""
    import torch

    autocast = (lambda: torch.autocast("cuda", torch.bfloat16)) if in_bf16 else contextlib.nullcontext
    return SimpleNamespace(accelerator=SimpleNamespace(autocast=autocast))


def kinds() -> tuple[str, ...]:
    """Values of `train.packed_attention` that work on this machine."""
    from kit.policy.packed.cudnn import fault

    return ("flex", "flash") if fault(DIM) else ("flex", "flash", "cudnn")


def passes(model: Any, in_bf16: bool) -> dict[str, Callable[[tuple], tuple]]:
    """Functions that compute log-probs and entropies (16, C) of a batch, by method."""
    from kit.policy.packed.packing import make_pack, pack_logps
    from kit.train.trl_trainer import GRPOTrainer

    stub, padded = make_trainer(in_bf16), GRPOTrainer._get_per_token_logps_and_entropies.__wrapped__

    def packed(share: bool, kind: str) -> Callable[[tuple], tuple]:
        return lambda data: pack_logps(stub, model, make_pack(stub, model, *data, share, kind), True)

    found = {"padded": lambda data: padded(stub, model, *data, compute_entropy=True)[:2]}
    for kind in kinds():
        found |= {kind: packed(False, kind), f"{kind}, shared": packed(True, kind)}
    return found


def step(model: Any, run: Callable[[tuple], tuple], data: tuple) -> tuple[Any, Any]:
    """Log-probs (16, C) and the adapter's gradient for a loss that weights every token differently."""
    import torch

    model.zero_grad(set_to_none=True)
    logps, entropies = run(data)
    _, real, width = data
    weight = torch.linspace(-1, 2, logps.numel(), device=logps.device).view_as(logps) * real[:, -width:]
    ((logps * weight).sum() + 0.01 * (entropies * weight).sum()).div(real.sum()).backward()
    return logps.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def both(call: Callable, given: list, grad: Any) -> list:
    """Output of an attention function and its gradients."""
    import torch

    output = call(*given)
    return [output, *torch.autograd.grad(output, given, grad.to(output.dtype))]


def attention(mask: Any) -> Callable[[Any, Any, Any], Any]:
    """The attention that a layer calls, from (B, H, T, D) to the same."""
    from kit.policy.packed.attention import attention_forward

    layer = SimpleNamespace(num_key_value_groups=HEADS // KEY_HEADS, is_causal=True)
    return lambda *given: attention_forward(layer, *given, mask, scaling=DIM**-0.5)[0].transpose(1, 2)


def random_inputs(rows: int, length: int, device: str) -> tuple[list, Any]:
    """Query, key, value and the gradient of an output, laid out as projections produce them."""
    import torch

    made = [
        torch.randn(rows, length, h, DIM, device=device, dtype=torch.bfloat16) for h in (HEADS, KEY_HEADS, KEY_HEADS)
    ]
    query, key, value = (one.transpose(1, 2).requires_grad_() for one in made)
    return [query, key, value], torch.randn_like(query)


def add_times(name: str, mask: Any, rows: int, length: int, device: str, note: str = "") -> None:
    import torch

    given, grad = random_inputs(rows, length, device)
    call = attention(mask)
    both(call, given, grad)
    with torch.no_grad():
        forward = seconds(lambda: call(*given), 5)
    table.append(
        f"attention, {name:<28} {rows} x {length:6d}  forward {forward * 1e3:7.2f} ms  forward + backward "
        f"{seconds(lambda: both(call, given, grad), 5) * 1e3:7.2f} ms{note}"
    )


def time_attention(what: str, data: tuple, kinds: tuple[str, ...]) -> None:
    """Time every method on one batch, in milliseconds."""
    import torch

    from kit.policy.packed.packing import pack_rows, read_rows

    everything, real = list(range(GROUPS * GROUP)), data[1].bool()
    device = data[0].device.type
    for kind in kinds:
        for share in (False, True):

            def packing(share: bool = share, kind: str = kind) -> Any:
                return pack_rows(read_rows(*data), everything, share, data[0], kind)

            packed = packing()
            note = f"  packing and mask {seconds(packing, 10) * 1e3:.1f} ms"
            add_times(f"{what}{kind}{', shared' * share}", packed.mask, 1, packed.tokens.size(1), device, note)
    width = real.size(1)
    causal = torch.ones(width, width, device=device, dtype=torch.bool).tril()
    mask = None if real.all() else (causal & real[:, None, None, :])
    add_times(f"{what}padded, sdpa", mask, len(real), width, device)


def check_attention(data: tuple, kind: str, share: bool) -> None:
    """Check one packed row against sdpa in float32."""
    from torch.nn.functional import scaled_dot_product_attention

    from kit.policy.packed.packing import pack_rows, read_rows

    rows, everything, name = read_rows(*data), list(range(GROUPS * GROUP)), f"{kind}{', shared' * share}"
    packed, dense = (pack_rows(rows, everything, share, data[0], one) for one in (kind, "dense"))
    length = dense.tokens.size(1)  # the other is padded with an extra segment
    given, grad = random_inputs(1, packed.tokens.size(1), data[0].device.type)
    started = time.perf_counter()
    found = both(attention(packed.mask), given, grad)
    synchronize()
    first = time.perf_counter() - started

    # One key head and its query heads: in float32, sdpa with a mask takes T x T for each.
    def reference(q: Any, k: Any, v: Any) -> Any:
        return scaled_dot_product_attention(q, k.expand_as(q), v.expand_as(q), attn_mask=dense.mask, scale=DIM**-0.5)

    shared = HEADS // KEY_HEADS
    exact = [
        one[:, :heads, :length].detach().float().requires_grad_()
        for one, heads in zip(given, (shared, 1, 1), strict=True)
    ]
    wanted = both(reference, exact, grad[:, :shared, :length])
    errors = [relative(mine[:, : one.size(1), :length], one) for mine, one in zip(found, wanted, strict=True)]
    table.append(
        f"attention, {name:<14} relative error of output, dq, dk, dv: {' '.join(f'{error:.4f}' for error in errors)}  "
        f"first {first:.1f} s"
    )
    bound(f"{name}: relative error of the attention", max(errors), ATTENTION_ERROR)


def measure_noise(model: Any, padded: Callable, data: tuple) -> float:
    """Mean |Δlogp| between padded passes of the same rows, but at least float32's noise."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    ids, real, width = data
    scored = real[:, -width:].bool()

    def in_fours() -> Any:
        return torch.cat([padded((ids[n : n + 4], real[n : n + 4], width))[0] for n in range(0, len(ids), 4)])

    with torch.no_grad():
        whole, parts = padded(data)[0], in_fours()
        with sdpa_kernel(SDPBackend.MATH):
            other = in_fours()
    by_batch, by_kernel = ((one - whole)[scored].abs().mean().item() for one in (parts, other))
    table.append(
        f"  noise: |Δlogp| mean in batches of 4 {by_batch:.5f}, and by another attention kernel {by_kernel:.5f}"
    )
    return max(by_kernel, 1e-5)


def check_model(model: Any, device: str, rehearse: bool) -> None:
    """Check differences from the padded pass, speed, and the number of recompilations."""
    from kit.core.config.load import load_config
    from kit.policy.recompute import use_recompute

    data, ways = make_batch(0, rehearse, device), passes(model, device == "cuda")
    others = [make_batch(seed, rehearse, device) for seed in range(1, BATCHES + 1)]
    padded, real = ways.pop("padded"), int(data[1].sum())
    plain = step(model, padded, data)
    took, peak = time_step(model, padded, data, device)
    table.append(f"{'padded':<16} {real / took:9,.0f} tok/s  x 1.00  {peak:6.2f} GiB")
    noise = measure_noise(model, padded, data)
    with model.disable_adapter():
        noise_off = measure_noise(model, padded, data)
    for name, run in ways.items():
        check_way(name, model, run, data, others, plain, took, noise, device)
        check_reference(model, name, run, padded, data, noise_off)
    use_recompute(model, load_config(CONFIG, ["--train.recompute=selective"]))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for kind in kinds():
        way = f"{kind}, selective"
        check_way(way, model, ways[f"{kind}, shared"], data, others[:1], plain, took, noise, device)


def time_step(model: Any, run: Callable, data: tuple, device: str) -> tuple[float, float]:
    """Seconds and peak GiB of a step."""
    import torch

    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    took = seconds(functools.partial(step, model, run, data))
    return took, torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0


def check_way(
    name: str,
    model: Any,
    run: Callable,
    data: tuple,
    others: list[tuple],
    plain: tuple,
    padded_took: float,
    noise: float,
    device: str,
) -> None:
    import torch

    scored, real = data[1][:, -data[2] :].bool(), int(data[1].sum())
    started = time.perf_counter()
    logps, gradient = step(model, run, data)
    first, graphs = time.perf_counter() - started, compiled_graphs()
    took, peak = time_step(model, run, data, device)
    for other in others:
        step(model, run, other)
    recompiled = compiled_graphs() - graphs
    difference = (logps - plain[0])[scored].abs()
    mean, most = difference.mean().item(), difference.max().item()
    cosine = torch.cosine_similarity(gradient.double(), plain[1].double(), dim=0).item()
    norm = (gradient.norm() / plain[1].norm()).item()
    table.append(
        f"{name:<16} {real / took:9,.0f} tok/s  x{padded_took / took:5.2f}  {peak:6.2f} GiB  first {first:5.1f} s  "
        f"recompiled {recompiled}  |Δlogp| mean {mean:.5f} ({mean / noise:.2f} x noise) max {most:.4f}  "
        f"gradient cosine {cosine:.6f} norm x {norm:.4f}"
    )
    bound(f"{name}: mean |Δlogp|", mean, NOISES * noise)
    bound(f"{name}: max |Δlogp|", most, MAX_NATS)
    bound(f"{name}: gradient cosine", cosine, COSINE, least=True)
    bound(f"{name}: gradient norm off by", abs(norm - 1), NORM)
    bound(f"{name}: graphs compiled over other batches", recompiled, 0)


def check_reference(model: Any, name: str, run: Callable, padded: Callable, data: tuple, noise: float) -> None:
    """Check the pass without gradients and with the adapter off."""
    import torch

    scored, real = data[1][:, -data[2] :].bool(), int(data[1].sum())
    with torch.no_grad(), model.disable_adapter():
        started = time.perf_counter()
        logps = run(data)[0]
        first = time.perf_counter() - started
        mean = (logps - padded(data)[0])[scored].abs().mean().item()
        took, theirs = (seconds(functools.partial(one, data)) for one in (run, padded))
    table.append(
        f"{'  reference':<16} {real / took:9,.0f} tok/s  x{theirs / took:5.2f}              first {first:5.1f} s  "
        f"|Δlogp| mean {mean:.5f} ({mean / noise:.2f} x noise)"
    )
    bound(f"{name}, adapter off: mean |Δlogp|", mean, NOISES * noise)


def check_exact(device: str) -> None:
    """Check a small model in float32, where `flash` falls back to `flex`."""
    import torch

    from kit.policy.packed import attention as packed_attention

    torch.backends.cuda.matmul.allow_tf32 = False
    model, data = make_model(EXACT, "float32"), make_batch(0, True, device)
    ways, scored = passes(model, False), data[1][:, -data[2] :].bool()
    plain, _ = step(model, ways["padded"], data)
    kinds = {"dense": ("dense", "flex, shared"), "flex": (None, "flex, shared"), "flash": (None, "flash, shared")}
    for name, (kind, way) in kinds.items():
        with mock.patch.object(packed_attention, "mask_kind", lambda *_: kind) if kind else contextlib.nullcontext():  # noqa: B023
            difference = (step(model, ways[way], data)[0] - plain)[scored].abs()
        mean, most = difference.mean().item(), difference.max().item()
        table.append(f"float32, shared, {name:<5}  |Δlogp| mean {mean:.2e} max {most:.2e}")
        bound(f"float32, {name}: mean |Δlogp|", mean, EXACT_NATS)


def compiled_graphs() -> int:
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--rehearse", action="store_true", help="a tiny shape, for a CPU")
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        os.environ["TRITON_CACHE_DIR"] = str(Path(cache) / "triton")
        import torch

        device = "cpu" if options.rehearse else "cuda"
        torch.manual_seed(0)
        with part("attention"):
            ways = ("dense",) if options.rehearse else kinds()
            if not options.rehearse and "cudnn" not in ways:
                table.append("attention, cudnn: not here")
            data = make_batch(0, options.rehearse, device)
            for kind in ways:
                for share in (False, True):
                    check_attention(data, kind, share)
            time_attention("", data, ways)
            each = 64 if options.rehearse else 1024
            time_attention(f"{each:,} each: ", make_batch(0, options.rehearse, device, each), ways)
        with part("model"):
            shape, dtype = (TINY, "float32") if options.rehearse else (SHAPE, "bfloat16")
            check_model(make_model(shape, dtype), device, options.rehearse)
        with part("float32"):
            check_exact(device)
    card = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(f"\n{card}, torch {torch.__version__}, {time.perf_counter() - started:.0f} s")
    print("\n".join(table))
    print("\n".join(f"MISSED {line}" for line in missed) or "every bound is kept")
    raise SystemExit(bool(missed))


if __name__ == "__main__":
    main()
