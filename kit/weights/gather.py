"""Temporarily gather parameters that FSDP2 or DeepSpeed ZeRO-3 has split over the processes.

Written for torch 2.13 and deepspeed 0.19.8. A gather is collective: every process calls it, for the same parameters in
the same order.
"""

import contextlib
from collections.abc import Iterable, Iterator

import torch


def is_split(parameter: torch.Tensor) -> bool:
    """Whether this process may hold only a part of the parameter."""
    from torch.distributed.tensor import DTensor

    return isinstance(parameter, DTensor) or hasattr(parameter, "ds_id")


def whole_bytes(parameter: torch.Tensor) -> int:
    """Size of the parameter's value once it is gathered."""
    return getattr(parameter, "ds_numel", parameter.numel()) * parameter.element_size()


@contextlib.contextmanager
def whole(parameters: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Whole values of the parameters as plain tensors, to be read within the block; unsplit ones are not copied."""
    from torch.distributed.tensor import DTensor

    parameters = list(parameters)
    with torch.no_grad(), contextlib.ExitStack() as stack:
        if any(hasattr(parameter, "ds_id") for parameter in parameters):
            import deepspeed

            # Without modifier_rank nothing is written back.
            stack.enter_context(deepspeed.zero.GatheredParameters(parameters))
        values = [one.detach() for one in parameters]
        values = [one.full_tensor() if isinstance(one, DTensor) else one for one in values]
        yield [one.as_subclass(torch.Tensor) for one in values]
