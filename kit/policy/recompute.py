"""Recomputation in the backward pass: `train.recompute` and `train.recompute_fraction`.

`full` keeps a decoder layer's input and reruns the layer (torch's non-reentrant checkpoint, as transformers and TRL
do). `selective` also keeps the outputs of matrix products and attention, so that norms, SwiGLU, rotary embedding and
casts are recomputed but no product of the base. `none` keeps everything. If a layer ends with a residual sum, the
output of its last product, `down_proj`, is not read in the second run and not computed. Gradients are those of `none`,
bit for bit.

Memory kept per layer, and the share of its products and attention that is recomputed, counted in operations (not
seconds) for a Qwen3 layer of hidden size 512 (MLP 1,536; 8 heads of 64, 2 of keys and values) on an NF4 base with LoRA
of rank 16 on all linear layers, bfloat16 autocast, 256 tokens; `tests/unit/test_recompute.py` repeats the count:

    recompute    kept per token  recomputed, share of a forward pass
    none             24,448 B     0 %
    selective        10,784 B     5 %, the adapter's products
    full              1,024 B    76 %, all but down_proj

Attention compiled by FlexAttention (`train.packed_attention: flex` on a GPU) is not visible here as an operator:
`selective` recomputes it.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

from kit.core.config.recompute_rules import recomputed_layers
from kit.core.config.schema import Config

# The layer's output is a residual plus the MLP's output: nothing in between needs down_proj's output again.
ENDS_WITH_RESIDUAL = ("llama", "mistral", "qwen2", "qwen3")
ATTENTION = ("flash", "efficient", "cudnn")
_now = threading.local()  # backward passes run in their own threads


def use_recompute(model: Any, config: Config) -> int:
    """Make `model.gradient_checkpointing_enable` follow `train.recompute`; return the number of recomputed layers.

    transformers' Trainer and TRL turn checkpointing on through that method, TRL again after every pass without
    gradients (`trl.models.utils.disable_gradient_checkpointing`, trl 1.16). Changes only this model. `ValueError` for
    `auto`, which `kit.plan.recompute` resolves before anything is loaded.
    """
    mode = config.train.recompute
    if mode == "auto":
        raise ValueError("train.recompute auto was not resolved")
    if mode == "none":
        return 0
    from transformers.modeling_layers import GradientCheckpointingLayer

    from kit.policy.recompute_offload import HostInputs

    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    layers = [module for module in inner.modules() if isinstance(module, GradientCheckpointingLayer)]
    chosen = recomputed_layers(len(layers), config.train.recompute_fraction)
    skips = inner.config.model_type in ENDS_WITH_RESIDUAL
    for number in chosen if skips else ():
        _skip_unread(layers[number].mlp.down_proj, config.policy.lora_rank)
    inputs = HostInputs() if config.train.recompute_offload else None
    enable, context = inner.gradient_checkpointing_enable, _contexts(mode, config.policy.lora_rank)

    def enable_chosen(gradient_checkpointing_kwargs: dict | None = None, **others: Any) -> None:
        enable(gradient_checkpointing_kwargs, **others)
        for number, layer in enumerate(layers):
            layer.gradient_checkpointing = number in chosen
            if (gradient_checkpointing_kwargs or {}).get("use_reentrant"):  # accepts no contexts
                continue
            function = functools.partial(layer._gradient_checkpointing_func, context_fn=context)
            layer._gradient_checkpointing_func = _from_host(function, inputs) if inputs else function

    inner.gradient_checkpointing_enable = enable_chosen
    return len(chosen)


def _from_host(function: Callable, inputs: Any) -> Callable:
    """Wrap a checkpoint so that `inputs` offloads its saved arguments; what the layer saves stays the checkpoint's."""
    import torch

    def checkpoint(run: Callable, *args: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(inputs.pack, inputs.unpack):
            return function(run, *args)

    return checkpoint


def _contexts(mode: str, rank: int) -> Callable[[], tuple]:
    """Return the function that torch's checkpoint calls for every layer: contexts of its first and second run."""
    if mode == "full":
        return lambda: (contextlib.nullcontext(), _second_run(None, rank))

    def selective() -> tuple:
        kept: list[tuple] = []
        first, second = _modes()
        return first(kept, rank), _second_run(second(kept, rank), rank)

    return selective


@contextlib.contextmanager
def _second_run(mode: Any, rank: int) -> Iterator[None]:
    """Context of a layer's second run, in selective's mode or in none."""
    _now.again, _now.mode, _now.rank = True, mode, rank
    try:
        with mode or contextlib.nullcontext():
            yield
    finally:
        _now.again, _now.mode = False, None
        if mode:
            mode.latest = None  # torch keeps the mode alive as long as the layer's graph


def _skip_unread(module: Any, rank: int) -> None:
    """Wrap the forward of a layer's last linear layer (only this module): its product is not read in a second run."""
    forward = module.forward

    @functools.wraps(forward)
    def marked(*args: Any, **keys: Any) -> Any:
        _now.last = True
        try:
            alone = getattr(_now, "again", False) and _now.mode is None
            with _modes()[1]([], rank) if alone else contextlib.nullcontext():
                return forward(*args, **keys)
        finally:
            _now.last = False

    module.forward = marked


def _is_last() -> bool:
    return getattr(_now, "last", False)


def is_answered(shape: tuple[int, int]) -> bool:
    """Whether a product with a base weight of this shape (out, in) is skipped in a layer's second run: its output was
    kept, or is never read. The weight is then not read either."""
    if not getattr(_now, "again", False) or (_now.mode is None and not _is_last()):
        return False
    return _is_of_base(shape, _now.rank)


def _is_of_base(sizes: tuple, rank: int) -> bool:
    """Whether the right operand of a product is a base weight and not an adapter factor. The factors of two or three
    layers with the same input are one product (fused_linear.py)."""
    return min(sizes) > rank and min(sizes) not in (2 * rank, 3 * rank)


def _product(operator: Any, args: tuple, rank: int) -> tuple | None:
    """Output shape of a product with a base weight; None for every other operator.

    Products with the adapter's factors have its rank as one of their sizes.
    """
    import torch

    aten = torch.ops.aten
    if operator in (aten.mm.default, aten._scaled_mm.default):
        left, right = args[0].shape, args[1].shape
    elif operator is aten.addmm.default:
        left, right = args[1].shape, args[2].shape
    elif str(operator).startswith("bitsandbytes.gemm_4bit"):  # input (.., in), packed weight, shape (out, in)
        left, right = args[0].shape, tuple(args[2])[::-1]
    else:
        return None
    return (*left[:-1], right[-1]) if _is_of_base(right, rank) else None


def _is_kept(operator: Any, args: tuple, rank: int) -> bool:
    """Whether selective keeps an output: those of attention and of products, except the adapter's, which are small,
    and the last one, which is not read."""
    name = str(operator)
    if "scaled_dot_product" in name or "packed_flash" in name:
        return any(kind in name for kind in ATTENTION)
    return _product(operator, args, rank) is not None and not _is_last()


@functools.cache
def _modes() -> tuple[type, type]:
    """Modes of a layer's first and second run. torch's own (create_selective_checkpoint_contexts) reject an output
    that is modified in place, and `fused_linear.py` adds the adapter's product to the base's in place."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_map_only

    aten = torch.ops.aten
    adds = (aten.addmm_.default, aten.add_.Tensor)

    def is_sum(operator: Any) -> bool:
        return operator in adds or str(operator).startswith("kit.add_low_rank_")  # fused_linear.py's

    def is_same(one: Any, other: Any) -> bool:
        tensors = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
        return tensors and one.untyped_storage()._cdata == other.untyped_storage()._cdata

    class Mode(TorchDispatchMode):
        def __init__(self, kept: list[tuple], rank: int):
            super().__init__()
            self.kept, self.rank, self.latest = kept, rank, None

        @classmethod
        def ignore_compile_internals(cls) -> bool:
            return True  # otherwise torch would not run compiled FlexAttention in it

    class First(Mode):
        def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            answer = operator(*args, **(kwargs or {}))
            if _is_kept(operator, args, self.rank):
                self.kept.append((operator, tree_map_only(torch.Tensor, torch.Tensor.detach, answer)))
            elif operator._schema.is_mutable and args:
                number = next((n for n, (_, one) in enumerate(self.kept) if is_same(one, args[0])), None)
                if number is not None and (not is_sum(operator) or number != len(self.kept) - 1):
                    raise RuntimeError(f"train.recompute selective: {operator} changes what is kept. Use full.")
            return answer

    class Second(Mode):
        def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            keys = kwargs or {}
            if self.kept and _is_kept(operator, args, self.rank):
                made_by, self.latest = self.kept.pop(0)
                if made_by is not operator:
                    raise RuntimeError(f"train.recompute selective: {operator} in the place of {made_by}. Use full.")
                return self.latest
            if _is_last() and (shape := _product(operator, args, self.rank)) is not None:
                source = args[1] if operator is aten.addmm.default else args[0]
                self.latest = source.new_empty(shape, dtype=keys.get("out_dtype") or source.dtype)
                return self.latest
            if is_sum(operator) and is_same(self.latest, args[0]):
                return args[0]  # the kept output already includes it
            return operator(*args, **keys)

    return First, Second
