"""The adapter file sent to the replicas: one file, written in one go.

A checkpoint's adapter (`kit.policy.load.publish_adapter`) is float32, hashed and synced to disk; this one lives for
one step. It holds the values that the trainer's forward computes with, in model.dtype.
"""

import copy
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit.core.errors import CheckFailed, failure_of
from kit.core.run_directory import write_json
from kit.rollout.protocol import CONFIG, CONFIG_TEXT, INPUT_PEAKS, QUANT_CFG, WEIGHTS

if TYPE_CHECKING:
    import torch

SAFETENSORS_NAMES = {"torch.bfloat16": "BF16", "torch.float16": "F16", "torch.float32": "F32"}


class AdapterFile:
    """Write the adapter of one model repeatedly; names, order and header never change, so they are computed once.

    The layout, with the metadata of the weights, is in `protocol.py`; calibration fixes `input_peaks` once.
    `gathered` are the adapter's tensors if the model holds only parts of them (`sharding.gather_adapter`). They are a
    snapshot, so each version then needs a new object.
    """

    def __init__(
        self,
        model: "torch.nn.Module",
        dtype: "torch.dtype",
        base_hash: str,
        gathered: "dict[str, torch.Tensor] | None" = None,
        quant_cfg: str | None = None,
        input_peaks: dict[str, float] | None = None,
    ):
        from peft import get_peft_model_state_dict

        tensors = dict(model.named_parameters()) if gathered is None else gathered
        named = {
            name.replace(".default.", "."): parameter
            for name, parameter in tensors.items()
            if ".lora_A.default." in name or ".lora_B.default." in name
        }
        if other := sorted(get_peft_model_state_dict(model, state_dict=gathered).keys() ^ named.keys()):
            raise CheckFailed(f"the adapter holds more than LoRA matrices, which no replica can serve: {other[:5]}.")
        self.parameters, self.dtype, self.base_hash = list(named.values()), dtype, base_hash
        self.config = _config_text(model.peft_config["default"])
        self.rank = model.peft_config["default"].r
        self.targets = sorted({name.rsplit(".lora_", 1)[0].split(".")[-1] for name in named})
        metadata = {"format": "pt", CONFIG_TEXT: self.config}
        if quant_cfg is not None:
            metadata |= {QUANT_CFG: quant_cfg, INPUT_PEAKS: json.dumps(input_peaks or {})}
        self.header = _header({name: parameter.shape for name, parameter in named.items()}, dtype, metadata)
        self._host: torch.Tensor | None = None

    def write(self, directory: Path, version: int) -> Path:
        """Write the current adapter to `directory`, all or nothing; return the directory."""
        partial = directory.parent / f".partial-{directory.name}"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            with open(partial / WEIGHTS, "wb", buffering=0) as file:
                for part in (self.header, memoryview(self._bytes())):
                    written = 0
                    while written < len(part):
                        written += file.write(part[written:])
            (partial / CONFIG).write_text(self.config)
            facts = {"kind": "sync", "version": version, "base_hash": self.base_hash}
            write_json(partial / "manifest.json", facts | {"rank": self.rank, "targets": self.targets})
            if directory.exists():
                shutil.rmtree(directory)
            os.replace(partial, directory)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise failure_of(error)(
                f"writing the adapter of version {version} to {directory} failed: {error}. Free some space, then "
                "continue with --resume."
            ) from error
        return directory

    def _bytes(self) -> Any:
        """Concatenate all tensors into a NumPy array of bytes in host memory."""
        import torch

        sizes, device = [parameter.numel() for parameter in self.parameters], self.parameters[0].device
        if self._host is None:
            self._host = torch.empty(sum(sizes), dtype=self.dtype, pin_memory=device.type == "cuda")
        flat = torch.empty(sum(sizes), dtype=self.dtype, device=device) if device.type == "cuda" else self._host
        with torch.no_grad():
            sources = [parameter.detach() for parameter in self.parameters]
            parts = [part.view(source.shape) for part, source in zip(flat.split(sizes), sources, strict=True)]
            # A few launches for all 504 tensors of an 8B shape.
            torch._foreach_copy_(parts, sources)
            if flat is not self._host:
                # A single copy to the host: the overhead of 504 small ones exceeds the time for their 87 MB.
                self._host.copy_(flat, non_blocking=True)
                torch.cuda.current_stream(device).synchronize()
        return self._host.view(torch.uint8).numpy()


class WrittenAdapter:
    """A version that `AdapterFile` has written, to be sent without the model."""

    def __init__(self, directory: Path, base_hash: str):
        self.directory, self.base_hash = directory, base_hash

    def write(self, directory: Path, version: int) -> Path:
        """Copy it to `directory`, unless that is where it is; return the directory."""
        if directory != self.directory:
            try:
                shutil.copytree(self.directory, directory, dirs_exist_ok=True)
            except OSError as error:
                raise failure_of(error)(
                    f"copying the adapter of version {version} to {directory} failed: {error}. Free some space, then "
                    "continue with --resume."
                ) from error
        return directory


def _config_text(config: Any) -> str:
    """Text of adapter_config.json as peft saves it."""
    config = copy.copy(config)
    config.inference_mode = True
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        return (Path(folder) / CONFIG).read_text()


def _header(shapes: dict[str, Any], dtype: "torch.dtype", metadata: dict[str, str]) -> bytes:
    """Safetensors header: its length as 8 bytes, then JSON padded so that the data is aligned to 8 bytes."""
    entries: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for name, shape in shapes.items():
        end = offset + shape.numel() * dtype.itemsize
        entries[name] = {"dtype": SAFETENSORS_NAMES[str(dtype)], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
