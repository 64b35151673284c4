"""Whether a configuration fits its cards, the largest one that does, and what to change first if it does not.

Every figure comes from the same model (memory.py), run again on a changed copy of the configuration.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kit.core.cards import W8A8
from kit.core.config import card_rules, expert_rules
from kit.core.config.checks import check_config
from kit.core.config.recompute_rules import reentrant_because
from kit.core.config.schema import Config
from kit.core.config.sharding_rules import announced
from kit.core.errors import BadInput
from kit.plan import cost, memory, quantized
from kit.plan.decoder import Shape
from kit.plan.gpus import CARDS, Card
from kit.plan.memory import Estimate
from kit.plan.placement import Placement, place
from kit.plan.recompute import least, set_recompute
from kit.plan.sharding import LOADING, is_sharded, loading, sharded
from kit.plan.sizes import Keys, least_pack, process_completions, row_tokens, with_keys

STEP, PACK_STEP = 128, 1024  # tokens; completion lengths and packs are searched in multiples of them


@dataclass
class CardUse:
    """One card (or the machine's memory): who uses it, and how much they take together, by phase."""

    name: str
    roles: list[str]
    limit_gib: float
    phases: dict[str, Estimate] = field(default_factory=dict)

    @property
    def peak(self) -> Estimate:
        return max(self.phases.values(), key=lambda one: one.expected)

    @property
    def verdict(self) -> str:
        if self.peak.expected > self.limit_gib:
            return "does not fit"
        return "fits" if self.peak.high <= self.limit_gib else "tight"


@dataclass
class Layout:
    """A configuration on its cards. `faults` are obstacles other than a card's memory."""

    shape: Shape
    config: Config
    card: Card
    count: int
    processes: int
    replicas: int
    cards: list[CardUse]
    faults: list[str]
    trainer: dict[str, dict[str, float]]
    server: dict[str, float] | None
    chose: bool = False  # train.recompute was auto; `config` holds what was chosen

    @property
    def fits(self) -> bool:
        return not self.faults and all(one.verdict != "does not fit" for one in self.cards)

    @property
    def worst(self) -> CardUse:
        return max(self.cards, key=lambda one: one.peak.expected - one.limit_gib)

    @property
    def shares(self) -> bool:
        """Whether any card both trains and serves."""
        return any({"trainer", "server"} <= set(one.roles) for one in self.cards)

    @property
    def completions(self) -> int:
        """Completions per step, over all processes."""
        return process_completions(self.config) * self.processes


def check_keys(config: Config, card: Card, count: int) -> None:
    """Raise `BadInput` for what the recipe refuses on these cards, regardless of their memory.

    The launcher decides how many processes a CPU gets, so any batch is accepted there.
    """
    trainer = placed(config, card, count).trainer
    is_counted = count or config.server.share_base  # which one process trains
    check_config(config, max(1, len(trainer)) if is_counted else max(1, config.rollout.group_size))


def placed(config: Config, card: Card, count: int) -> Placement:
    """Assign `count` cards to trainer and replicas; raises `BadInput` if there are too few."""
    serving = config.rollout.backend == "server"
    listed = {"train.gpus": config.train.gpus, "server.gpus": config.server.gpus if serving else None}
    if count < (needed := 1 + max((gpu for gpus in listed.values() for gpu in gpus or []), default=-1)):
        keys = " and ".join(f"{key} {gpus}" for key, gpus in listed.items() if gpus)
        raise BadInput(
            f"{keys} need {needed} GPUs, there are {count} ({card.name}). Name the GPUs of the run's machine, such "
            f"as --gpu {'h200' if card.is_cpu else card.name}:{needed}, or change the lists."
        )
    names = [str(number) for number in range(count)]
    where = place(config, names, replicas_on_gpus=serving and count > 0, trainer_on_gpus=count > 0)
    replicas, each = len(config.rollout.server_urls), config.server.tensor_parallel
    if serving and count and len(where.servers) < replicas * each:
        raise BadInput(
            f"{replicas} rollout.server_urls of server.tensor_parallel {each} need {replicas * each} GPUs, there are "
            f"{count} ({card.name}). Name more with --gpu {card.name}:{replicas * each + 1}, or use fewer replicas."
        )
    return where


def lay_out(shape: Shape, config: Config, card: Card, count: int) -> Layout:
    """Lay out the configuration on `count` cards, 0 for the CPU; raises `BadInput` if its replicas need more cards."""
    serving, where = config.rollout.backend == "server", placed(config, card, count)
    replicas = len(config.rollout.server_urls) if serving else 0
    processes = max(1, len(where.trainer))
    if chose := config.train.recompute == "auto":
        beside = max((where.servers.count(name) for name in where.trainer), default=0)
        config = set_recompute(config, *least(shape, config, card, processes, beside))
    trainer = memory.trainer_phases(shape, config, card, processes)
    if is_sharded(processes):
        trainer = {
            name: sharded(parts, shape, config, processes, generates=name == "rollout" and not serving)
            for name, parts in trainer.items()
        }
        trainer[LOADING] = loading(shape, config, card)
    server = memory.server_parts(shape, config, card) if serving else None
    layout = Layout(shape, config, card, count, processes, replicas, [], [], trainer, server, chose)
    layout.faults = _faults(layout)
    if count == 0:
        phases = _phases(layout, replicas)
        layout.cards = [CardUse("memory", ["trainer"] + ["server"] * replicas, card.gib, phases)]
        return layout
    for name in map(str, range(count)):
        hosted = where.servers.count(name)
        roles = ["trainer"] * (name in where.trainer) + ["server"] * hosted
        if roles:
            phases = _phases(layout, hosted) if "trainer" in roles else {"all": memory.server_memory(server, config)}
            layout.cards.append(CardUse(f"GPU {name}", roles, card.gib, phases))
    return layout


def _phases(layout: Layout, hosted: int) -> dict[str, Estimate]:
    """Memory by phase of a card with a trainer process and `hosted` replicas."""
    config, card = layout.config, layout.card
    found = {name: _process(layout, parts) for name, parts in layout.trainer.items()}
    if not hosted:
        return found
    awake = memory.server_memory(layout.server, config)
    asleep = memory.asleep_memory(layout.server) if config.server.sleep and not card.is_cpu else awake
    for name in found:
        for _ in range(hosted):
            found[name] += awake if name in ("calibration", "rollout") else asleep
    return found


def _process(layout: Layout, parts: dict[str, float]) -> Estimate:
    """Memory of a trainer process; its allocator stays within `train.max_gpu_gib` if that suffices."""
    found, limit = memory.process_memory(parts, layout.card, layout.processes), layout.config.train.max_gpu_gib
    if limit is None or layout.card.is_cpu or memory.allocated(parts) > limit:
        return found
    most = limit + found.low - memory.allocated(parts)
    return Estimate(min(found.low, most), min(found.expected, most), min(found.high, most))


def _faults(layout: Layout) -> list[str]:
    config, card, shape = layout.config, layout.card, layout.shape
    found, limit = [], config.train.max_gpu_gib
    largest = max(memory.allocated(parts) for parts in layout.trainer.values())
    if limit is not None and not card.is_cpu and largest > limit:
        found.append(
            f"The trainer needs {largest:.1f} GiB and train.max_gpu_gib is {limit:g}: it would exceed its own limit."
        )
    if (length := row_tokens(config)) > shape.positions:
        found.append(f"Prompt and completion ({length} tokens) are longer than the model's {shape.positions}.")
    if config.policy.embeddings == "host" and shape.tied:
        found.append("policy.embeddings is host and the model's output layer has the same weight. Set it to gpu.")
    if card.capability is not None:
        found += card_rules.trainer_faults(config, card.name, card.capability)
        found += card_rules.server_faults(config, card.name, card.capability)
    found += quantized.faults(shape, config)
    if shape.experts is not None:
        found += [f"The model is a mixture of experts: {one}." for one in expert_rules.faults(config)]
    if layout.server is None:
        return found
    one, cache = memory.sequence_gib(shape, config), layout.server["KV cache"]
    if cache < one:
        found.append(
            f"The server has {cache:.1f} GiB for its KV cache and one sequence of full length takes {one:.1f}: vLLM "
            "does not start."
        )
    if shape.heads % config.server.tensor_parallel:
        found.append(
            f"server.tensor_parallel ({config.server.tensor_parallel}) must divide the {shape.heads} attention heads."
        )
    return found


def is_refused(layout: Layout) -> bool:
    """Whether the recipe refuses the keys of a layout."""
    try:
        check_keys(layout.config, layout.card, layout.count)
        return False
    except BadInput:
        return True


def changed(layout: Layout, keys: Keys) -> Layout | None:
    """The layout with some keys changed; None if that cannot be placed on the cards."""
    try:
        again = {"train.recompute": "auto"} if layout.chose else {}
        return lay_out(layout.shape, with_keys(layout.config, again | keys), layout.card, layout.count)
    except BadInput:
        return None


def micro_batches(completions: int) -> list[int]:
    """Micro-batch sizes that divide a process's completions, smallest first."""
    return [size for size in range(1, completions + 1) if completions % size == 0]


def micro_batch_keys(config: Config, micro: int) -> Keys:
    own = process_completions(config)
    return {"train.per_device_train_batch_size": micro, "train.gradient_accumulation_steps": own // micro}


def largest_micro_batch(layout: Layout) -> int | None:
    """The largest micro-batch that fits with the same completions per step; None if not even one at a time does."""
    sizes = micro_batches(process_completions(layout.config))
    return largest_that_fits(sizes, lambda size: fits_with(layout, micro_batch_keys(layout.config, size)))


def largest_pack(layout: Layout) -> int | None:
    """The largest `train.micro_batch_tokens`, a multiple of 1,024, that fits; None if a single row does not."""
    everything = process_completions(layout.config) * row_tokens(layout.config)
    sizes = range(math.ceil(least_pack(layout.config) / PACK_STEP) * PACK_STEP, everything + PACK_STEP, PACK_STEP)
    return largest_that_fits(sizes, lambda size: fits_with(layout, {"train.micro_batch_tokens": size}))


def largest_completion(layout: Layout) -> int | None:
    """The longest completion (a multiple of 128 tokens) that fits with everything else as configured.

    On a server, the KV cache must hold a group of them at once.
    """

    def fits(tokens: int) -> bool:
        found = changed(layout, {"rollout.max_completion_length": tokens})
        if found is None or not found.fits:
            return False
        return found.server is None or sequences(found) >= found.config.rollout.group_size

    train, positions = layout.config.train, layout.shape.positions
    pack = (train.micro_batch_tokens or positions) * train.sequence_parallel  # a row has to fit into one
    longest = min(pack, positions) - layout.config.rollout.max_prompt_length
    return largest_that_fits(range(STEP, longest + 1, STEP), fits)


def sequences(layout: Layout) -> int:
    """Sequences of full length that a replica's KV cache holds."""
    return int(layout.server["KV cache"] / memory.sequence_gib(layout.shape, layout.config) + 1e-9)


def largest_sequences(layout: Layout) -> int | None:
    """Most full-length completions that a replica generates at once if its KV cache takes what the card has left.

    None without a server, and on a CPU.
    """
    if layout.server is None or layout.card.is_cpu:
        return None
    hosting = next(one for one in layout.cards if "server" in one.roles)
    free = hosting.limit_gib - max(one.expected for one in hosting.phases.values())
    if layout.config.server.kv_cache_gib is None:
        free = min(0.0, free)
    one = memory.sequence_gib(layout.shape, layout.config)
    return max(0, int((layout.server["KV cache"] + free) / one))


def fits_with(layout: Layout, keys: Keys) -> bool:
    """Whether it fits with some keys changed."""
    found = changed(layout, keys)
    return found is not None and found.fits


def largest_that_fits(sizes: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """The largest of the ascending sizes that fits, by bisection: the smaller ones then fit, too."""
    low, high = 0, len(sizes)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if fits(sizes[middle]) else (low, middle)
    return sizes[low - 1] if low else None


@dataclass
class Change:
    """A change of the configuration, its price, and what it saves on the fullest card."""

    keys: Keys
    price: str
    saves_gib: float
    then_fits: bool


def candidates(layout: Layout) -> list[tuple[Keys, str]]:
    """Changes that can save memory, cheapest first, each with its price."""
    config, train = layout.config, layout.config.train
    shared = layout.shares
    found: list[tuple[Keys, str]] = []
    needed = max(memory.allocated(parts) for parts in layout.trainer.values())
    if train.max_gpu_gib is not None and train.max_gpu_gib < needed < layout.card.gib / 1.1:
        found.append(({"train.max_gpu_gib": math.ceil(1.1 * needed)}, "less of the GPU for the server"))
    if config.policy.quantization != "nf4":
        found.append(({"policy.quantization": "nf4"}, "a different base, 9 % of weight error"))
    elif not config.policy.double_quantization:
        found.append(({"policy.double_quantization": True}, "a different NF4 base"))
    apart = [number for number, one in enumerate(layout.cards) if "server" not in one.roles]
    batches = train.gradient_accumulation_steps * layout.processes
    if shared and apart and batches % len(apart) == 0:
        keys: Keys = {
            "train.gpus": apart,
            "train.gradient_accumulation_steps": batches // len(apart),
            "server.sleep": False,
        }
        found.append((keys, "fewer GPUs for the trainer"))
    micro = train.per_device_train_batch_size
    if train.micro_batch_tokens is not None:
        least = least_pack(config)
        if train.micro_batch_tokens > least:
            half = max(least, train.micro_batch_tokens // 2)
            found.append(({"train.micro_batch_tokens": half}, "more, smaller passes over the same batch"))
    elif micro > 1:
        sizes = [size for size in micro_batches(process_completions(config)) if size < micro]
        found.append((micro_batch_keys(config, sizes[-1]), "more, smaller passes over the same batch"))
        if len(sizes) > 1:
            found.append((micro_batch_keys(config, 1), "one completion at a time: the GPU is less utilized"))
    is_reentrant = reentrant_because(config, announced()) is not None
    if not layout.chose and train.recompute == "none" and not is_reentrant:
        keys = {"train.recompute": "selective", "train.recompute_fraction": 1.0}
        found.append((keys, "norms and SwiGLU are recomputed in the update"))
    if not layout.chose and (train.recompute != "full" or train.recompute_fraction < 1):
        keys = {"train.recompute": "full", "train.recompute_fraction": 1.0}
        found.append((keys, "one more forward pass in the update"))
    row = layout.card.generation
    if row and config.model.dtype not in row.dtypes:
        found.append(({"model.dtype": row.dtypes[0]}, "less range than bfloat16: the loss is scaled"))
    if config.policy.compute == "fp8" and row and not row.trainer_fp8:
        found.append(({"policy.compute": "fused"}, "matmuls in 16 bits"))
    if config.distill.is_given and config.distill.chunk_tokens > 256:
        found.append(({"distill.chunk_tokens": 256}, "the divergence in more, smaller matmuls"))
    if layout.server is not None:
        found += _server_candidates(layout, shared)
    elif train.gradient_accumulation_steps > 1 and train.gradient_accumulation_steps % 2 == 0:
        fewer = {"train.gradient_accumulation_steps": train.gradient_accumulation_steps // 2}
        found.append((fewer, "half the completions per step, so half the KV cache of the rollout"))
    if config.policy.embeddings == "gpu" and not layout.shape.tied and not layout.card.is_cpu and not announced():
        found.append(({"policy.embeddings": "host"}, "each forward waits for its input rows from the host"))
    if train.recompute != "none" and not train.recompute_offload and not layout.card.is_cpu and not is_reentrant:
        found.append(({"train.recompute_offload": True}, "inputs of layers copied to the host and back"))
    if layout.shape.experts is not None and memory.expert_rank(config) > 1:
        found.append(({"policy.expert_rank": memory.expert_rank(config) // 2}, "a smaller adapter on each expert"))
    if config.policy.lora_rank > 8:
        found.append(({"policy.lora_rank": config.policy.lora_rank // 2}, "a smaller adapter"))
    if config.rollout.max_completion_length > STEP:
        half = max(STEP, config.rollout.max_completion_length // 2)
        found.append(({"rollout.max_completion_length": half}, "longer answers are truncated"))
    return found


def in_turn(config: Config) -> Keys:
    """Keys that go with a card that both samples and trains.

    The plan counts no gain from `rollout.overlap` and `rollout.stream_groups` there, and the recipe refuses them if
    the sampler sleeps or is the trainer's process.
    """
    keys: Keys = {"rollout.overlap": False} if config.rollout.overlap else {}
    return keys | ({"rollout.stream_groups": None} if config.rollout.stream_groups else {})


def _server_candidates(layout: Layout, shared: bool) -> list[tuple[Keys, str]]:
    config, server = layout.config, layout.config.server
    found: list[tuple[Keys, str]] = []
    host: Keys = {"server.nf4_copy": "host"} if config.rollout.sync == "remerge" and server.nf4_copy == "gpu" else {}
    free = config.policy.quant_cfg is None  # otherwise the format determines what is served
    row = layout.card.generation
    if free and row and server.weights not in row.served:
        found.append(({"server.weights": "fp8_per_tensor"}, "inputs stay in 16 bits (W8A16)"))
        found.append(({"server.weights": "bf16"}, "twice the memory for the server's weights"))
    has_w8a8 = row is not None and row.served.get("fp8_per_channel") == W8A8
    if free and server.weights == "bf16" and has_w8a8:
        found.append(({"server.weights": "fp8_per_channel"}, "FP8 rounding in the sampler, faster rollouts"))
    fmt = quantized.format_of(config)
    if fmt and fmt.kernels and server.weights != fmt.kernels and (row is None or fmt.kernels in row.served):
        found.append(({"server.weights": fmt.kernels}, f"vLLM's {fmt.name} kernels in place of BF16 ones"))
    if shared and not server.sleep and not layout.card.is_cpu:
        keys: Keys = {"server.sleep": True} | host | in_turn(config)
        found.append((keys, "about half a second per step to sleep and wake"))
    if shared and free and not server.share_base and has_w8a8 and layout.shape.experts is None:
        one: Keys = {"server.share_base": True, "policy.quantization": "fp8", "rollout.sync": "adapter"}
        one |= {"server.weights": "fp8_per_channel", "server.sleep": False, "policy.embeddings": "gpu"}
        found.append((one, "one FP8 base for both, adapters served unmerged: slower rollouts"))
    if host:
        found.append((host, "a slower sync: the copy comes from host memory"))
    if server.kv_cache != "fp8" and (row is None or row.fp8_cache):
        half: Keys = {"server.kv_cache_gib": server.kv_cache_gib / 2} if server.kv_cache_gib else {}
        found.append(({"server.kv_cache": "fp8", **half}, "FP8 rounding of keys and values"))
    if (
        free
        and server.weights.startswith("fp8")
        and config.rollout.sync == "remerge"
        and row
        and "w4a16" in row.served
    ):
        found.append(({"server.weights": "w4a16"}, "INT4 rounding in the sampler: farther from the policy than FP8"))
    least = math.ceil(10 * config.rollout.group_size * memory.sequence_gib(layout.shape, config)) / 10
    if layout.server["KV cache"] > least:
        found.append(({"server.kv_cache_gib": least}, "one group of full length at a time: slower rollouts"))
    if not server.enforce_eager:
        found.append(({"server.enforce_eager": True}, "no CUDA graphs: slower rollouts"))
    if server.max_num_seqs > 2 * config.rollout.group_size:
        found.append(({"server.max_num_seqs": server.max_num_seqs // 2}, "fewer completions at once"))
    if layout.count >= 2 * server.tensor_parallel * layout.replicas:
        found.append(({"server.tensor_parallel": 2 * server.tensor_parallel}, "two GPUs instead of one"))
    return found


def changes(layout: Layout) -> list[Change]:
    """What each candidate alone saves on the fullest card, without those that do not help or are refused."""
    found, is_fine = [], not is_refused(layout)
    for keys, price in candidates(layout):
        after = changed(layout, keys)
        if after is None or (is_fine and is_refused(after)):
            continue
        saves = layout.worst.peak.expected - _same_card(after, layout.worst).peak.expected
        if saves >= 0.05 or len(after.faults) < len(layout.faults):
            found.append(Change(keys, price, saves, after.fits))
    return found


def _same_card(layout: Layout, card: CardUse) -> CardUse:
    return next((one for one in layout.cards if one.name == card.name), layout.worst)


def remedy(layout: Layout, first: list[Change] | None = None) -> Keys | None:
    """Keys that together make it fit, the cheapest changes first; None if all of them do not suffice. `first` are
    the layout's `changes`, if they are known."""
    keys: Keys = {}
    for _ in range(24):
        if layout.fits:
            return keys
        found = changes(layout) if keys or first is None else first
        if not found:
            return None
        best = next((one for one in found if one.then_fits), found[0])
        layout = changed(layout, best.keys)
        keys |= best.keys
    return None


def cards_that_fit(layout: Layout) -> list[str]:
    """Other cards, in the same number, on which the configuration fits as it is; least memory first."""
    others = sorted((card for card in CARDS.values() if card.name != layout.card.name), key=lambda card: card.gib)
    return [card.name for card in others if lay_out(layout.shape, layout.config, card, layout.count).fits][:3]


def step_time(layout: Layout) -> cost.StepTime:
    """Step time of a layout on cards of known speed."""
    cache = layout.server["KV cache"] if layout.server else 0.0
    sizes = (layout.completions, layout.processes, layout.replicas, cache, layout.shares)
    return cost.step_time(layout.shape, layout.config, layout.card, *sizes)
