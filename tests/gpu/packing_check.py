"""Packed rows on one GPU against padded ones: log-probs, adapter gradients, tokens a second, compile time.

    python tests/gpu/packing_check.py             # about a minute
    python tests/gpu/packing_check.py --rehearse  # a tiny shape on a CPU, where packed rows take sdpa

Four layers of a Qwen3-8B shape with random weights (vocabulary 8,192, so that the head does not hide the layers), NF4
base, LoRA of rank 16 on all linear layers in float32, BF16 autocast, full recomputation. A batch is 2 prompts of 250
tokens with 8 completions each, lengths log-normal (median 400, sigma .8), cut at 2,048. `padded` is TRL's own pass
over all 16 rows at once. Tokens are the real ones of all rows, every prompt 8 times, in all lines, so these compare.

First the attention alone: FlexAttention with the mask of a packed row against sdpa in float32 with the dense mask, and
milliseconds beside FlashAttention for varying lengths (torch.nn.attention.varlen), which shares no prompt. Then the
model. `first` is the call that compiles, with an empty compile cache; `recompiled` counts graphs compiled over 5
further batches of other lengths. `reference` is the pass without gradients and adapter. Bounds: relative error of the
attention and its gradients .01; of the log-probs against the padded pass mean .01 and max .25 nats; gradient cosine
.998, norm within 2 %; no recompilation. Exit 1 when one is missed.
"""

import argparse
import contextlib
import functools
import inspect
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

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/gpu")]

CONFIG = str(ROOT / "recipes/configs/grpo-tiny-nf4-cpu.yaml")
SHAPE = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 4, "head_dim": 128}
SHAPE |= {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 8192}
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256}
ATTENTION_ERROR, MEAN_NATS, MAX_NATS, COSINE, NORM = 0.01, 0.01, 0.25, 0.998, 0.02
GROUPS, GROUP, BATCHES, REPEATS, SIGMA = 2, 8, 5, 3, 0.8

missed: list[str] = []
table: list[str] = []


@contextlib.contextmanager
def part(name: str):
    """What a part raises is noted, and the next one runs."""
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


def seconds(call: Callable[[], Any], repeats: int = REPEATS) -> float:
    """Median seconds of a call, the device's work included."""
    import torch

    found = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        found.append(time.perf_counter() - started)
    return statistics.median(found)


def relative(found: Any, expected: Any) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def make_batch(seed: int, rehearse: bool, device: str) -> tuple[Any, Any, int]:
    """TRL's padded ids and mask (16, W) and the number of completion columns, rows shuffled."""
    import torch

    draw, vocabulary = random.Random(seed), (TINY if rehearse else SHAPE)["vocab_size"]
    prompt, median, most = (25, 40, 80) if rehearse else (250, 400, 2048)
    rows = []
    for _ in range(GROUPS):
        ids = draw.choices(range(1, vocabulary), k=prompt)
        for _ in range(GROUP):
            length = max(1, min(most, int(draw.lognormvariate(0, SIGMA) * median)))
            rows.append((ids, draw.choices(range(1, vocabulary), k=length)))
    draw.shuffle(rows)
    width = max(len(c) for _, c in rows)
    ids = torch.tensor([p + c + [0] * (width - len(c)) for p, c in rows], device=device)
    real = torch.tensor([[1] * (prompt + len(c)) + [0] * (width - len(c)) for _, c in rows], device=device)
    return ids, real, width


def make_model(rehearse: bool) -> Any:
    import torch
    from memory_child import random_nf4
    from peft import get_peft_model
    from transformers import Qwen3Config
    from trl.trainer.utils import add_fused_lm_head

    from recipes.parts.config import load_config
    from recipes.parts.packed_attention import use_packed_attention
    from recipes.parts.policy import lora_config, set_adapter_dtype

    with tempfile.TemporaryDirectory() as folder:
        Qwen3Config(**(TINY if rehearse else SHAPE), pad_token_id=0, max_position_embeddings=8192).save_pretrained(
            folder
        )
        given = [f"--model.path={folder}", f"--model.dtype={'float32' if rehearse else 'bfloat16'}"]
        config = load_config(CONFIG, given)
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


