"""Packing: log-probs of padded rows computed from real tokens only, with the prompt of a group computed once.

TRL hands over a batch padded to its longest prompt and completion. Here the real tokens of the rows become one row,

    prompts without their last token | last token of the first prompt, completion 1 | the same, completion 2 | ...

in which every position has at most one label, positions continue from the prompt, and `packed_attention` keeps the
sequences apart; a prompt with one completion directly precedes it. A completion's last token has no label and is left
out. The model runs once per packed row, through TRL's fused head; its outputs are scattered back to their positions in
the padded pass.

Covered: causal language models of transformers with full attention in every layer (`MODELS`), with autograd and
gradient checkpointing, under DDP, ZeRO and FSDP2, with the adapter off. Not covered, and refused before weights load
(`check_packing`): sliding windows, images. On a CPU the attention of a packed row of T tokens costs T x T, even
between sequences that do not see each other.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from kit.core.config.schema import Config
from kit.core.errors import BadInput
from kit.weights.attention import AUTO

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from torch.nn.attention.flex_attention import BlockMask
    from transformers import PreTrainedConfig

    from kit.policy.packed.attention import Kind
    from kit.policy.packed.sequence_parallel import SequenceGroup
    from kit.policy.routing import Routing

# `model_type`s of transformers 5.17 whose forward uses a 4-D mask unchanged and scores positions independently;
# tests/unit/test_packing.py compares each with the padded pass.
MODELS = ("granite", "llama", "mistral", "olmo2", "olmoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3")


def check_packing(config: Config, model_config: "PreTrainedConfig") -> None:
    """`BadInput` unless a model with the transformers config `model_config` gives the same log-probs packed."""
    if config.train.micro_batch_tokens is None:
        return
    facts, attention = model_config.get_text_config(), config.model.attn_implementation
    layers = getattr(facts, "layer_types", None)
    windowed = any(kind != "full_attention" for kind in layers) if layers else getattr(facts, "sliding_window", None)
    if facts.model_type not in MODELS or facts is not model_config:
        fault = f"{model_config.model_type} was not compared with the padded pass; {', '.join(MODELS)} were"
    elif windowed:
        fault = f"{config.model.source} has layers that see a window of the sequence, and packing has one mask for all"
    elif attention not in (AUTO, "sdpa"):  # all of MODELS have it
        fault = f"model.attn_implementation is {attention!r}, and packed rows need sdpa"
    else:
        _check_kernels(config, facts)
        _check_heads(config, facts)
        return
    raise BadInput(
        f"train.micro_batch_tokens: {fault}. Leave it out, and set train.per_device_train_batch_size to what fits."
    )


def _check_kernels(config: Config, facts: "PreTrainedConfig") -> None:
    kind = config.train.packed_attention
    if kind == "flex":
        return
    from kit.policy.packed import cudnn, flash

    head_dim = getattr(facts, "head_dim", None) or facts.hidden_size // facts.num_attention_heads
    if kind == "flash" and (why := flash.fault(head_dim)):
        raise BadInput(f"train.packed_attention is flash, FlashAttention, and {why}. Set it to flex.")
    if kind == "cudnn" and (why := cudnn.fault(head_dim)):
        raise BadInput(f"train.packed_attention is cudnn, and {why}. Set it to flash.")


def _check_heads(config: Config, facts: "PreTrainedConfig") -> None:
    size = config.train.sequence_parallel
    if size == 1:
        return
    from kit.policy.packed.sequence_parallel import head_fault

    heads = facts.num_attention_heads
    if why := head_fault(size, heads, getattr(facts, "num_key_value_heads", None) or heads):
        raise BadInput(f"train.sequence_parallel ({size}): {config.model.source} has {why}. Use another number.")


def plan_micro_batches(
    prompts: Sequence[tuple],
    completion_lengths: Sequence[int],
    budget: int,
    share_prompts: bool,
) -> list[list[int]]:
    """Return the row indices of each micro-batch, the one with the most tokens first; every row is in exactly one.

    `prompts` are the rows' prompts (equal ones are matched by content), `completion_lengths` their completions' token
    counts. A micro-batch has at most `budget` packed tokens, or is a single row that has more. With `share_prompts`
    the rows of a prompt stay together; if they exceed the budget, they are split into parts, each with a copy of the
    prompt. Rows without a completion cost nothing and go into the first micro-batch. The same rows give the same plan.
    """
    groups: dict[tuple | int, list[int]] = defaultdict(list)
    for row, prompt in enumerate(prompts):
        if completion_lengths[row]:
            groups[prompt if share_prompts else row].append(row)
    parts: list[list[int]] = []
    for rows in groups.values():
        room = budget - (len(prompts[rows[0]]) - 1)
        fits = _first_fit([completion_lengths[row] for row in rows], room)
        parts += [[rows[number] for number in part] for part in fits]

    def tokens(part: list[int]) -> int:
        copies = 1 if share_prompts else len(part)
        return copies * (len(prompts[part[0]]) - 1) + sum(completion_lengths[row] for row in part)

    packs = [[parts[number] for number in pack] for pack in _first_fit([tokens(part) for part in parts], budget)]
    packs.sort(key=lambda pack: -sum(map(tokens, pack)))
    plan = [[row for part in pack for row in part] for pack in packs]
    empty = [row for row, length in enumerate(completion_lengths) if not length]
    if empty:
        plan = [[*plan[0], *empty], *plan[1:]] if plan else [empty]
    return [sorted(rows) for rows in plan]


def _first_fit(sizes: Sequence[int], room: int) -> list[list[int]]:
    """Pack sizes into bins of `room`, largest first; return each bin's indices. A larger size gets its own bin."""
    bins: list[list[int]] = []
    left: list[int] = []
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        where = next((index for index, space in enumerate(left) if sizes[number] <= space), None)
        if where is None:
            where = len(bins)
            bins.append([])
            left.append(room)
        bins[where].append(number)
        left[where] -= sizes[number]
    return bins


