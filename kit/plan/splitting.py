"""Every possible way to divide the cards between trainer and servers, with its seconds of a step."""

import math
from dataclasses import dataclass

from kit.plan import coefficients, cost, memory
from kit.plan.fitting import (
    Layout,
    changed,
    fits_with,
    in_turn,
    is_refused,
    largest_sequences,
    micro_batches,
    step_time,
)
from kit.plan.sizes import Keys, with_keys


@dataclass
class Split:
    """A way to use the cards: trainer processes and replicas, seconds of a step, and whether it fits."""

    keys: Keys
    trainers: int
    servers: int
    time: cost.StepTime
    fits: bool


def _shared_cache(layout: Layout, keys: Keys) -> Keys:
    """KV cache of a server that shares its card: all sequences at full length, as far as the card has room."""
    config = layout.config
    if config.server.kv_cache_gib is not None:
        return {}
    one = memory.sequence_gib(layout.shape, config)
    least = {"server.kv_cache_gib": math.ceil(10 * config.rollout.group_size * one) / 10}
    if (found := changed(layout, keys | least)) is None or not found.fits:
        return least
    return {
        "server.kv_cache_gib": math.floor(10 * one * min(config.server.max_num_seqs, largest_sequences(found))) / 10
    }


def _shared_by_all(layout: Layout) -> Keys | None:
    """Keys with which every card both trains and serves, in turn and without sleeping; None if nothing fits.

    The replicas hold the KV cache of their part of a step, as far as there is room. The trainer's limit is the rest.
    """
    config, card = layout.config, layout.card
    each, everyone = config.server.tensor_parallel, list(range(layout.count))
    if layout.count < 2 or layout.count % each or card.is_cpu:
        return None
    replicas, group = layout.count // each, config.rollout.group_size
    keys: Keys = {"rollout.backend": "server", "rollout.server_urls": _urls(replicas), "train.gpus": everyone}
    keys |= {"server.gpus": everyone, "server.sleep": False}
    keys |= in_turn(config)
    most = min(config.server.max_num_seqs, math.ceil(layout.completions / replicas))
    context = sum(coefficients.value(name) for name in ("trainer_context_gib", "process_group_gib"))
    for sequences_at_once in sorted({most, max(most // 2, group), group}, reverse=True):
        cache = math.ceil(10 * sequences_at_once * memory.sequence_gib(layout.shape, config)) / 10
        changed_config = with_keys(config, keys | {"server.kv_cache_gib": cache})
        server = memory.server_memory(memory.server_parts(layout.shape, changed_config, card), changed_config).high
        room = {
            "server.kv_cache_gib": cache,
            "server.gpu_memory_utilization": math.ceil(100 * server / card.gib) / 100,
        }
        room |= {"train.max_gpu_gib": math.floor(card.gib - server - context)}
        if room["train.max_gpu_gib"] > 0 and fits_with(layout, keys | room | _batch_keys(layout, layout.count)):
            return keys | room
    return None


def _urls(replicas: int) -> list[str]:
    return [f"http://127.0.0.1:{8000 + number}" for number in range(replicas)]


def _batch_keys(layout: Layout, trainers: int) -> Keys:
    """Batch keys for the step's completions on this many trainer processes, with micro-batches no larger than now."""
    own = layout.completions // trainers
    micro = max(size for size in micro_batches(own) if size <= layout.config.train.per_device_train_batch_size)
    return {"train.per_device_train_batch_size": micro, "train.gradient_accumulation_steps": own // micro}


def splits(layout: Layout) -> list[Split]:
    """Every way to divide the cards that can be placed and divides the step's completions evenly, fastest first.

    Includes all cards for both if that fits.
    """
    config, found, is_fine = layout.config, [], not is_refused(layout)
    each, total = config.server.tensor_parallel, layout.completions
    own = {"rollout.backend": "in_process", "train.gpus": list(range(layout.count))} | in_turn(config)
    choices: list[Keys] = [own]
    for replicas in range(1, layout.count // each + (layout.count == 1)):
        first = layout.count - replicas * each
        keys: Keys = {"rollout.backend": "server", "rollout.server_urls": _urls(replicas)}
        keys |= {"server.gpus": [*range(first, layout.count)], "server.sleep": False}
        choices.append(keys | {"train.gpus": list(range(first))})
        if layout.count == 1:
            choices[-1] |= {"train.gpus": [0], "server.gpus": [0], "server.sleep": True, "server.nf4_copy": "host"}
            choices[-1] |= in_turn(config)
            choices[-1] |= _shared_cache(layout, choices[-1])
    if total % max(1, layout.count) == 0 and (shared := _shared_by_all(layout)):
        choices.append(shared)
    if config.server.share_base:  # on one card; the others load a base of their own
        choices = [keys | {"server.share_base": False} for keys in choices]
        choices.append({"server.share_base": True, "train.gpus": [0], "server.gpus": [0]})
    for keys in choices:
        trainers = len(keys["train.gpus"])
        if trainers < 1 or total % trainers:
            continue
        keys |= _batch_keys(layout, trainers)
        after = changed(layout, keys)
        if after is None or (is_fine and is_refused(after)):
            continue
        found.append(Split(keys, trainers, after.replicas * each, step_time(after), after.fits))
    return sorted(found, key=lambda one: (not one.fits, one.time.step))
