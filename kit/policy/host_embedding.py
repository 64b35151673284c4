"""`policy.embeddings: host`: keep the frozen input embedding in host memory; a forward copies only its tokens' rows.

Qwen3-8B's table is 1.16 GiB, of which a micro-batch reads a few megabytes. The host looks up the rows and copies them
through pinned memory, (tokens, hidden) at a time: the same numbers, so losses and gradients are those of
`embeddings: gpu` bit for bit. The price: a forward waits until the host has the token ids. The table itself is not
pinned, since the card never reads it and torch would round its size up to a power of two.

The weight is not a parameter: nothing that moves, splits, broadcasts or saves a model's parameters sees it, and the
model's device is the card. `kit.weights.frozen_base.hash_base` reads it as `host_weight`, so the base's hash covers
it. The base is loaded as usual, with the table on the card until `keep_embedding_on_host`; a step takes more memory
than that.
"""

from typing import TYPE_CHECKING

import torch

from kit.core.config.schema import Config
from kit.core.errors import BadInput
from kit.weights.model_files import without_weights

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class HostEmbedding(torch.nn.Module):
    """Look up rows of `weight` (vocabulary, hidden) on the host; return them on the device of the ids."""

    def __init__(self, weight: torch.Tensor):
        super().__init__()
        self.host_weight = weight.detach().cpu()

    def extra_repr(self) -> str:
        return f"{tuple(self.host_weight.shape)}, {self.host_weight.dtype}, on the host"

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return (…, hidden) for ids (…)."""
        table = self.host_weight
        wanted = ids.reshape(-1).cpu()
        size = len(wanted), table.shape[1]
        rows = torch.empty(size, dtype=table.dtype, device="cpu", pin_memory=ids.is_cuda)
        torch.index_select(table, 0, wanted, out=rows)
        # torch does not reuse pinned memory until pending copies from it are done.
        return rows.to(ids.device, non_blocking=True).view(*ids.shape, size[1])


def check_embeddings(config: Config, model_config: "PreTrainedConfig") -> None:
    """`BadInput` if `policy.embeddings` is host and, according to its transformers config, the model multiplies with
    its input embedding or does more with it than look up."""
    if config.policy.embeddings != "host":
        return
    if model_config.get_text_config().tie_word_embeddings:
        raise BadInput(
            f"policy.embeddings is host and {config.model.source} has tied word embeddings: its output layer "
            "multiplies with the same tensor, which has to be on the card. Set policy.embeddings to gpu."
        )
    _check_lookup(without_weights(model_config).get_input_embeddings())


def _check_lookup(found: torch.nn.Module) -> None:
    if type(found) is not torch.nn.Embedding or found.max_norm is not None:
        raise BadInput(
            f"policy.embeddings is host and this model's input embedding, {type(found).__name__}, does more than look "
            "up. Set policy.embeddings to gpu."
        )


def keep_embedding_on_host(model: torch.nn.Module) -> None:
    """Replace the model's input embedding with a `HostEmbedding`; `BadInput` if it is more than a lookup of a frozen
    table."""
    found, head = model.get_input_embeddings(), model.get_output_embeddings()
    _check_lookup(found)
    if head is not None and head.weight is found.weight:
        raise BadInput("policy.embeddings is host and this model's output layer has the same weight. Set it to gpu.")
    model.set_input_embeddings(HostEmbedding(found.weight))
    del found
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