class _Rows(NamedTuple):
    """Positions of the real tokens of a padded batch (B, W), as indices into the flattened batch."""

    prompts: list[np.ndarray]
    completions: list[np.ndarray]
    contents: list[tuple]  # the tokens of each prompt


class _Packed(NamedTuple):
    """One packed row of T positions, N of which have a label."""

    tokens: "torch.Tensor"  # (1, T) token ids
    labels: "torch.Tensor"  # (1, T) token ids, -100 where there is none
    positions: "torch.Tensor"  # (1, T)
    mask: "torch.Tensor | BlockMask"  # attention mask, from packed_attention.attention_mask
    scored: "torch.Tensor"  # (N,) positions with a label
    label_index: np.ndarray  # (N,) index of each label in the flattened padded batch
    source: "torch.Tensor"  # (T,) index of each token in the flattened padded batch
    real: int  # tokens before the padding at the end


class Pack(NamedTuple):
    """Rows of a batch, b with completions of at most C tokens, as one packed row: what each forward of them reads."""

    packed: _Packed
    target: "torch.Tensor"  # (N,) index of each label in the flattened (b, C)
    shape: tuple[int, int]  # b, C


class Trainer(Protocol):
    """What packing needs of a trainer: the autocast of its forward passes."""

    accelerator: "Accelerator"


def make_pack(
    trainer: Trainer,
    model: "torch.nn.Module",
    input_ids: "torch.Tensor",
    attention_mask: "torch.Tensor",
    logits_to_keep: int,
    share_prompts: bool,
    attention: "Kind" = "flex",
    group: "SequenceGroup | None" = None,
) -> Pack:
    """Pack all rows of a batch, for one forward: choose them with `plan_micro_batches`.

    `input_ids` and `attention_mask` are (B, W), prompts in the first W - C columns with C = `logits_to_keep`.
    `attention` is `train.packed_attention`. The processes of `group` have the same rows and split their tokens.

    Copies between host and device, which wait for what the device computes: make the packs of a step before its first
    forward.
    """
    import torch

    from kit.policy.packed.attention import mask_kind

    rows = read_rows(input_ids, attention_mask, logits_to_keep)
    with trainer.accelerator.autocast():
        kind = mask_kind(model, input_ids.device, attention)
    parts = 1 if group is None else group.size
    packed = pack_rows(rows, list(range(len(rows.completions))), share_prompts, input_ids, kind, parts)
    # From indices into the flattened (B, W) to indices into its flattened last C columns.
    line, column = np.divmod(packed.label_index, input_ids.size(1))
    target = torch.from_numpy(line * logits_to_keep + column - (input_ids.size(1) - logits_to_keep))
    return Pack(packed, target.to(input_ids.device), (input_ids.size(0), logits_to_keep))


