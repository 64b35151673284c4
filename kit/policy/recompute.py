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

Products with the base are tagged where they are issued (`base_product`), those of peft's and bitsandbytes' layers by a
hook. Attention compiled by FlexAttention (`train.packed_attention: flex` on a GPU) is not visible here as
an operator: `selective` recomputes it.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._ops import OpOverload as Operator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from kit.core.config.recompute_rules import ENDS_WITH_RESIDUAL, recomputed_layers
from kit.core.config.schema import Config
from kit.policy import routing
from kit.policy.recompute_offload import HostInputs

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

ATTENTION = ("flash", "efficient", "cudnn")
ADAPTER = {"lora_A", "lora_B"}
aten = torch.ops.aten
# Positions of a product's operands among its arguments.
OPERANDS = {aten.mm.default: (0, 1), aten._scaled_mm.default: (0, 1), aten.addmm.default: (1, 2)}
OPERANDS |= {aten._grouped_mm.default: (0, 1)}  # experts
ADDS = (aten.addmm_.default, aten.add_.Tensor)


class _Now(threading.local):
    """What this thread computes; backward passes run in their own threads."""

    is_base = False  # a product with a base weight
    is_last = False  # a layer's last linear layer
    is_second_run = False
    mode: "_Second | None" = None  # of a second run with selective


_now = _Now()


@contextlib.contextmanager
def base_product() -> Iterator[None]:
    """Tag the product within the block as one with a base weight: selective keeps its output."""
    _now.is_base = True
    try:
        yield
    finally:
        _now.is_base = False


def use_recompute(model: "PreTrainedModel | PeftModel", config: Config) -> int:
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

    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    layers = [module for module in inner.modules() if isinstance(module, GradientCheckpointingLayer)]
    chosen = recomputed_layers(len(layers), config.train.recompute_fraction)
    for number in chosen:
        _tag_base_products(layers[number])
        if inner.config.model_type in ENDS_WITH_RESIDUAL:
            _skip_unread(layers[number].mlp.down_proj)
    inputs = HostInputs() if config.train.recompute_offload else None
    enable, context = inner.gradient_checkpointing_enable, _full if mode == "full" else _selective

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


