"""`train.recompute: auto`: the least recomputation in the backward pass that fits the card.

It fits if the plan's high figure of the update is within the card's memory, less what replicas on the same card take,
and within `train.max_gpu_gib`. Only sizes that every process sees alike are used (the card's memory, not what is
currently free), so all processes of a run come to the same answer.
"""

import dataclasses
import os
from typing import Literal

from kit.core.config.recompute_rules import reentrant_because
from kit.core.config.schema import Config
from kit.core.config.sharding_rules import announced
from kit.core.config.shared_gpu import replicas_beside_trainer
from kit.core.errors import BadInput
from kit.plan import cost, memory
from kit.plan.decoder import Shape
from kit.plan.gpus import CARDS, Card, parse_gpus
from kit.plan.shapes import config_shape
from kit.plan.sharding import is_sharded, sharded
from kit.plan.sizes import Facts, process_completions, with_keys

FRACTIONS = (0.25, 0.5, 0.75, 1.0)
Mode = Literal["none", "selective", "full"]
CHOICES: list[tuple[Mode, float]] = [
    ("none", 1.0),
    *(("selective", fraction) for fraction in FRACTIONS),
    *(("full", fraction) for fraction in FRACTIONS),
]


def least(shape: Shape, config: Config, card: Card, processes: int, replicas: int) -> tuple[Mode, float]:
    """Mode and fraction with the fewest expected seconds among those that fit; full if none does.

    `replicas` are on the trainer's card.
    """
    if card.is_cpu:
        return "none", 1.0
    room = card.gib
    if replicas:
        parts = memory.server_parts(shape, config, card)
        server = memory.asleep_memory(parts) if config.server.sleep else memory.server_memory(parts, config)
        room -= replicas * server.high
    speed = card if cost.can_estimate(card) else CARDS[cost.MEASURED_CARD]
    found, is_reentrant = [], reentrant_because(config, announced()) is not None
    for mode, fraction in CHOICES:
        if mode == "selective" and is_reentrant:
            continue
        made = set_recompute(config, mode, fraction)
        parts = memory.update_parts(shape, made, card, processes)
        if is_sharded(processes):
            parts = sharded(parts, shape, made, processes)
        low, _, high = dataclasses.astuple(memory.process_memory(parts, card, processes))
        limit, context = config.train.max_gpu_gib, low - memory.allocated(parts)  # torch's limit excludes the context
        if high <= room and (limit is None or high - context <= limit):
            found.append((cost.update_seconds(shape, made, speed, process_completions(config)), mode, fraction))
    return min(found)[1:] if found else ("full", 1.0)


def set_recompute(config: Config, mode: str, fraction: float) -> Config:
    """A copy of the configuration with another `train.recompute`."""
    return with_keys(config, {"train.recompute": mode, "train.recompute_fraction": fraction})


def resolve(config: Config, facts: Facts, processes: int) -> str:
    """Replace `auto` by a mode and a fraction, and return them in one line.

    `facts` is the model's config.json. A model that the plan does not know gets full.
    """
    card, _ = parse_gpus("cpu" if os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true" else "auto")
    try:
        shape = config_shape(config, facts)
        mode, fraction = least(shape, config, card, processes, replicas_beside_trainer(config))
        why = f"{card.name}, {card.gib:g} GiB"
    except BadInput as error:
        mode, fraction, why = "full", 1.0, f"the plan does not know the model: {error}"
    config.train.recompute, config.train.recompute_fraction = mode, fraction
    return f"{describe_recompute(config)} (auto: {why})"


def describe_recompute(config: Config) -> str:
    """Mode and share of the layers, in a few words."""
    mode, fraction = config.train.recompute, config.train.recompute_fraction
    return f"recompute {mode}" + (f" in {100 * fraction:g} % of the layers" if mode != "none" and fraction < 1 else "")
