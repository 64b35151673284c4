"""Models x cards: the longest completion and the largest micro-batch that fit.

Trainer and server share one card or have a card each; in a second table they share one card and one base
(`server.share_base`).
"""

import json

from kit.core.config.load import config_from_dict
from kit.core.config.schema import Config
from kit.core.errors import DONE
from kit.plan import shapes
from kit.plan.decoder import Shape
from kit.plan.fitting import STEP, largest_that_fits, lay_out
from kit.plan.gpus import CARDS, Card
from kit.plan.memory import full_cache_gib
from kit.plan.shapes import shape_by_size
from kit.plan.sizes import with_keys

MODELS = (
    *("qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b", "qwen3-14b", "qwen3-32b", "qwen3-30b-a3b"),
    *("qwen3.5-9b", "qwen3.5-27b", "gemma3-12b", "gemma3-27b"),
)
REFUSED = {"gpt-oss-20b": "gpt_oss"}  # a row that says why; model types of shapes.REFUSED
# One card per memory size.
SIZES = {"16 GB": "rtx4080", "24 GB": "rtx4090", "48 GB": "l40s", "80 GB": "h100-80g", "141 GB": "h200"}
WAYS = ("shared", "split")
ONE_BASE = "one base"  # a way for models that vLLM serves unmerged: dense, and no part of a larger one
ONE_BASE_MODELS = ("qwen3-1.7b", "qwen3-4b", "qwen3-8b", "qwen3-14b", "qwen3-32b")
GROUP, PROMPT, COMPLETION, COMPLETIONS = 8, 512, 2048, 64


def matrix_config(way: str) -> Config:
    """The configuration of the table: rank 16, on experts too; prompts of 512 tokens, a group of 8 at once on an FP8
    server with an FP8 KV cache, no CUDA graphs."""
    values: dict[str, dict] = {
        "run": {"name": "matrix"},
        "model": {"id": "matrix"},
        "rollout": {"backend": "server", "group_size": GROUP, "max_prompt_length": PROMPT},
        "server": {"max_num_seqs": GROUP, "kv_cache": "fp8", "enforce_eager": True},
        "train": {"max_steps": 1, "per_device_train_batch_size": 1, "gradient_accumulation_steps": COMPLETIONS},
    }
    if way == "shared":
        values["server"] |= {"sleep": True, "nf4_copy": "host"}
    if way == ONE_BASE:
        values["server"] |= {"share_base": True, "weights": "fp8_per_channel"}
        values["policy"] = {"quantization": "fp8"}
        values["rollout"] |= {"sync": "adapter"}
    return config_from_dict(values)


def fits(shape: Shape, card: Card, way: str, tokens: int, micro: int) -> bool:
    keys = {"rollout.max_completion_length": tokens, "train.per_device_train_batch_size": micro}
    config = with_keys(matrix_config(way), keys | {"train.gradient_accumulation_steps": COMPLETIONS // micro})
    config = with_keys(config, {"server.kv_cache_gib": full_cache_gib(shape, config)})
    return lay_out(shape, config, card, 2 if way == "split" else 1).fits


def longest(shape: Shape, card: Card, way: str) -> int | None:
    """The longest completion in tokens, one at a time in the update; None if not even 128 tokens fit."""
    sizes = range(STEP, shape.positions - PROMPT + 1, STEP)
    return largest_that_fits(sizes, lambda tokens: fits(shape, card, way, tokens, 1))


def widest(shape: Shape, card: Card, way: str) -> int | None:
    """The largest micro-batch of completions of 2,048 tokens; None if not even one fits."""
    sizes = [2**n for n in range(COMPLETIONS.bit_length())]
    return largest_that_fits(sizes, lambda micro: fits(shape, card, way, COMPLETION, micro))


Cell = dict[str, int | None]  # completion_tokens, micro_batch


def matrix() -> dict[str, dict[str, dict[str, Cell]]]:
    """model -> card size -> shared, split, and for some models one base -> cell."""

    def cell(model: str, size: str, way: str) -> Cell:
        shape, card = shape_by_size(model), CARDS[SIZES[size]]
        return {"completion_tokens": longest(shape, card, way), "micro_batch": widest(shape, card, way)}

    ways = {model: (*WAYS, *((ONE_BASE,) if model in ONE_BASE_MODELS else ())) for model in MODELS}
    return {model: {size: {way: cell(model, size, way) for way in ways[model]} for size in SIZES} for model in MODELS}


def print_matrix(as_json: bool) -> int:
    found, refused = matrix(), {model: shapes.REFUSED[kind] for model, kind in REFUSED.items()}
    if as_json:
        print(json.dumps(found | {model: {"refused": why} for model, why in refused.items()}, indent=2))
        return DONE
    print(
        "Longest completion in tokens (k = 1,024), and the largest micro-batch of completions of 2,048;\n"
        "trainer and server on one card / on a card each; - does not fit.\n"
    )
    _print_header()
    for model, row in found.items():
        _print_row(model, [" / ".join(_spell(row[size][way]) for way in WAYS) for size in SIZES])
    for model, why in refused.items():
        print(f"| {model} | refused: {why} |" + " |" * (len(SIZES) - 1))
    print("\nOn one card with one FP8 base in memory (server.share_base):\n")
    _print_header()
    for model in ONE_BASE_MODELS:
        _print_row(f"{model}, {ONE_BASE}", [_spell(found[model][size][ONE_BASE]) for size in SIZES])
    return DONE


def _print_header() -> None:
    _print_row("model", [f"{size} ({SIZES[size]})" for size in SIZES])
    print("|---" * (1 + len(SIZES)) + "|")


def _print_row(name: str, cells: list[str]) -> None:
    print(f"| {name} | {' | '.join(cells)} |")


def _spell(cell: Cell) -> str:
    tokens, micro = cell["completion_tokens"], cell["micro_batch"]
    if tokens is None:
        return "-"
    text = f"{tokens / 1024:.0f}k" if tokens >= 10240 else f"{tokens / 1024:.1f}k" if tokens >= 1024 else str(tokens)
    return f"{text}, {micro}" if micro else text