def _from_host(function: Callable, inputs: HostInputs) -> Callable:
    """Wrap a checkpoint so that `inputs` offloads its saved arguments; what the layer saves stays the checkpoint's."""

    def checkpoint(run: Callable, *args: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(inputs.pack, inputs.unpack):
            return function(run, *args)

    return checkpoint


def _tag_base_products(layer: torch.nn.Module) -> None:
    """Tag the products of a decoder layer's linear layers, without those of an adapter.

    Layers of fused_linear.py and quantized_linear.py, which have a `product`, tag their own: a call of theirs may
    compute an adapter, too.
    """
    for name, module in layer.named_modules():
        if isinstance(module, torch.nn.Linear) and not hasattr(module, "product") and not ADAPTER & {*name.split(".")}:
            module.register_forward_pre_hook(lambda *_: setattr(_now, "is_base", True))
            # The checkpoint leaves a second run by an exception, as soon as it has what it needs.
            module.register_forward_hook(lambda *_: setattr(_now, "is_base", False), always_call=True)


def _skip_unread(module: torch.nn.Module) -> None:
    """Mark a layer's last linear layer, and wrap its forward (only this module's): its product is not read in a second
    run. A function that computes it without calling the module does so within `unread_product`."""
    forward = module.forward

    @functools.wraps(forward)
    def marked(*args: Any, **keys: Any) -> torch.Tensor:
        with unread_product():
            return forward(*args, **keys)

    module.forward, module.is_unread = marked, True


@contextlib.contextmanager
def unread_product() -> Iterator[None]:
    """Tag a product within the block, and what is added to it, as a layer's last: not computed in a second run."""
    _now.is_last = True
    try:
        alone = _now.is_second_run and _now.mode is None
        with _Second([]) if alone else contextlib.nullcontext():
            yield
    finally:
        _now.is_last = False


def is_answered() -> bool:
    """Whether a product with a base weight is skipped here, in a layer's second run: its output was kept, or is never
    read. The weight is then not read either."""
    return _now.is_second_run and (_now.mode is not None or _now.is_last)


def _full() -> tuple[contextlib.AbstractContextManager, contextlib.AbstractContextManager]:
    """Contexts of a layer's first and second run, which torch's checkpoint asks for at every call."""
    return contextlib.nullcontext(), _second_run(None, routing.current())


def _selective() -> tuple[contextlib.AbstractContextManager, contextlib.AbstractContextManager]:
    kept: list[tuple[Operator, Any]] = []
    return _First(kept), _second_run(_Second(kept), routing.current())


@contextlib.contextmanager
def _second_run(mode: "_Second | None", experts: routing.Routing | None) -> Iterator[None]:
    """Context of a layer's second run, in selective's mode or in none, with the routing of the first."""
    _now.is_second_run, _now.mode = True, mode
    try:
        with routing.routed(experts, is_recomputed=True), mode or contextlib.nullcontext():
            yield
    finally:
        _now.is_second_run, _now.mode = False, None
        if mode:
            mode.latest = None  # torch keeps the mode alive as long as the layer's graph


@functools.cache
def _is_attention(operator: Operator) -> bool:
    name = str(operator)
    return ("scaled_dot_product" in name or "packed_flash" in name) and any(kind in name for kind in ATTENTION)


def _base_operands(operator: Operator, args: Sequence[Any]) -> tuple[torch.Tensor, int] | None:
    """Input (…, in) and number of outputs of a product with a base weight; None for every other operator."""
    if not _now.is_base:
        return None
    if operator in OPERANDS:
        left, right = OPERANDS[operator]
        return args[left], args[right].shape[-1]
    if str(operator).startswith("bitsandbytes.gemm_4bit"):  # input, packed weight, shape (out, in)
        return args[0], args[2][0]
    return None


def _is_kept(operator: Operator, args: Sequence[Any]) -> bool:
    """Whether selective keeps an output: attention's, and of products with the base all but the last, which is not
    read."""
    return _is_attention(operator) or (not _now.is_last and _base_operands(operator, args) is not None)


def _is_sum(operator: Operator) -> bool:
    return operator in ADDS or str(operator).startswith("kit.add_low_rank_")  # fused_linear.py's


def _is_same(one: Any, other: Any) -> bool:
    tensors = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    return tensors and one.untyped_storage()._cdata == other.untyped_storage()._cdata


class _Mode(TorchDispatchMode):
    """Mode of a layer's run. torch's own (create_selective_checkpoint_contexts) reject an output that is modified in
    place, and `fused_linear.py` adds the adapter's product to the base's in place."""

    def __init__(self, kept: list[tuple[Operator, Any]]):
        super().__init__()
        self.kept = kept  # operators with their outputs, in call order

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # otherwise torch would not run compiled FlexAttention in it


class _First(_Mode):
    """Keep outputs."""

    def __torch_dispatch__(self, operator: Operator, types: Any, args: Any = (), kwargs: dict | None = None) -> Any:
        answer = operator(*args, **(kwargs or {}))
        if _is_kept(operator, args):
            self.kept.append((operator, tree_map_only(torch.Tensor, torch.Tensor.detach, answer)))
        elif operator._schema.is_mutable and args:
            number = next((n for n, (_, one) in enumerate(self.kept) if _is_same(one, args[0])), None)
            if number is not None and (not _is_sum(operator) or number != len(self.kept) - 1):
                raise RuntimeError(f"train.recompute selective: {operator} changes what is kept. Use full.")
        return answer


class _Second(_Mode):
    """Return the kept outputs."""

    latest: Any = None  # returned last, by now with the adapter's product added

    def __torch_dispatch__(self, operator: Operator, types: Any, args: Any = (), kwargs: dict | None = None) -> Any:
        keys = kwargs or {}
        if self.kept and _is_kept(operator, args):
            made_by, self.latest = self.kept.pop(0)
            if made_by is not operator:
                raise RuntimeError(f"train.recompute selective: {operator} in the place of {made_by}. Use full.")
            return self.latest
        if _now.is_last and (operands := _base_operands(operator, args)):
            source, outputs = operands
            shape, dtype = (*source.shape[:-1], outputs), keys.get("out_dtype") or source.dtype
            self.latest = source.new_empty(shape, dtype=dtype)
            return self.latest
        if _is_sum(operator) and _is_same(self.latest, args[0]):
            return args[0]  # the kept output already includes it
        return operator(*args, **keys)