def pack_logps(
    trainer: Trainer,
    model: "torch.nn.Module",
    pack: Pack,
    compute_entropy: bool,
    routing: "Routing | None" = None,
    field: str = "entropy",
    group: "SequenceGroup | None" = None,
) -> tuple["torch.Tensor", "torch.Tensor | None"]:
    """Return log-probs (B, C) of a pack's last C columns and, if requested, entropies (B, C), in nats.

    Equal to `GRPOTrainer._get_per_token_logps_and_entropies` (trl 1.16) of the packed rows within rounding: same
    dtype, temperature and autocast, zero at padding. `model` may be wrapped and has TRL's fused head. `routing` has
    the experts of all B·W tokens; `field` is that of TRL's head in the place of the entropy; `group` is that of
    `make_pack`.
    """
    import torch

    from kit.policy.packed.sequence_parallel import gathered
    from kit.policy.routing import routed

    packed = pack.packed
    mine = packed.tokens, packed.positions, packed.labels  # (1, T / parts) each
    if group is not None:
        mine = tuple(map(group.part, mine))
    if routing is not None:
        routing = routing.of_tokens(packed.source, packed.real)
    with trainer.accelerator.autocast(), routed(routing):
        output = model(
            input_ids=mine[0],
            attention_mask=packed.mask,
            position_ids=mine[1],
            shift_labels=mine[2],
            fused_lm_head=True,
        )

    def unpacked(values: torch.Tensor) -> torch.Tensor:
        if group is not None:
            values = gathered(values, group)
        flat = values[0, packed.scored]  # (N,)
        rows, columns = pack.shape
        return flat.new_zeros(rows * columns).index_copy(0, pack.target, flat).view(rows, columns)

    return unpacked(output.log_probs), unpacked(getattr(output, field)) if compute_entropy else None


def read_rows(input_ids: "torch.Tensor", attention_mask: "torch.Tensor", logits_to_keep: int) -> _Rows:
    """Locate the real tokens of a batch (B, W); the last `logits_to_keep` columns are completions."""
    ids, real = input_ids.cpu().numpy(), attention_mask.bool().cpu().numpy()
    first, width = input_ids.size(1) - logits_to_keep, input_ids.size(1)
    prompts, completions, contents = [], [], []
    for row, seen in enumerate(real):
        columns = np.flatnonzero(seen)
        prompt, completion = columns[columns < first], columns[columns >= first]
        if not len(prompt):
            raise BadInput(f"row {row} of the batch has no prompt token, so nothing predicts its first token.")
        contents.append(tuple(ids[row, prompt].tolist()))
        prompts.append(prompt + row * width)
        completions.append(completion + row * width)
    return _Rows(prompts, completions, contents)


def pack_rows(
    rows: _Rows,
    chosen: list[int],
    share_prompts: bool,
    input_ids: "torch.Tensor",
    kind: "Kind",
    parts: int = 1,
) -> _Packed:
    """Pack the chosen rows into one, on the device of `input_ids` (B, W), for attention of the given kind; its length
    divides into `parts`."""
    import torch

    from kit.policy.packed.attention import Sequences, attention_mask, row_length

    groups: dict[tuple | int, list[int]] = defaultdict(list)
    for row in chosen:
        if len(rows.completions[row]):
            groups[rows.contents[row] if share_prompts else row].append(row)
    together = [m for m in groups.values() if len(m) > 1 and len(rows.prompts[m[0]]) > 1]
    alone = [row for members in groups.values() if members not in together for row in members]
    none = np.empty(0, dtype=np.int64)
    tokens, labels, positions = [none], [none], [none]

    def add(ids: np.ndarray, following: np.ndarray, position: int) -> None:
        tokens.append(ids)
        labels.append(np.concatenate([np.full(len(ids) - len(following), -1), following]))
        positions.append(np.arange(position, position + len(ids)))

    for members in together:
        add(rows.prompts[members[0]][:-1], none, 0)
    for row in (row for members in together for row in members):
        prompt, completion = rows.prompts[row], rows.completions[row]
        add(np.concatenate([prompt[-1:], completion[:-1]]), completion, len(prompt) - 1)
    for row in alone:
        completion = rows.completions[row]
        add(np.concatenate([rows.prompts[row], completion[:-1]]), completion, 0)
    # Padding is a segment of its own. A pack without tokens still takes part in the backward pass.
    length = sum(map(len, tokens))
    if filling := row_length(length, kind, parts) - length:
        add(np.zeros(filling, dtype=np.int64), none, 0)

    label_index = np.concatenate(labels)
    scored = np.flatnonzero(label_index >= 0)
    facts = np.stack([np.concatenate(tokens), label_index, np.concatenate(positions)])
    source, label, position = torch.from_numpy(facts).to(input_ids.device)  # each (T,)
    sequences = Sequences(
        lengths=[len(one) for one in tokens[1:]],
        prompts=[len(rows.prompts[members[0]]) - 1 for members in together],
        behind=[sum(len(rows.completions[row]) for row in members) for members in together],
    )
    flat = input_ids.reshape(-1)
    return _Packed(
        tokens=flat[source][None],
        labels=flat[label.clamp(min=0)].masked_fill(label < 0, -100)[None],
        positions=position[None],
        mask=attention_mask(sequences, kind, input_ids.device),
        scored=torch.from_numpy(scored).to(input_ids.device),
        label_index=label_index[scored],
        source=source,
        real=length,
    )
