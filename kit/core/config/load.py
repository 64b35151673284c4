"""The configuration of a run: one YAML, strict, checked before any weight is loaded. Imports no torch.

Precedence: default < YAML < command line (`--train.learning_rate 1e-4`). An unknown key or a wrong type or choice is
an error that names the key, its source and the nearest valid key. Checks across keys are in `checks.py`.
The code that a YAML or a command line names is trusted (`own_code.py`).
"""

import argparse
import dataclasses
import typing
from collections.abc import Sequence
from dataclasses import MISSING
from pathlib import Path
from typing import Any

import yaml

from kit.core import chat, own_code
from kit.core.config.field_types import COUNTS, literals, match_type, spell_type, unkept
from kit.core.config.schema import SEED, WHEN_READ, Config
from kit.core.errors import BadInput, did_you_mean
from kit.core.format_names import read_quant_format
from kit.core.yaml_files import parse_yaml, read_yaml

FLAGS = ("config", "dry_run", "resume", "overwrite")  # of a recipe; suggested for a misspelled argument
# What a new run sets or changes first, in the order of `--help`.
FIRST: tuple[str, ...] = (
    "run.name",
    "model.id",
    "data.path",
    "reward.functions",
    "rollout.backend",
    "rollout.group_size",
)
FIRST += ("rollout.max_completion_length", "policy.lora_rank", "train.learning_rate", "train.max_steps")
# Groups that may be given as text, and the key that it stands for.
SHORTHANDS = {"environment": "factory"}
# Keys that were replaced, and how to write each value now.
REPLACED = {"train.gradient_checkpointing": {True: "train.recompute: full", False: "train.recompute: none"}}


def to_dict(config: Config) -> dict:
    """The configuration as nested plain dictionaries, ready for JSON."""
    return dataclasses.asdict(config)


def config_from_dict(values: dict, where: str = "config") -> Config:
    """A checked `Config` from nested dictionaries; `BadInput` lists every wrong key, type and choice at once."""
    faults: list[str] = []
    values = _written_out(values)
    config = _build(Config, values, "", where, faults)
    if config is not None:
        config.data.chat_template_kwargs = chat.arguments_of(values)
        faults += [f"{where}: {fault}" for fault in chat.faults(config.data.chat_template_kwargs)]
    if faults:
        raise BadInput("\n".join(faults))
    if config.policy.quant_cfg is not None:
        _set_own_format(config, values.get("eval") or {})
    return config


def load_config(path: str | Path | None, overrides: Sequence[str] = (), flags: tuple[str, ...] = FLAGS) -> Config:
    """The configuration of a YAML file with command-line overrides (`--group.key value` or `--group.key=value`)."""
    values: dict = {}
    if path is not None:
        values = read_yaml(path, "config file")
        if not isinstance(values, dict):
            raise BadInput(f"{path} must hold the groups {', '.join(_names(Config))}; it holds {values!r:.60}.")
    config = resolve(values, overrides, str(path or "defaults"), flags)
    own_code.trust(to_dict(config))
    return config


def resolve(values: dict, overrides: Sequence[str], where: str, flags: tuple[str, ...] = FLAGS) -> Config:
    """The checked configuration of nested dictionaries with command-line overrides; `where` names their source."""
    values, typed = _written_out(values), dict[str, Any]()
    for key, value in _split_overrides(list(overrides), flags):
        _set(values, key, value)
        _set(typed, key, value)
    own_code.trust(typed)
    return config_from_dict(values, f"{where} and the command line" if overrides else where)