def make_trainer(device: str) -> Any:
    """What the passes need of a trainer."""
    import torch

    autocast = (lambda: torch.autocast("cuda", torch.bfloat16)) if device == "cuda" else contextlib.nullcontext
    return SimpleNamespace(accelerator=SimpleNamespace(autocast=autocast))


def passes(model: Any, device: str) -> dict[str, Callable[[tuple], tuple]]:
    """Log-probs and entropies (16, C) of a batch, by the way they are computed."""
    from recipes.parts.packing import packed_logps
    from recipes.parts.trl_trainer import GRPOTrainer

    stub, padded = make_trainer(device), GRPOTrainer._get_per_token_logps_and_entropies.__wrapped__
    return {
        "padded": lambda data: padded(stub, model, *data, compute_entropy=True)[:2],
        "packed": lambda data: packed_logps(stub, model, *data, 16384, False, True),
        "packed, shared": lambda data: packed_logps(stub, model, *data, 16384, True, True),
    }


def step(model: Any, run: Callable[[tuple], tuple], data: tuple) -> tuple[Any, Any]:
    """Log-probs (16, C) and the adapter's gradient of a loss that weights every token on its own."""
    import torch

    model.zero_grad(set_to_none=True)
    logps, entropies = run(data)
    _, real, width = data
    weight = torch.linspace(-1, 2, logps.numel(), device=logps.device).view_as(logps) * real[:, -width:]
    ((logps * weight).sum() + 0.01 * (entropies * weight).sum()).div(real.sum()).backward()
    return logps.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def both(call: Callable, given: list, grad: Any) -> list:
    """The output of an attention and its gradients."""
    import torch

    output = call(*given)
    return [output, *torch.autograd.grad(output, given, grad.to(output.dtype))]


