"""Build models whose linear layers are of a kind of their own with torch's."""

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import torch

from kit.core.errors import BadInput

# {model_type: class of its linear layers}, which compute what torch's do. transformers 5.17 stores torch.nn.Linear
# itself in NF4 and no subclass of it: such a base would stay unquantized without a word.
OWN_LINEARS = {"falcon": "FalconLinear"}


@contextlib.contextmanager
def plain_linears(config: Any) -> Iterator[None]:
    """Within the block, transformers builds the model of `config` with torch.nn.Linear."""
    kind = config.model_type
    if (name := OWN_LINEARS.get(kind)) is None:
        yield
        return
    module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    theirs = getattr(module, name)
    setattr(module, name, torch.nn.Linear)
    try:
        yield
    finally:
        setattr(module, name, theirs)


def check_linears(model: torch.nn.Module, kind: str) -> None:
    """`BadInput` if a model built by `plain_linears` still has linear layers that would not be stored in NF4."""
    own = [one for one in model.modules() if isinstance(one, torch.nn.Linear) and type(one) is not torch.nn.Linear]
    if own:
        raise BadInput(
            f"{len(own)} linear layers of {kind} are {type(own[0]).__name__}, which transformers does not store in "
            "NF4. Set policy.quantization to fp8 or none."
        )