def parse_command(description: str, arguments: list[str] | None = None) -> tuple[Config, argparse.Namespace]:
    """The configuration and the flags (`dry_run`, `resume`, `overwrite`) of a recipe's command line."""
    parser = argparse.ArgumentParser(
        description=description.strip(),
        epilog="Every key of the YAML can be given as --group.key value.\n\n" + describe(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True, help="YAML of the run (recipes/configs)")
    parser.add_argument(
        "--dry_run", action="store_true", help="check everything, then exit without writing or training"
    )
    parser.add_argument("--resume", action="store_true", help="continue the run from its newest whole checkpoint")
    parser.add_argument(
        "--overwrite", action="store_true", help="start over: list and delete the contents of the run directory"
    )
    flags, overrides = parser.parse_known_args(arguments)
    return load_config(flags.config, overrides), flags


def leaves(kind: Any = Config, prefix: str = "") -> dict[str, tuple[Any, dataclasses.Field]]:
    """Every key below a group, with its type and its field."""
    hints = typing.get_type_hints(kind)
    found: dict[str, tuple[Any, dataclasses.Field]] = {}
    for item in dataclasses.fields(kind):
        key, hint = f"{prefix}{item.name}", hints[item.name]
        found |= leaves(hint, f"{key}.") if dataclasses.is_dataclass(hint) else {key: (hint, item)}
    return found


def choices_of(hint: Any, item: dataclasses.Field) -> tuple:
    """The values that a key may have, or that the list which it takes is made of; empty if they are not a set."""
    booleans = ("true", "false") if hint is bool else ()
    return item.metadata["choices"] or literals(hint) or booleans


def describe() -> str:
    """One line per key: name, default, choices, meaning; those of `FIRST` before the others."""
    lines = {key: _described(key, hint, item) for key, (hint, item) in leaves().items()}
    groups: dict[str, list[str]] = {}
    for key, line in lines.items():
        if key not in FIRST:
            groups.setdefault(key.partition(".")[0], []).append(line)
    first = "\n".join(["The keys that matter first:", *(lines[key] for key in FIRST)])
    return "\n\n".join([first, *("\n".join([f"{group}:", *found]) for group, found in groups.items())])


def _described(key: str, hint: Any, item: dataclasses.Field) -> str:
    default = item.default if item.default_factory is MISSING else item.default_factory()
    shown = "required" if default is MISSING else f"default {_as_in_yaml(default)}"
    if hint is not bool and (choices := choices_of(hint, item)):
        shown += f"; {'some' if isinstance(default, list) else 'one'} of {', '.join(map(str, choices))}"
    return f"  {key} ({shown}): {item.metadata['help']}"


def _as_in_yaml(value: Any) -> str:
    """A default as one would write it."""
    if value == "":
        return "empty"
    return (
        value
        if isinstance(value, str)
        else yaml.safe_dump(value, default_flow_style=True, width=1000).split("\n...")[0].strip()
    )


def _written_out(values: dict) -> dict:
    """`values` with the `SHORTHANDS` in them as groups."""
    given = {group: {key: values[group]} for group, key in SHORTHANDS.items() if isinstance(values.get(group), str)}
    return values | given


def _names(kind: type) -> list[str]:
    return [item.name for item in dataclasses.fields(kind)]


def _set(values: dict, key: str, value: Any) -> None:
    """Set a dotted key of nested dictionaries."""
    *groups, leaf = key.split(".")
    for group in groups:
        if values.get(group) is None:  # a group left empty in the YAML
            values[group] = {}
        values = values[group]
        if not isinstance(values, dict):
            raise BadInput(f"--{key}: {group} is not a group of keys.")
    values[leaf] = value


def _nearest(key: str, group: list[str]) -> str:
    """Suggest the valid key for a misspelled one: in its own group first, then the same leaf name in any group."""
    prefix, _, leaf = key.rpartition(".")
    if hint := did_you_mean(leaf, group, f"{prefix}." if prefix else ""):
        return hint
    elsewhere = [name for name in leaves() if name.rpartition(".")[2] == leaf]
    return f" Did you mean {elsewhere[0]}?" if elsewhere else f" Valid keys: {', '.join(group)}."


def _build(kind: Any, values: Any, prefix: str, where: str, faults: list[str]) -> Any:
    if not isinstance(values, dict):
        faults.append(f"{where}: {prefix.rstrip('.') or 'the file'} must be a group of keys, it is {values!r:.60}.")
        return None
    hints, known, arguments = typing.get_type_hints(kind), _names(kind), {}
    for key in values:
        if why := unkept(key):
            faults.append(f"{where}: a key of {prefix.rstrip('.') or 'the file'} {why}.")
        elif replaced := REPLACED.get(f"{prefix}{key}"):
            now = replaced.get(values[key]) if isinstance(values[key], bool) else " or ".join(replaced.values())
            faults.append(f"{where}: {prefix}{key} no longer exists. Use {now} instead.")
        elif key not in known:
            faults.append(f"{where}: unknown key {prefix}{key}.{_nearest(f'{prefix}{key}', known)}")
    for item in dataclasses.fields(kind):
        name, hint = item.name, hints[item.name]
        if dataclasses.is_dataclass(hint):
            group = values.get(name)
            arguments[name] = _build(hint, {} if group is None else group, f"{prefix}{name}.", where, faults)
        elif name in values:
            matched, arguments[name] = match_type(values[name], hint)
            limit = item.metadata.get("limit")
            if why := unkept(arguments[name] if matched else values[name]):
                faults.append(f"{where}: {prefix}{name} {why}.")
            elif matched and type(values[name]) is int and values[name] >= COUNTS and limit is not SEED:
                faults.append(f"{where}: {prefix}{name} ({values[name]}) must be below {COUNTS:,}.")
            elif matched and limit in WHEN_READ and values[name] is not None and not limit.holds(values[name]):
                faults.append(f"{where}: {prefix}{name} ({values[name]!r:.60}) must be {limit.words}.")
            elif not matched:
                it = f"{values[name]!r:.60} ({type(values[name]).__name__})"
                faults.append(f"{where}: {prefix}{name} must be {spell_type(hint)}, it is {it}.")
        elif item.default is MISSING and item.default_factory is MISSING:
            faults.append(f"{where}: {prefix}{name} is missing: {item.metadata['help']}.")
    return None if faults else kind(**arguments)


def _split_overrides(arguments: list[str], flags: tuple[str, ...]) -> list[tuple[str, Any]]:
    pairs, known = [], leaves()
    while arguments:
        argument = arguments.pop(0)
        for group, leaf in SHORTHANDS.items():
            if argument.partition("=")[0] == f"--{group}":
                argument = f"--{group}.{leaf}{argument.removeprefix(f'--{group}')}"
        if not argument.startswith("--") or "." not in argument.split("=")[0]:
            hint = did_you_mean(argument, {f"--{flag}" for flag in flags} - {argument})
            raise BadInput(f"unknown argument {argument}.{hint or ' Keys are given as --group.key value.'}")
        key, equals, text = argument[2:].partition("=")
        if not equals:
            if not arguments:
                raise BadInput(f"--{key} needs a value.")
            text = arguments.pop(0)
        # If text is expected, take the argument literally: a name like 007, a prompt with a colon in it.
        kind = known.get(key, (None,))[0]
        try:
            value = text if kind is str else parse_yaml(text)
        except ValueError as error:
            if typing.get_origin(kind) in (list, dict):
                raise BadInput(f"--{key} {text[:60]!r} is not YAML: {error}.") from None
            value = text
        pairs.append((key, text if kind is str or (kind == (str | None) and value is not None) else value))
    return pairs


def _set_own_format(config: Config, given: dict) -> None:
    """Make the format of `policy.quant_cfg` the gate's and a column of the matrix, unless the group `eval` has its
    own; `BadInput` if there is no such format."""
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
