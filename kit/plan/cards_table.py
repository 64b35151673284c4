"""The rows of `kit/core/cards.py` as tables: what each card computes, trains in and serves."""

import dataclasses
import json

from kit.core.cards import CARDS, GENERATIONS, Generation
from kit.core.errors import DONE

HEADER = (
    *("cards", "capability", "model.dtype", "policy.compute fp8", "FP8 server.weights", "W4A16", "NVFP4", "MXFP8"),
    *("FP8 KV cache", "vLLM's attention", "packed_attention"),
)


def cards_of(row: Generation) -> list[str]:
    """Names of the cards of a row."""
    return [card.name for card in CARDS.values() if card.generation is row]


def generation_lines() -> list[str]:
    """A Markdown table with a line per compute capability."""
    lines = [f"| {' | '.join(HEADER)} |", "|---" * len(HEADER) + "|"]
    for row in GENERATIONS:
        found = [f"{', '.join(cards_of(row))} ({row.name})", row.number]
        if not row.is_covered:
            lines.append(f"| {' | '.join([*found, 'refused: no code in the CUDA 13 builds', *[''] * 8])} |")
            continue
        fp8 = [f"{weights.removeprefix('fp8_')} {product}" for weights, product in row.served.items()]
        kernels = [name for name in ("flash", "cudnn") if getattr(row, name)]
        found += [", ".join(row.dtypes), _yes(row.trainer_fp8), ", ".join(one for one in fp8 if "W8" in one)]
        found += [row.w4a16, row.nvfp4, row.mxfp8, _yes(row.fp8_cache), row.attention, ", ".join([*kernels, "flex"])]
        lines.append(f"| {' | '.join(found)} |")
    return lines


def card_lines() -> list[str]:
    """A Markdown table with a line per card."""
    lines = ["| --gpu | capability | GiB | 16-bit TFLOP/s | FP8 TFLOP/s | GB/s |", "|---" * 6 + "|"]
    for card in CARDS.values():
        figures = (card.gib, card.half_tflops, card.fp8_tflops, card.gb_per_s)
        shown = ["–" if one is None else f"{one:g}" for one in figures]
        lines.append(f"| {' | '.join([card.name, card.generation.number, *shown])} |")
    return lines


def print_cards(as_json: bool) -> int:
    if as_json:
        rows = {row.number: dataclasses.asdict(row) | {"cards": cards_of(row)} for row in GENERATIONS}
        print(json.dumps({"generations": rows, "cards": {name: dataclasses.asdict(c) for name, c in CARDS.items()}}))
    else:
        print("\n".join([*generation_lines(), "", *card_lines()]))
    return DONE


def _yes(holds: bool) -> str:
    return "yes" if holds else "no"
