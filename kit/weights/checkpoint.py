"""Locate a checkpoint's files, select those that transformers loads, and download them from the hub.

Covers: safetensors in one file or in shards, an offline hub cache. Not covered: variants (`model.fp16…`), files that a
config.json names itself (`transformers_weights`).
"""

import errno
from pathlib import Path

import torch
from safetensors import safe_open

from kit.core.checkpoint_files import INDEX, SINGLE, read_header, read_index
from kit.core.errors import BadInput


def pass_full_disk(error: Exception) -> None:
    """Re-raise `error` if a download failed on a full disk, which is not the input's fault."""
    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
        raise error


def find_checkpoint(model: str | Path, revision: str | None = None, weights: bool = True) -> Path:
    """Return the local directory of a checkpoint: `model` itself, or the cached snapshot of a hub id.

    For a hub id without `weights`, only the small files are downloaded: configuration, tokenizer, index of the shards;
    with `weights`, also the files that transformers loads and no others. All files are from one commit, even if
    `revision` is a branch that moves meanwhile.
    """
    from httpx import TransportError

    path = Path(model)
    if path.is_dir():
        return path
    if path.is_absolute() or str(model).count("/") > 1:
        raise BadInput(f"no checkpoint at {model}: the directory does not exist. Pass the base with --base.")
    try:
        place = _download(str(model), revision, ["*.json", "*.txt", "*.jinja", "tokenizer.model"])
        if weights:
            commit = place.name  # the cache names a snapshot's directory after its commit
            _download(str(model), commit, [SINGLE])
            if not (place / SINGLE).is_file() and (place / INDEX).is_file():
                _download(str(model), commit, sorted(set(read_index(place).values())))
        return place
    except (OSError, ValueError, TransportError) as error:  # not found, gated, offline; a malformed id is a ValueError
        pass_full_disk(error)
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise BadInput(f"no checkpoint at {model}, neither a directory nor on the hub: {reason}") from None


def _download(model: str, revision: str | None, files: list[str]) -> Path:
    """Return the snapshot with those of `files` that the hub has; offline, fall back to the cached one as it is.

    huggingface_hub 1.33 falls back to the cache by itself for a branch, but for a commit it asks the hub for the list
    of files unless it downloaded that commit before.
    """
    from httpx import TransportError
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=files))
    except (OSError, TransportError) as error:
        pass_full_disk(error)
        try:
            return Path(snapshot_download(model, revision=revision, allow_patterns=files, local_files_only=True))
        except OSError:
            raise error from None


def checkpoint_shards(directory: str | Path) -> dict[str, list[str]]:
    """Return {shard file: its tensor names}, in file order, of a safetensors checkpoint; `BadInput` if there is none.

    If there is both a single file and an index of shards, the single file is used, as in transformers.
    """
    directory = Path(directory)
    if (directory / SINGLE).is_file():
        return {SINGLE: list(read_header(directory / SINGLE).tensors)}
    if not (directory / INDEX).is_file():
        raise BadInput(
            f"{directory} has no model.safetensors and no index of shards. Convert the checkpoint to safetensors "
            "(load it with transformers and save_pretrained)."
        )
    weight_map = read_index(directory)
    shards: dict[str, list[str]] = {file: [] for file in sorted(set(weight_map.values()))}
    for name, file in weight_map.items():
        shards[file].append(name)
    if missing := [file for file in shards if not (directory / file).is_file()]:
        raise BadInput(f"{directory} lacks {', '.join(missing)}, which its index lists. Download it again.")
    return shards


def read_tensor(file: Path, name: str) -> torch.Tensor:
    """Read one tensor of a safetensors file, on the CPU.

    The file is opened for each read: pages read from an open file count as this process's memory until it is closed.
    """
    with safe_open(file, framework="pt") as opened:
        return opened.get_tensor(name)
