"""Read the small parts of a checkpoint: a safetensors header, the index of its shards, the quantization of its config.

Reads no tensor and imports no torch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from kit.core.errors import BadInput, full_disk
from kit.core.file_kinds import MODEL_CONFIG, SHARD_INDEX
from kit.core.run_files import read_object

Read = TypeVar("Read")

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class Header:
    # {name: (type as the file names it, shape)}, in the order of their data
    tensors: dict[str, tuple[str, tuple[int, ...]]]
    metadata: dict[str, str]


def read_facts(file: Path) -> dict[str, Any]:
    """The object in a model's config.json; `BadInput` if it cannot be read."""
    return read_object(file, MODEL_CONFIG)


def from_files(what: str, source: object, read: Callable[[], Read]) -> Read:
    """`read()`, a library's reader of files that others wrote; `BadInput` with the library's reason if it fails.

    transformers and tokenizers raise whatever a damaged file leads to: KeyError, TypeError, a bare Exception.
    """
    try:
        return read()
    except BadInput:
        raise
    except Exception as error:
        if full_disk(error):
            raise
        if "trust_remote_code" in str(error):
            raise BadInput(
                f"{source} has a {what} with code of its own (auto_map), which is not run. Use a model that "
                "transformers has, or convert it."
            ) from None
        reason = (str(error).strip().splitlines() or [""])[0]
        kind = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
        raise BadInput(f"no {what} at {source}: {kind}{reason:.300}") from None


def read_header(file: Path) -> Header:
    """Header of a safetensors file, read by safetensors; `ValueError` if the file is truncated or another kind's."""
    from safetensors import SafetensorError, safe_open

    with open(file, "rb"):  # safetensors takes a file that it may not open for a missing one
        pass
    try:
        with safe_open(file, framework="np") as opened:
            slices = {name: opened.get_slice(name) for name in opened.offset_keys()}
            tensors = {name: (one.get_dtype(), tuple(one.get_shape())) for name, one in slices.items()}
            return Header(tensors, opened.metadata() or {})
    except SafetensorError as error:
        raise ValueError(str(error)) from None


def read_index(directory: Path) -> dict[str, str]:
    """{tensor: its file} of a checkpoint in shards; `BadInput` if it has no such index."""
    return read_object(directory / INDEX, SHARD_INDEX)["weight_map"]


def quantization_of(config: Any) -> dict:
    """`quantization_config` of a transformers config or of the content of a config.json; empty if it has none."""
    get = config.get if isinstance(config, dict) else lambda key: getattr(config, key, None)
    found = get("quantization_config") or {}
    return found if isinstance(found, dict) else found.to_dict()
