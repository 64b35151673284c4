"""Measure layer by layer what training did to the weights and how each format stores them.

`python -m merge diagnose --run X` writes diagnostics.json, .md and .png. It reads the base and the adapter, not the
merged checkpoints, except for formats that need calibration. It works one tensor at a time, on the GPU if there is
one. See README.md for the figures.
"""

import argparse
import functools
import importlib.metadata
import os
import platform
import re
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit.core.errors import DONE, BadInput
from kit.core.formats import FORMATS
from kit.core.run_directory import INTO, RunDir, read_manifest, write_record
from merge.options import add_run

if TYPE_CHECKING:
    import torch

    from kit.core.formats import QuantFormat
    from merge.diagnose_layer import Reader

PACKAGES = ("torch", "bitsandbytes", "compressed-tensors", "safetensors", "numpy", "scipy")
PROGRESS_S = 20.0


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m merge diagnose", description=__doc__, allow_abbrev=False)
    add_run(parser)
    parser.add_argument("--formats", nargs="+", help="formats to measure; default: all that can be")
    parser.add_argument(
        "--into", choices=INTO, default=INTO[0], help="the base that the update is added to; default: dequantized NF4"
    )
    parser.add_argument("--layers", metavar="REGEX", help="only layers whose name matches; default: all")
    parser.add_argument(
        "--out", type=Path, help="output folder; default: the run directory, which it names without --run"
    )
    parser.add_argument("--tokens", action="store_true", help="KL and top-1 agreement of the merged checkpoints too")
    parser.add_argument("--skip_control", action="store_true", help="leave the shuffled update out: a third faster")
    return parser.parse_args(argv)


class NotMerged(BadInput):
    """A format that can only be read from a merged checkpoint, which does not exist."""


