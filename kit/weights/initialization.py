"""Keep transformers from initializing what it has just loaded."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def loaded_weights_kept() -> Iterator[None]:
    """Within the block, `from_pretrained` initializes no module whose own parameters and buffers were all loaded.

    After loading, transformers 5.17 calls a model's `_init_weights` for every module and relies on it to spare what
    was loaded. Youtu's sets the loaded embedding of the pad token to 0; those of GPT-BigCode and nanochat fail on
    compressed layers, which have no `weight`. For custom code transformers itself skips such modules.
    """
    from transformers import PreTrainedModel

    theirs = PreTrainedModel._initialize_weights

    def initialize(model: Any, module: torch.nn.Module, is_custom_code: bool = False) -> None:
        theirs(model, module, is_custom_code=True)

    PreTrainedModel._initialize_weights = initialize
    try:
        yield
    finally:
        PreTrainedModel._initialize_weights = theirs
