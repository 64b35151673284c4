"""A run that is trained for a deployment format (policy.quant_cfg) is evaluated and gated in it. Imports no torch."""

from typing import TYPE_CHECKING

from recipes.parts.quant_format import read_quant_format

if TYPE_CHECKING:
    from recipes.parts.config import Config


def judge_in_own_format(config: "Config", given: dict) -> None:
    """Make the run's own format that of its gate and a column of its matrix, unless `given`, its eval group, says
    another; `BadInput` when there is no such format."""
    gated = "format" in (given.get("gate") or {})
    if gated and "formats" in given:
        return
    own = read_quant_format(config.policy.quant_cfg).name
    if "formats" not in given:
        config.eval.formats = ["nf4", "bf16", own]
    if not gated:
        config.eval.gate.format = own
    if config.eval.gate.format not in config.eval.formats:
        config.eval.formats.append(config.eval.gate.format)