def check_attention(share: bool) -> list[int]:
    """FlexAttention over one packed row; returns the lengths of its sequences."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    from recipes.parts.packed_attention import _compiled
    from recipes.parts.packing import _pack, _read

    data = make_batch(0, False, "cuda")
    rows, everything, scale = _read(*data), list(range(GROUPS * GROUP)), 128**-0.5
    packed = _pack(rows, everything, share, data[0])
    length, flex = packed.tokens.size(1), _compiled()
    made = [torch.randn(1, length, h, 128, device="cuda", dtype=torch.bfloat16) for h in (32, 8, 8)]
    inputs = [one.transpose(1, 2).requires_grad_() for one in made]
    grad = torch.randn_like(inputs[0])

    def ours() -> list:
        return both(lambda q, k, v: flex(q, k, v, packed.mask, scale), inputs, grad)

    started = time.perf_counter()
    found = ours()
    torch.cuda.synchronize()
    first, name = time.perf_counter() - started, "packed, shared" if share else "packed"
    packing = seconds(lambda: _pack(_read(*data), everything, share, data[0]), 10)
    table.append(
        f"attention alone, {name:<15} T {length:6d}  forward + backward {seconds(ours) * 1e3:7.2f} ms  "
        f"first {first:5.1f} s  packing and mask {packing * 1e3:.1f} ms"
    )
    # One key head and its four query heads: in float32 sdpa with a mask takes T x T for each.
    position = torch.arange(length, device="cuda")
    dense = packed.mask.mask_mod(0, 0, position[:, None], position[None, :])[None, None]

    def reference(q: Any, k: Any, v: Any) -> Any:
        return scaled_dot_product_attention(q, k.expand_as(q), v.expand_as(q), attn_mask=dense, scale=scale)

    exact = [one[:, :heads].detach().float().requires_grad_() for one, heads in zip(inputs, (4, 1, 1), strict=True)]
    wanted = both(reference, exact, grad[:, :4])
    errors = [relative(mine[:, : one.size(1)], one) for mine, one in zip(found, wanted, strict=True)]
    table.append(f"  relative error of output, dq, dk, dv: {' '.join(f'{error:.4f}' for error in errors)}")
    bound(f"{name}: relative error of the attention", max(errors), ATTENTION_ERROR)
    return [len(p) + len(c) - 1 for p, c in zip(rows.prompts, rows.completions, strict=True)]


def time_varlen(lengths: list[int]) -> str:
    import torch
    from torch.nn.attention.varlen import varlen_attn

    ends = torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)
    total, most = sum(lengths), max(lengths)
    given = [torch.randn(total, h, 128, device="cuda", dtype=torch.bfloat16).requires_grad_() for h in (32, 8, 8)]
    known, keys = inspect.signature(varlen_attn).parameters, {}
    keys |= {"enable_gqa": True} if "enable_gqa" in known else {}
    keys |= {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}

    def run() -> None:
        output = varlen_attn(*given, ends, ends, most, most, **keys)
        torch.autograd.grad(output, given, torch.ones_like(output))

    try:
        run()
    except Exception as error:
        return f"attention alone, varlen_attn: {type(error).__name__}: {str(error)[:90]}"
    return f"attention alone, varlen_attn    T {total:6d}  forward + backward {seconds(run) * 1e3:7.2f} ms"


def check_model(model: Any, device: str, rehearse: bool) -> None:
    """Differences from the padded pass, speed, and how often something is compiled."""
    import torch

    data, ways = make_batch(0, rehearse, device), passes(model, device)
    others = [make_batch(seed, rehearse, device) for seed in range(1, BATCHES + 1)]
    scored, real = data[1][:, -data[2] :].bool(), int(data[1].sum())
    plain, speed = None, 0.0
    for name, run in ways.items():
        started = time.perf_counter()
        logps, gradient = step(model, run, data)
        first, graphs = time.perf_counter() - started, compiled_graphs()
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        took = seconds(functools.partial(step, model, run, data))
        peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
        speed = speed or real / took
        line = (
            f"{name:<15} {real / took:9,.0f} tok/s  x{real / took / speed:5.2f}  {peak:6.2f} GiB  first {first:5.1f} s"
        )
        if plain is None:
            plain = logps, gradient
            table.append(line)
            continue
        for other in others:
            step(model, run, other)
        recompiled = compiled_graphs() - graphs
        difference = (logps - plain[0])[scored].abs()
        mean, most = difference.mean().item(), difference.max().item()
        cosine = torch.cosine_similarity(gradient.double(), plain[1].double(), dim=0).item()
        norm = (gradient.norm() / plain[1].norm()).item()
        table.append(
            f"{line}  recompiled {recompiled}  |Δlogp| mean {mean:.5f} max {most:.4f}  gradient cosine {cosine:.6f} "
            f"norm x {norm:.4f}"
        )
        bound(f"{name}: mean |Δlogp|", mean, MEAN_NATS)
        bound(f"{name}: max |Δlogp|", most, MAX_NATS)
        bound(f"{name}: gradient cosine", cosine, COSINE, least=True)
        bound(f"{name}: gradient norm off by", abs(norm - 1), NORM)
        bound(f"{name}: graphs compiled over {BATCHES} batches", recompiled, 0)
        check_reference(model, name, run, ways["padded"], data)


def check_reference(model: Any, name: str, run: Callable, padded: Callable, data: tuple) -> None:
    """The pass without gradients, the adapter off."""
    import torch

    scored, real = data[1][:, -data[2] :].bool(), int(data[1].sum())
    with torch.no_grad(), model.disable_adapter():
        started = time.perf_counter()
        logps = run(data)[0]
        first = time.perf_counter() - started
        mean = (logps - padded(data)[0])[scored].abs().mean().item()
        took, theirs = (seconds(functools.partial(one, data)) for one in (run, padded))
    table.append(
        f"{'  reference':<15} {real / took:9,.0f} tok/s  x{theirs / took:5.2f}              first {first:5.1f} s  "
        f"|Δlogp| mean {mean:.5f}"
    )
    bound(f"{name}, adapter off: mean |Δlogp|", mean, MEAN_NATS)


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
        if not options.rehearse:
            for share in (False, True):
                with part("attention"):
                    lengths = check_attention(share)
            with part("attention by varlen_attn"):
                table.append(time_varlen(lengths))
        with part("model"):
            check_model(make_model(options.rehearse), device, options.rehearse)
    card = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(f"\n{card}, torch {torch.__version__}, {time.perf_counter() - started:.0f} s")
    print("\n".join(table))
    print("\n".join(f"MISSED {line}" for line in missed) or "every bound is kept")
    raise SystemExit(bool(missed))


if __name__ == "__main__":
    main()
