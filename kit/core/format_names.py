"""Resolve the name of a deployment format: the kit's own, one of nvidia-modelopt, or a YAML file in its form.

A configuration of nvidia-modelopt determines the layout (modelopt_config.py), not how scales are found. Imports no
torch.
"""

from collections.abc import Mapping
from pathlib import Path

from kit.core.checkpoint_files import read_facts
from kit.core.config.schema import Config
from kit.core.errors import BadInput, did_you_mean
from kit.core.formats import FORMATS, TRAINED, QuantFormat, check_model

# Names used elsewhere, and the kit's format with those numbers or the nearest ones.
CALLED = {called: fmt.name for fmt in TRAINED.values() for called in fmt.called}


def read_quant_format(text: str, key: str = "policy.quant_cfg") -> QuantFormat:
    """The format that `key` names: one of the merge, a configuration of nvidia-modelopt, or a YAML file in its form.

    Raises `BadInput` for an unknown name, with the nearest one, and for what no layout can store, with the reason.
    """
    from kit.core import modelopt_config

    if text in TRAINED:
        return TRAINED[text]
    if text.endswith((".yaml", ".yml")) or "/" in text:
        return modelopt_config.read_file(Path(text), key)
    if (found := modelopt_config.by_name(text, key)) is not None:
        return found
    if text in FORMATS:
        raise BadInput(
            f"{key} ({text}) is a format of the merge that no run is trained for: {FORMATS[text].not_trained} "
            f"Known: {', '.join(TRAINED)}."
        )
    names = {name: name for name in TRAINED} | modelopt_config.LAYOUTS
    raise BadInput(
        f"{key} ({text}) is not a format, a configuration of nvidia-modelopt or a YAML file.{_nearest(text, names)} "
        f"Known: {', '.join(names)}."
    )


def _nearest(text: str, names: Mapping[str, str]) -> str:
    """Suggest which of `names`, {name: format}, was meant; the same numbers come before a similar spelling."""
    folded = text.lower()
    if folded in CALLED:
        return f" Did you mean {CALLED[folded]}?"
    kind = next((FORMATS[fmt].weight.kind for start, fmt in CALLED.items() if folded.startswith(start)), None)
    if alike := [name for name, fmt in names.items() if FORMATS[fmt].weight.kind == kind]:
        return did_you_mean(text, alike, cutoff=0)
    return did_you_mean(text, names, cutoff=0.4)


def faults(config: Config) -> list[str]:
    """Why this configuration cannot train in its format; empty without `policy.quant_cfg`.

    Needs of the servers are in config/format_rules.py, which also reports an unknown format.
    """
    policy = config.policy
    try:
        fmt = read_quant_format(policy.quant_cfg) if policy.quant_cfg is not None else None
    except BadInput:
        return []
    if fmt is None:
        return []
    found = []
    if config.model.path and (file := Path(config.model.path) / "config.json").is_file():
        try:
            check_model(fmt, read_facts(file))
        except BadInput as error:
            found.append(str(error))
    return found
