"""Another adapter in the place of the trained one, for passes without gradients: the reference of
`policy.reference: init_adapter`, and the teacher of `distill.teacher_adapter`.

Written for torch 2.13 and deepspeed 0.19.8. Where processes hold parts of the adapter (FSDP2, ZeRO-3), all of them
enter and leave the block together, and its values are written into the parts and back.
"""

import contextlib
from collections.abc import Iterator, Mapping

import torch


@contextlib.contextmanager
def wearing(model: torch.nn.Module, values: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Give parameters of `model` other values, whole tensors by parameter name, for the length of the block.

    Autograd's nodes, optimizer state and gradients belong to the parameters and are unaffected. autocast's cache is
    cleared, or it would keep using its casts of the previous values."""
    from torch.distributed.tensor import DTensor

    named = dict(model.named_parameters())
    pairs = [(named[name], value) for name, value in values.items()]
    if any(hasattr(parameter, "ds_id") for parameter, _ in pairs):
        way = _gathered(pairs)
    elif any(isinstance(parameter, DTensor) for parameter, _ in pairs):
        way = _in_shards(model, pairs)
    else:
        way = _swapped(pairs)
    try:
        with way:
            torch.clear_autocast_cache()
            yield
    finally:
        torch.clear_autocast_cache()


Pairs = list[tuple[torch.nn.Parameter, torch.Tensor]]


@contextlib.contextmanager
def _swapped(pairs: Pairs) -> Iterator[None]:
    own = [parameter.data for parameter, _ in pairs]
    try:
        for parameter, value in pairs:
            parameter.data = value.to(parameter.dtype)  # DeepSpeed may have changed it
        yield
    finally:
        for (parameter, _), value in zip(pairs, own, strict=True):
            parameter.data = value


@contextlib.contextmanager
def _in_shards(model: torch.nn.Module, pairs: Pairs) -> Iterator[None]:
    """For FSDP2, which gathers from the memory of its shards."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import distribute_tensor

    def put(values: list[torch.Tensor]) -> None:
        for (parameter, _), value in zip(pairs, values, strict=True):
            parameter.to_local().copy_(value)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # what is gathered still has the values before

    with torch.no_grad():
        own = [parameter.to_local().clone() for parameter, _ in pairs]
        others = [
            # Every process has the whole values: nothing is sent.
            distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None).to_local()
            for parameter, value in pairs
        ]
        put(others)
    try:
        yield
    finally:
        with torch.no_grad():
            put(own)


@contextlib.contextmanager
def _gathered(pairs: Pairs) -> Iterator[None]:
    """For ZeRO-3, which gathers from its partitions."""
    import deepspeed

    parameters = [parameter for parameter, _ in pairs]

    def put(values: list[torch.Tensor]) -> list[torch.Tensor]:
        with torch.no_grad(), deepspeed.zero.GatheredParameters(parameters, modifier_rank=0):
            before = [parameter.detach().clone() for parameter in parameters]
            for parameter, value in zip(parameters, values, strict=True):
                parameter.copy_(value)
        return before

    own = put([value for _, value in pairs])
    try:
        yield
    finally:
        put(own)
