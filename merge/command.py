"""A merge as given on the command line: checks before a weight is loaded, and what is written where."""

import argparse
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from kit.core.chat import arguments_of, check_template
from kit.core.errors import BadInput, CheckFailed
from kit.core.formats import FORMATS
from kit.core.run_directory import INTO, RunDir, read_manifest
from merge.trained import find_trained

if TYPE_CHECKING:
    import torch

    from kit.weights.frozen_base import BaseCheckpoint
    from merge.calibrated import Calibration
    from merge.merge import Factors
    from merge.verify import Verifier

POLICIES = ("base", "grpo")
AWQ_PYTHON = Path(".venv-llmcompressor/bin/python")


class Merge:
    """A checked command: the constructor refuses everything that can be refused before a weight is loaded."""

    def __init__(self, arguments: argparse.Namespace, reuse: bool = False):
        """With `reuse`, an existing BF16 checkpoint of the same base and adapter is not written again."""
        self.arguments = arguments
        self.reuse = reuse
        self._sources: dict[str, bool] = {}  # cached by policy, since every file is hashed
        self.into = arguments.into
        self.run = RunDir.open(arguments.run, arguments.allow_own_code)
        self.info = self.run.base()
        self.policies = [name for name in POLICIES if name in arguments.policy]
        self.out = arguments.out or self.run.merged_into(self.into)
        self.adapter, self.adapter_facts = self._find_adapter()
        self.trained = find_trained(self.run, self.adapter or arguments.adapter)
        self.template_arguments = arguments_of(self.run.config())
        self.stop = (self.run.config().get("rollout") or {}).get("stop")  # missing in runs of earlier versions
        # argparse keeps the order of the command line, but bf16 comes first: the others are made from it.
        self.formats = [name for name in FORMATS if name in self._asked()]
        self._check_outputs()
        if any(FORMATS[name].needs_llmcompressor for name in self.formats):
            from merge.calibrated import check_awq

            check_awq(arguments.awq_python)
        from merge.verify import base_directory

        self.directory = base_directory(self.run, arguments.base, weights=not arguments.dry_run)
        self._check_template()
        self.base, self.updates = self._open_base()
        self.batch = None if arguments.skip_verify else self._batch()
        self.calibration = self._calibration()
        self._verifier: Verifier | None = None

    def _open_base(self) -> "tuple[BaseCheckpoint | None, dict[str, Factors]]":
        """Open and check the original checkpoint and the adapter's updates; (None, {}) if a dry run has no weights."""
        from kit.weights.frozen_base import BaseCheckpoint
        from merge.merge import read_adapter
        from merge.quantize import check_experts, check_shapes

        if self.arguments.dry_run and not any(self.directory.glob("*.safetensors")):
            print(f"note: the weights of {self.info['model']} are not on this machine and a dry run does not download")
            print("them, so tensor names, shapes and disk space are not checked", flush=True)
            return None, {}
        self.base = BaseCheckpoint(self.directory, self.info, into=self.into)
        updates = read_adapter(self.adapter, self.base) if self.adapter else {}
        for name in self.formats:
            check_experts(self.base, name)
            check_shapes(self.base, name)
        self._check_space()
        return self.base, updates

    def _find_adapter(self) -> tuple[Path | None, dict]:
        if "grpo" not in self.policies:
            return None, {}
        from merge.verify import check_adapter_base

        adapter = self.arguments.adapter or self.run.newest_adapter()
        manifest = check_adapter_base(adapter, self.info)
        content = manifest.get("tensor_hash") or manifest["files"]["adapter_model.safetensors"]["blake2b"]
        return adapter, {"adapter_version": manifest.get("version"), "adapter_hash": content}

    def _asked(self) -> list[str]:
        """Formats to write: those of the command line, else the one that the run was trained for."""
        if self.arguments.format:
            return self.arguments.format
        if self.trained is None:
            raise BadInput(
                f"--format is missing, and {self.run.path} was not trained for one (policy.quant_cfg). Name some of "
                f"{', '.join(FORMATS)}."
            )
        return [self.trained.format.name]

    def is_own(self, name: str) -> bool:
        """Whether the run was trained for this format."""
        return self.trained is not None and self.trained.format.name == name

    def note(self, name: str) -> str:
        """Suffix for a checkpoint's output line: how its format relates to the one that the run was trained for."""
        if self.trained is None or self.is_own(name):
            return "" if self.trained is None else ", which the run was trained for"
        return f"; the run was trained for {self.trained.format.name}"

    def has_ranges(self, name: str) -> bool:
        """Whether the run's quantizers hold the activation ranges of this format, so that none need calibrating."""
        return FORMATS[name].needs_calibration and self.trained is not None and self.trained.format.needs_calibration

    def facts(self, policy: str) -> dict:
        """Provenance that every manifest of a policy records."""
        adapter = self.adapter_facts if policy == "grpo" else {"adapter_version": None, "adapter_hash": None}
        adapter |= {} if self.trained is None else self.trained.facts()
        adapter |= {"chat_template_kwargs": self.template_arguments} if self.template_arguments else {}
        adapter |= {"stop": self.stop} if self.stop else {}
        return {"policy": policy, "into": self.into, "base_hash": self.info["hash"], **adapter, "promoted": False}

    def place(self, policy: str, name: str) -> Path:
        return self.out / policy / name

    def _check_outputs(self) -> None:
        if self.arguments.overwrite:
            return
        for policy in self.policies:
            for name in self.formats if not self.reuse else ():
                if (place := self.place(policy, name)).exists():
                    raise BadInput(
                        f"{place} exists already. Pass --overwrite to replace it, or --out for another place."
                    )
            place = self.place(policy, "bf16")
            if (self.reuse or "bf16" not in self.formats) and place.exists() and not self._same_source(policy):
                raise BadInput(
                    f"{place}, from which the other formats are made, is not whole or of another base or adapter, or "
                    "its chat template has other defaults than the run's data.chat_template_kwargs. "
                    "Pass --overwrite to merge again, or --out for another place."
                )

    def _same_source(self, policy: str) -> bool:
        if policy not in self._sources:
            self._sources[policy] = self._is_source(policy)
        return self._sources[policy]

    def _is_source(self, policy: str) -> bool:
        try:
            manifest = read_manifest(self.place(policy, "bf16"), "checkpoint", deep=True)
        except BadInput:  # incomplete: never quantized, and replaced only with --overwrite
            return False
        manifest.setdefault("into", INTO[0])  # missing in manifests of earlier versions, which knew only one base
        if manifest.get("chat_template_kwargs", {}) != self.template_arguments:
            return False
        return all(manifest.get(key) == self.facts(policy)[key] for key in ("into", "base_hash", "adapter_hash"))

    def reuses_bf16(self, policy: str) -> bool:
        """Whether an existing BF16 checkpoint is quantized instead of merging again."""
        place = self.place(policy, "bf16")
        return (self.reuse or "bf16" not in self.formats) and place.exists() and self._same_source(policy)

    def targets(self) -> list[tuple[str, str]]:
        """(policy, format) pairs in the order of work; includes BF16 even if only the other formats need it."""
        return [
            (policy, name)
            for policy in self.policies
            for name in FORMATS
            if (not self.reuses_bf16(policy) if name == "bf16" else name in self.formats)
        ]

    def bytes_of(self, name: str) -> int:
        """Size in bytes of a checkpoint in the format `name`, estimated from shapes."""
        total = 0.0
        for tensor in self.base.files:
            weights = 1
            for size in self.base.shape(tensor):
                weights *= size
            total += weights * (FORMATS[name].bytes_per_weight if tensor in self.base.quantized else 2.0)
        return int(total)

    def _check_space(self) -> None:
        existing = next(parent for parent in [self.out, *self.out.absolute().parents] if parent.exists())
        free, need = shutil.disk_usage(existing).free, sum(self.bytes_of(name) for _, name in self.targets())
        if need > free:
            raise BadInput(
                f"{existing} has {free / 2**20:.0f} MiB free and the checkpoints need about {need / 2**20:.0f} MiB. "
                "Free some space, request fewer formats, or choose another place with --out."
            )

    def _batch(self) -> "list[torch.Tensor]":
        from kit.weights.frozen_base import unquantized_config
        from merge.verify import fixed_batch, read_tokenizer

        return fixed_batch(self.run, read_tokenizer(self.directory), unquantized_config(self.directory).vocab_size)

    def _check_template(self) -> None:
        """Raise `BadInput` if the chat template cannot take the run's arguments as defaults."""
        if self.template_arguments:
            from merge.verify import read_tokenizer

            check_template(
                read_tokenizer(self.directory), [{"role": "user", "content": "2 + 40?"}], self.template_arguments
            )

    def _calibration(self) -> "Calibration | None":
        """Calibration set for the formats that need data; None if none of them was requested."""
        if not any(FORMATS[name].needs_data and not self.has_ranges(name) for name in self.formats):
            return None
        from merge.calibrated import calibration_set
        from merge.verify import read_tokenizer

        options = self.arguments
        return calibration_set(self.run, read_tokenizer(self.directory), options.calib_samples, options.calib_seq_len)

    def verifier(self) -> "Verifier":
        """The verifier with the policies' scores, computed on first use."""
        from merge.verify import Verifier

        if self._verifier is None:
            print(f"scoring the policy on {sum(ids.shape[1] for ids in self.batch)} tokens", flush=True)
            self._verifier = Verifier(self.run, self.adapter, self.base, self.batch)
        return self._verifier

    def share_verifier(self, verifier: "Verifier") -> None:
        """Use the scores of another merge's verifier, of the same run and adapter."""
        self._verifier = verifier

    def write(self, policy: str, name: str) -> dict:
        """Write and verify one checkpoint; return its manifest."""
        from merge.merge import write_bf16
        from merge.quantize import quantize_checkpoint

        updates = self.updates if policy == "grpo" else {}
        place, facts = self.place(policy, name), self.facts(policy)

        def verify(directory: Path) -> dict | None:
            if self.batch is None:
                return None
            try:
                return self.verifier().judge(policy, name, directory, self.into)
            except CheckFailed as error:
                raise CheckFailed(f"{error} It was not published.") from None

        if name == "bf16":
            return write_bf16(self.base, updates, place, verify, self.arguments.overwrite, **facts)
        source, options = self.place(policy, "bf16"), self.arguments
        if FORMATS[name].needs_data and not self.has_ranges(name):
            print(f"calibrating {policy} {name} on {self.calibration.facts['tokens']} tokens", flush=True)
        if FORMATS[name].needs_llmcompressor:
            from merge.calibrated import write_awq

            made_by = (self.calibration, options.awq_python)
            return write_awq(source, place, self.base, *made_by, verify, options.overwrite, **facts)
        if self.has_ranges(name):
            facts["calibration"] = {"quantizers": self.trained.hash}
            facts["input_peaks"] = self.trained.input_peaks(self.base.quantized)
        elif FORMATS[name].needs_calibration:
            from merge.calibrated import input_peaks

            facts["calibration"] = self.calibration.facts
            facts["input_peaks"] = input_peaks(source, self.base.quantized, self.calibration)
        return quantize_checkpoint(
            source, place, name, self.base, updates, verify, options.overwrite, options.force, **facts
        )
