"""Memory and time that a distillation's teacher adds (kit/policy/teacher.py, distill_trainer.py).

The student's own model as teacher costs a pass without quantizers and, with `distill.teacher_adapter`, one more
adapter, which is assumed to have the student's rank. Another model is held beside the student, stored the same way. In
every micro-batch the teacher's pass runs first and leaves its last hidden states; the divergence then projects both
models' states onto the vocabulary, tile by tile, in the forward and again in the backward pass. Counted from the code,
not measured. Imports no torch.
"""

import functools

from kit.core.config.distill_rules import is_own_model
from kit.core.config.schema import Config
from kit.core.errors import BadInput
from kit.plan.coefficients import value
from kit.plan.decoder import Shape
from kit.plan.gpus import Card
from kit.plan.shapes import find_shape
from kit.plan.sizes import value_bytes

GIB = 2**30
TILE_BYTES = 4 + 4 + 2  # logits of student and teacher in float32, and what is multiplied back in 16 bits
TORCH_TILE_BYTES = 4 * 11  # the same in PyTorch, on a CPU


@functools.cache
def _find(source: str, revision: str | None) -> Shape:
    return find_shape(source, revision)


def shape_of(shape: Shape, config: Config) -> Shape:
    """The teacher's shape: the student's, or that of another model. Raises `BadInput` if it is unknown."""
    if is_own_model(config):
        return shape
    try:
        return _find(config.distill.teacher, config.distill.teacher_revision)
    except BadInput as error:
        raise BadInput(f"distill.teacher: {error}") from None


def describe(config: Config) -> str | None:
    """The teacher in a few words; None without one."""
    if not config.distill.is_given:
        return None
    if config.distill.teacher_adapter:
        return "the base with an adapter"
    return "the base" if is_own_model(config) else f"{config.distill.teacher}, stored as the student's base"


def states_gib(shape: Shape, config: Config, scored: int) -> float:
    """GiB of the teacher's last hidden states, for `scored` tokens."""
    return scored * shape_of(shape, config).hidden * value_bytes(config) / GIB


def tiles_gib(shape: Shape, config: Config, scored: int, card: Card) -> float:
    """GiB of both models' logits, `distill.chunk_tokens` at a time."""
    rows = min(scored, config.distill.chunk_tokens)
    if card.is_cpu:  # commits memory only for what is written
        return rows * min(value("head_columns"), shape.vocabulary) * TORCH_TILE_BYTES / GIB
    return rows * value("head_columns") * TILE_BYTES / GIB


def head_products(config: Config) -> tuple[int, int]:
    """Number of matmuls with the head, forward and backward, for the student's states and for the teacher's."""
    once_more = config.distill.divergence == "js"
    # With a server the student's log-probs are compared with the sampler's.
    return 3 + once_more + (config.rollout.backend == "server"), 2 + once_more