class Diagnosis:
    """A checked command: the constructor refuses everything that can be refused before a weight is loaded."""

    def __init__(self, arguments: argparse.Namespace):
        from merge.verify import base_directory, check_adapter_base

        self.arguments = arguments
        self.run = RunDir.open(arguments.run, arguments.allow_own_code)
        self.info = self.run.base()
        self.pattern = _pattern(arguments.layers)
        self.adapter = arguments.adapter or self.run.newest_adapter()
        manifest = check_adapter_base(self.adapter, self.info)
        self.adapter_version = manifest.get("version")
        self.adapter_hash = manifest.get("tensor_hash") or manifest["files"]["adapter_model.safetensors"]["blake2b"]
        directory = base_directory(self.run, arguments.base)

        from kit.weights.frozen_base import BaseCheckpoint, default_device
        from merge.merge import read_adapter

        self.device = default_device()
        self.base = BaseCheckpoint(directory, self.info, into=arguments.into)
        self.updates = read_adapter(self.adapter, self.base)
        self.modules = self._modules()
        self.notes: list[str] = []
        if others := sorted(set(self.updates) - self.base.quantized):
            self.notes.append(
                f"the adapter changes {len(others)} layers that no format quantizes, which are left out: {others[0]}"
            )
        self.readers = self._readers()
        self.batch = self._token_batch() if arguments.tokens else None

    @property
    def stem(self) -> str:
        return "diagnostics" if self.arguments.into == INTO[0] else f"diagnostics-{self.arguments.into}"

    @property
    def out(self) -> Path:
        return self.arguments.out or self.run.path

    def place(self, policy: str, name: str) -> Path:
        """Directory of a policy's merged checkpoint in the run, for the base being diagnosed."""
        return self.run.merged_into(self.arguments.into) / policy / name

    def _modules(self) -> list[str]:
        """Requested quantized layers, ordered by depth in the model, then as in its files."""
        from merge.diagnose_verdict import depth

        every = [n.removesuffix(".weight") for names in self.base.shards.values() for n in names]
        every = [name for name in every if f"{name}.weight" in self.base.quantized]
        found = [name for name in every if self.pattern is None or self.pattern.search(name)]
        if not found:
            raise BadInput(
                f"--layers {self.arguments.layers!r} matches none of the {len(every)} quantized layers, e.g. "
                f"{every[0]}."
            )
        return sorted(found, key=depth)

    def _readers(self) -> dict[str, "Reader"]:
        """Readers by format; a format without one is an error if it was requested, else a note."""
        asked = self.arguments.formats
        if asked and (unknown := [name for name in asked if name not in FORMATS]):
            raise BadInput(f"--formats {unknown[0]} is not a format: use some of {', '.join(FORMATS)}.")
        readers: dict[str, Reader] = {}
        absent = []
        for name in FORMATS if not asked else dict.fromkeys(asked):
            try:
                readers[name] = self._reader(name)
            except NotMerged:
                if asked:
                    raise
                absent.append(name)
            except BadInput as error:
                if asked:
                    raise
                self.notes.append(f"{name} is left out: {error}")
        if absent:
            self.notes.append(
                f"{', '.join(absent)} left out: a format that needs more than the weights is read from its merged "
                f"checkpoint, and {self.place('grpo', absent[0]).parent} has none. {self._make(None, *absent)}"
            )
        return readers

    def _reader(self, name: str) -> "Reader":
        import torch

        from merge.quantize import STORED, check_experts, check_shapes, format_of

        if name == "bf16":
            return lambda module, policy, weight: weight.to(torch.bfloat16).float()
        if name in STORED:
            check_experts(self.base, name)
            check_shapes(self.base, name)
            return computed(format_of(self.base, name))
        return self._checkpoint_reader(name)

    def _checkpoint_reader(self, name: str) -> "Reader":
        from kit.weights.read_quantized import StoredWeights, unscaled

        stored = {"grpo": StoredWeights(self._own_checkpoint("grpo", name))}
        try:
            stored["base"] = StoredWeights(self._own_checkpoint("base", name))
        except BadInput as error:
            self.notes.append(f"{name}: no error before training and no share kept: {error}")

        def read(module: str, policy: str, weight: "torch.Tensor") -> "torch.Tensor | None":
            value = stored[policy].weight(module, weight.device) if policy in stored else None
            return unscaled(value, weight) if value is not None and name == "awq" else value

        return read

    def _own_checkpoint(self, policy: str, name: str) -> Path:
        """Return the merged checkpoint of this base and adapter; `BadInput` names the command that makes it."""
        place = self.place(policy, name)
        if not place.exists():
            raise NotMerged(
                f"{name} needs more than the weights, so it is read from its merged checkpoint, and {place} does "
                f"not exist. {self._make(policy, name)}"
            )
        if not self._is_ours(read_manifest(place, "checkpoint", deep=True), policy):
            raise BadInput(f"{place} is of another base or adapter. {self._make(policy, name)} --overwrite")
        return place

    def _make(self, policy: str | None, *names: str) -> str:
        into = "" if self.arguments.into == INTO[0] else f" --into {self.arguments.into}"
        only = f" --policy {policy}" if policy else ""
        return f"Make it: python -m merge --run {self.run.as_argument}{only} --format {' '.join(names)}{into}"

    def _is_ours(self, manifest: dict, policy: str) -> bool:
        adapter = self.adapter_hash if policy == "grpo" else None
        return (
            manifest.get("base_hash") == self.info["hash"]
            and manifest.get("adapter_hash") == adapter
            and manifest.get("into", INTO[0]) == self.arguments.into
        )

    def _token_batch(self) -> list | None:
        """Batch to compare the policies on; None if every merged checkpoint has been compared already."""
        from merge.verify import fixed_batch, read_tokenizer

        if not any(manifest.get("verify") is None for manifest in self.merged().values()):
            return None
        return fixed_batch(self.run, read_tokenizer(self.base.directory), self.base.config.vocab_size)

    def merged(self) -> dict[str, dict]:
        """{format: manifest} of this adapter's merged checkpoints."""
        found = {}
        for place in sorted(self.place("grpo", "*").parent.glob("[!.]*")):
            try:
                manifest = read_manifest(place, "checkpoint")
            except BadInput:
                continue
            if self._is_ours(manifest, "grpo"):
                found[place.name] = manifest
        return found

    def layers(self) -> list[dict]:
        """Records of all requested layers."""
        import torch

        from merge.diagnose_layer import measure_layer

        records, told = [], time.monotonic()
        with torch.no_grad():
            for module in self.modules:
                name = f"{module}.weight"
                weight = self.base.tensor(name).to(self.device)
                delta = self.updates[name].delta(self.device) if name in self.updates else None
                records.append(measure_layer(module, weight, delta, self.readers, not self.arguments.skip_control))
                if time.monotonic() - told > PROGRESS_S:
                    told = time.monotonic()
                    print(f"{len(records)} of {len(self.modules)} layers", flush=True)
        return records

    def tokens(self) -> dict[str, dict]:
        """{format: {"kl", "top1"}} of each merged checkpoint of this adapter against the policy as trained."""
        from merge.verify import Verifier

        found, verifier = {}, None
        for name, manifest in self.merged().items():
            verify = manifest.get("verify")
            if verify is None and self.batch is not None:
                verifier = verifier or Verifier(self.run, self.adapter, self.base, self.batch)
                verify = asdict(verifier.compare("grpo", self.place("grpo", name), plain=name == "bf16"))
            if verify is not None:
                found[name] = {"kl": verify["mean_kl"], "top1": verify["top1_agreement"]}
        return found


