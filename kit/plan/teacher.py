"""What a distillation's teacher adds to memory and time (kit/policy/teacher.py, distill_trainer.py).

The student's own model as teacher is a pass without quantizers, and one more adapter with `distill.teacher_adapter`,
which is taken to have the student's rank; another model lies beside the student, stored as it is. In every micro-batch
the teacher's pass comes first and leaves its last hidden states; the divergence then projects both models' states onto
the vocabulary, tile by tile, forward and again backward. Counted from the code; nothing of it was measured. Imports no
torch.
"""

import functools

from kit.core.config.distill_rules import is_own_model
from kit.core.config.schema import Config
from kit.core.errors import BadInput
from kit.plan.coefficients import value
from kit.plan.gpus import Card
from kit.plan.shapes import Shape, find_shape

GIB = 2**30
TILE_BYTES = 4 + 4 + 2  # logits of student and teacher in float32, and what is multiplied back in 16 bits
TORCH_TILE_BYTES = 4 * 11  # of the same by PyTorch, on a CPU


@functools.cache
def _find(source: str, revision: str | None) -> Shape:
    return find_shape(source, revision)


def shape_of(shape: Shape, config: Config) -> Shape:
    """The teacher's shape: the student's, or that of another model. `BadInput` where nothing tells."""
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
    """The teacher's last hidden states, of `scored` tokens."""
    narrow = 4 if config.model.dtype == "float32" else 2
    return scored * shape_of(shape, config).hidden * narrow / GIB


def tiles_gib(shape: Shape, config: Config, scored: int, card: Card) -> float:
    """Logits of both models, `distill.chunk_tokens` at a time."""
    rows = min(scored, config.distill.chunk_tokens)
    if card.is_cpu:  # memory only for what is written
        return rows * min(value("head_columns"), shape.vocabulary) * TORCH_TILE_BYTES / GIB
    return rows * value("head_columns") * TILE_BYTES / GIB


def head_products(config: Config) -> tuple[int, int]:
    """How often the student's states and the teacher's are multiplied with their heads, forward and backward."""
    once_more = config.distill.divergence == "js"
    # With a server the student's log-probs are compared with the sampler's.
    return 3 + once_more + (config.rollout.backend == "server"), 2 + once_more
