"""Code and services that a configuration names, which nothing starts because a run directory says so.

A YAML and a command line are the user's own, so the code that they name is trusted. A run directory may come from
elsewhere: what only its config.json names is neither imported nor called, unless the command has `--allow_own_code`.
A run that does not need it (a report, metrics, a merge of logged prompts) is read without.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from kit.core.errors import BadInput

FLAG = "--allow_own_code"
EXAMPLES = "recipes.environments."  # modules of the kit that its own configurations name
CONSENTS = ("reward.allow_code_execution", "environment.allow_code_execution")  # to run what a model wrote
JUDGE, OPENENV, VERIFIERS = "llm_judge", "openenv", "verifiers"

_trusted: set[str] = set()
_held_back: dict[str, str] = {}  # names and kinds of services in a run's config.json: the file's path


class OwnCodeHeldBack(BadInput):
    """Code or a service that only a run directory names, without `--allow_own_code`."""


def add_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        FLAG,
        action="store_true",
        help="import the code that the run's config.json names (rewards, prompts, environments): for a run you trust",
    )


def flags(values: Any) -> list[str]:
    """The flag if these values of the user's own configuration name code: for commands on the runs made of it."""
    return [FLAG] if _functions(values) or _services(values) else []


def trust(values: Any) -> None:
    """Allow the code and services in these values, of the user's YAML or command line."""
    _trusted.update([*_functions(values), *_consents(values)])
    _trusted.update(_identity(kind, options) for kind, options in _services(values).items())


def hold_back(values: Any, file: Path) -> None:
    """Refuse the code and services in these values, of a run's `file`, unless the user named them too."""
    found = [*_functions(values), *_services(values), *_consents(values)]
    _held_back.update(dict.fromkeys(found, str(file)))


def check(name: str, key: str) -> None:
    """Raise `OwnCodeHeldBack` if only a run directory names this `module:function`, as the configuration's `key`."""
    file = _held_back.get(name)
    if file is not None and name not in _trusted and not name.startswith(EXAMPLES):
        raise _refusal(file, f"{key} {name!r:.200}", f"Using it runs {_file_of(name.partition(':')[0])}")


def check_service(kind: str, options: dict[str, Any], key: str) -> None:
    """Raise `OwnCodeHeldBack` if a run directory names such a judge or environment, and the user not with the same
    options: they say which address gets the completions, and which environment variable as its key."""
    file = _held_back.get(kind)
    if file is not None and _identity(kind, options) not in _trusted:
        place = options.get("url", options.get("id"))
        raise _refusal(file, f"{key} {kind} ({place!r:.200})", "Using it sends data, and a key if one is named, there")


def check_consent(key: str) -> None:
    """Raise `OwnCodeHeldBack` if only a run directory sets this one of `CONSENTS`."""
    if (file := _held_back.get(key)) is not None and key not in _trusted:
        raise OwnCodeHeldBack(
            f"{file} sets {key}: the model's code would run in the sandbox because a run directory says so, which may "
            f"come from elsewhere. To let it, pass --{key}=true, or {FLAG} if you trust the run."
        )


def reset() -> None:
    """Forget everything: for tests, which share a process."""
    _trusted.clear()
    _held_back.clear()


def _refusal(file: str, what: str, effect: str) -> OwnCodeHeldBack:
    return OwnCodeHeldBack(
        f"{file} names {what}. {effect}, and a run directory may come from elsewhere. If you trust the run, pass "
        f"{FLAG}."
    )


def _functions(values: Any) -> set[str]:
    """Every `module:function` in nested values of a configuration."""
    reward, environment = _group(values, "reward"), _environment(values)
    found = [*_texts(reward.get("functions")), *_texts(environment.get("tools")), environment.get("factory")]
    found += [_group(values, "eval").get("reward"), _group(values, "data").get("format")]
    found += [_group(values, "train").get("loss"), _group(environment, "options").get("client")]
    return {name for name in found if isinstance(name, str) and ":" in name}


def _services(values: Any) -> dict[str, dict]:
    """{kind: options} of a judge, and of an environment that another package makes."""
    environment, judge = _environment(values), _group(_group(_group(values, "reward"), "options"), JUDGE)
    found = {JUDGE: judge} if judge else {}
    if (factory := environment.get("factory")) in (OPENENV, VERIFIERS):
        found[factory] = _group(environment, "options")
    return found


def _consents(values: Any) -> list[str]:
    keys = (key.split(".") for key in CONSENTS)
    return [f"{group}.{name}" for group, name in keys if _group(values, group).get(name)]


def _identity(kind: str, options: dict[str, Any]) -> str:
    return f"{kind} {json.dumps(options, sort_keys=True, default=str)}"


def _file_of(module: str) -> str:
    """The file that an import of the module would run, found without importing its packages."""
    parts = module.split(".")
    for folder in dict.fromkeys([str(Path.cwd()), *sys.path]):
        place = os.path.join(folder, *parts)
        for file in (os.path.join(place, "__init__.py"), f"{place}.py"):
            if os.path.isfile(file):
                return file
    return f"the module {module!r:.200}, which is not on Python's path here"


def _environment(values: Any) -> dict:
    """The group `environment`, also from its short form."""
    short = values.get("environment") if isinstance(values, dict) else None
    return {"factory": short} if isinstance(short, str) else _group(values, "environment")


def _group(values: Any, name: str) -> dict:
    found = values.get(name) if isinstance(values, dict) else None
    return found if isinstance(found, dict) else {}


def _texts(values: Any) -> list[str]:
    return [one for one in values if isinstance(one, str)] if isinstance(values, list) else []
