"""The format that a run was trained for (policy.quant_cfg), and the input ranges that its quantizers calibrated.

Both are read from an adapter's directory: `quant_cfg` from its manifest, the ranges from its quantizer state. torch is
imported only when the state is read.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit.core.errors import BadInput
from kit.core.format_names import read_quant_format
from kit.core.formats import QuantFormat
from kit.core.run_directory import RunDir, read_manifest


@dataclass(frozen=True)
class Trained:
    """The quantizers of an adapter: the policy was trained as a checkpoint of the format `format.name`."""

    format: QuantFormat
    adapter: Path
    hash: str | None  # of the state, from the adapter's manifest

    def facts(self) -> dict:
        """Entries for the manifest of every checkpoint of the run."""
        return {"trained_for": self.format.name, "quantizer_hash": self.hash}

    def state(self) -> dict[str, Any]:
        """{"<layer>.input_amax": () float32}; empty for a format without static input ranges. `BadInput` if the state
        is of another format than the manifest's."""
        from kit.policy.quantized_linear import read_quantizer_state

        name, state = read_quantizer_state(self.adapter)
        if name != self.format.name:
            raise BadInput(f"{self.adapter} has quantizers of format {name}, its manifest says {self.format.name}.")
        return state

    def input_peaks(self, names: set[str]) -> dict[str, float]:
        """{weight name: largest |input| of its layer}, from the quantizers; `BadInput` if `names` are other layers."""
        from kit.policy.quantized_linear import AMAX

        found = {f"{name.removesuffix(AMAX)}.weight": peak.item() for name, peak in self.state().items()}
        if odd := sorted(found.keys() ^ names):
            raise BadInput(
                f"the quantizers of {self.adapter} have {len(found)} input ranges, the base has {len(names)} "
                f"quantized layers (first difference: {odd[0]}). Pass an adapter that was trained on this base."
            )
        return found


def find_trained(run: RunDir, adapter: Path | None = None) -> Trained | None:
    """Return the quantizers of `adapter`, or of the run's newest one; None for a run without quantizers.

    `BadInput` if the run's configuration names a format and the adapter does not, or if a file of the adapter is
    damaged.
    """
    declared = (run.config().get("policy") or {}).get("quant_cfg")
    if adapter is None and declared is None:
        return None
    adapter = Path(adapter or run.newest_adapter())
    manifest = read_manifest(adapter, "adapter", deep=True)
    if (name := manifest.get("quant_cfg")) is not None:
        return Trained(read_quant_format(name), adapter, manifest.get("quantizer_hash"))
    if declared is not None:
        raise BadInput(
            f"{run.path} was trained for {declared} (policy.quant_cfg), and {adapter} has no quantizers. Pass an "
            "adapter of this run."
        )
    return None
