"""Cards by name (`kit/core/cards.py`), and detection of this machine's cards."""

import os
import re
import shutil
import subprocess
from dataclasses import replace

from kit.core.cards import CARDS, Card
from kit.core.errors import BadInput, did_you_mean
from kit.core.limits import MOST_GPUS

SHORT = {"h100": "h100-80g", "a100": "a100-80g", "v100": "v100-16g"}
SHORT |= {"4090": "rtx4090", "5090": "rtx5090", "3090": "rtx3090"}
# Names in nvidia-smi; the first match wins. Two sizes of a card are distinguished by their memory.
_NAMES = (
    (r"B200", "b200"),
    (r"H200", "h200"),
    (r"H100 NVL", "h100-94g"),
    (r"H100 PCIe", "h100-pcie"),
    (r"H100", "h100-80g"),
    (r"A100", "a100-80g"),
    (r"V100", "v100-32g"),
    (r"RTX PRO 6000", "rtxpro6000"),
    (r"RTX 6000 Ada", "rtx6000ada"),
    (r"L40S", "l40s"),
    (r"RTX A6000", "a6000"),
    (r"A40\b", "a40"),
    (r"L4\b", "l4"),
    (r"\bT4\b", "t4"),
    (r"A10\b|A10G", "a10"),
    (r"RTX 5090", "rtx5090"),
    (r"RTX 5080", "rtx5080"),
    (r"RTX 4090", "rtx4090"),
    (r"RTX 4080", "rtx4080"),
    (r"RTX 3090", "rtx3090"),
)
_SMALLER = {"a100-80g": (60, "a100-40g"), "v100-32g": (20, "v100-16g")}  # the card below so many GiB
HELD_BACK_GIB = 0.5  # nvidia-smi includes what the driver reserves: 140.4 GiB of an H200, of which torch sees 139.8


def parse_gpus(text: str) -> tuple[Card, int]:
    """The card and its count: `h100-80g:8`, `rtx4090`, `cpu`, or `auto` for those of this machine."""
    if text == "auto":
        return own_gpus()
    name, colon, count_text = text.partition(":")
    key = SHORT.get(name.lower(), name.lower())
    if key == "cpu":
        return _this_cpu(), 0
    if key not in CARDS:
        hint = did_you_mean(key, [*CARDS, *SHORT], cutoff=0.4)
        raise BadInput(f"--gpu {text:.60}: unknown card {name[:40]!r}.{hint} Known: {', '.join(CARDS)}, cpu, auto.")
    count = 1
    if colon:
        if not (count_text.isdecimal() and len(count_text) < 5 and 1 <= int(count_text) <= MOST_GPUS):
            raise BadInput(
                f"--gpu {text:.60}: the number of cards ({count_text[:40] or 'nothing'}) must be at least 1 and at "
                f"most {MOST_GPUS}."
            )
        count = int(count_text)
    return CARDS[key], count


def own_gpus() -> tuple[Card, int]:
    """The visible cards of this machine, all counted as the smallest; without any, the CPU and its memory."""
    if shutil.which("nvidia-smi") is None:
        return _this_cpu(), 0
    query = ["nvidia-smi", "--query-gpu=index,name,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        raise BadInput("nvidia-smi did not answer within 60 s. Name the cards: --gpu h100-80g:8.") from None
    lines = [line.split(", ") for line in done.stdout.strip().splitlines()] if done.returncode == 0 else []
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shown is not None and all(part.strip().isdecimal() for part in shown.split(",") if part.strip()):
        wanted = {part.strip() for part in shown.split(",")}
        lines = [line for line in lines if line[0] in wanted]
    if not lines:
        return _this_cpu(), 0
    _, name, mib = min(lines, key=lambda line: float(line[2]))
    return recognize(name, float(mib) / 1024), len(lines)


def recognize(name: str, gib: float) -> Card:
    """The card that nvidia-smi reports as `name` with `gib` of memory; an unknown card has no speeds."""
    for pattern, key in _NAMES:
        if re.search(pattern, name):
            below, smaller = _SMALLER.get(key, (0, key))
            key = smaller if gib < below else key
            return replace(CARDS[key], gib=min(CARDS[key].gib, round(gib - HELD_BACK_GIB, 1)))
    return Card(name, round(gib - HELD_BACK_GIB, 1))


def _this_cpu() -> Card:
    return Card("cpu", round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1))