def computed(fmt: "QuantFormat") -> "Reader":
    """Reader that stores a BF16 weight in a format and reads it back; one object for formats that store the same."""
    from merge.quantize import STORED

    return _computed(
        next((one for one in STORED.values() if (one.layout, one.weight) == (fmt.layout, fmt.weight)), fmt)
    )


@functools.cache
def _computed(fmt: "QuantFormat") -> "Reader":
    import torch

    from merge.quantize import read_back

    return lambda module, policy, weight: read_back(fmt, weight.to(torch.bfloat16))[1]


def _pattern(text: str | None) -> re.Pattern | None:
    try:
        return re.compile(text) if text is not None else None
    except re.error as error:
        raise BadInput(f"--layers {text!r} is not a regular expression: {error}.") from None


def versions() -> dict:
    """Versions of the packages that the figures depend on, and the machine they were measured on."""
    import torch

    found = {name: importlib.metadata.version(name) for name in PACKAGES}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"cpu ({platform.machine()})"
    return {"python": platform.python_version(), **found, "device": device}


def diagnose(diagnosis: Diagnosis, command: list[str]) -> dict:
    """Measure everything; return the content of diagnostics.json."""
    from merge.diagnose_verdict import summarize, verdict

    started = time.monotonic()
    layers = diagnosis.layers()
    result: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": ["python", "-m", "merge", "diagnose", *command],
        "versions": versions(),
        "seconds": round(time.monotonic() - started, 3),
        "base_hash": diagnosis.info["hash"],
        "adapter_version": diagnosis.adapter_version,
        "adapter_hash": diagnosis.adapter_hash,
        "into": diagnosis.arguments.into,
        "base_storage": diagnosis.base.storage,
        "notes": diagnosis.notes,
        "layers": layers,
        **summarize(layers, list(diagnosis.readers)),
    }
    if diagnosis.arguments.tokens:
        result["tokens"] = diagnosis.tokens()
    return result | {"verdict": verdict(result)}


def write(result: dict, folder: Path, stem: str) -> None:
    """Write <stem>.md, <stem>.png and, last, <stem>.json: once it exists, all three are complete."""
    from merge.diagnose_plot import draw
    from merge.diagnose_report import markdown

    folder.mkdir(parents=True, exist_ok=True)
    draw(result, folder / f"{stem}.png")
    partial = folder / f".{stem}.md.partial"
    try:
        partial.write_text(markdown(result, f"{stem}.png"))
        os.replace(partial, folder / f"{stem}.md")
    finally:
        partial.unlink(missing_ok=True)
    write_record(folder / f"{stem}.json", result)


def main(argv: list[str]) -> int:
    """Check, measure, write, print the table and the verdict."""
    from merge.imported import run_of

    arguments = parse_arguments(argv)
    run_of(arguments)
    diagnosis = Diagnosis(arguments)
    names = ", ".join(diagnosis.readers)
    print(
        f"{len(diagnosis.modules)} layers in {names} on {diagnosis.device}, adapter {diagnosis.adapter} into the "
        f"{diagnosis.arguments.into} base",
        flush=True,
    )
    for note in diagnosis.notes:
        print(f"note: {note}", flush=True)

    from merge.diagnose_report import HEAD, rows_of
    from merge.tables import show_table

    result = diagnose(diagnosis, argv)
    write(result, diagnosis.out, diagnosis.stem)
    show_table(HEAD, rows_of(result))
    for line in result["verdict"]:
        print(f"- {line}")
    print(f"written: {', '.join(str(diagnosis.out / f'{diagnosis.stem}.{end}') for end in ('json', 'md', 'png'))}")
    return DONE
