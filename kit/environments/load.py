"""The environment that a configuration names, checked: no weight is loaded yet."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from kit.core import own_code
from kit.core.config.schema import Config, EnvironmentConfig
from kit.core.errors import BadInput
from kit.environments.episode import Environment
from kit.environments.options import checked_options
from kit.environments.tools import Tool
from kit.environments.trl_contract import TrlEnvironment
from reward import is_own
from reward.own import imported, source_hash

PYTHON = "python"  # the built-in tool
# Environments of other packages, by the name that `environment.factory` has for them.
ADAPTERS = {
    "openenv": "kit.environments.openenv:OpenEnvironment",
    "verifiers": "kit.environments.verifiers:VerifiersEnvironment",
}


def load_environment(config: Config) -> Environment | None:
    """The run's environment; None without the group `environment`. Raises `BadInput` for what cannot be one."""
    given = config.environment
    if not given.is_given:
        return None
    if given.factory in ADAPTERS:
        own_code.check_service(given.factory, given.options, "environment.factory")
        adapter = imported(ADAPTERS[given.factory], "environment.factory")
        environment: Environment = adapter(given, **checked_options(adapter, given.options))
    else:
        environment = TrlEnvironment(_factories(given.factory, given.options), _tools(config), given)
    if not (config.reward.functions or environment.owns_reward):
        raise BadInput(
            f"reward.functions is empty and {environment.name} has no reward of its own (get_reward, or a rubric): "
            "there is nothing to learn from. Name a reward function, or give the environment a reward."
        )
    return environment


def _tools(config: Config) -> list[Tool]:
    tools = [_tool(name, config) for name in config.environment.tools]
    names = [tool.__name__ for tool in tools]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise BadInput(f"environment.tools has several tools named {twice[0]!r}: the model calls them by name.")
    return tools


def _tool(name: str, config: Config) -> Tool:
    if name != PYTHON:
        return imported(name, "environment.tools", may_be_async=True)
    if not config.environment.allow_code_execution:
        raise BadInput(
            "environment.tools names python, which runs code that the model wrote. Set "
            "environment.allow_code_execution to true to let it, after reading in reward/README.md what the sandbox "
            "protects against."
        )
    own_code.check_consent("environment.allow_code_execution")
    from kit.environments.python_tool import python_tool

    return python_tool(config.environment.tool_timeout_s, config.environment.isolation)


def _factories(name: str | None, options: dict[str, Any]) -> dict[str | None, Callable[[], Any]]:
    """TRL's factories by the name that a row of the data selects; a single one has the name None."""
    if name is None:
        return {}
    found = imported(name, "environment.factory", kinds=(Mapping,))
    if not isinstance(found, Mapping):
        return {None: partial(found, **checked_options(found, options))}
    if options:
        raise BadInput(f"environment.options are for one factory, and {name} has {len(found)}. Leave them out.")
    if wrong := [key for key, factory in found.items() if not callable(factory)]:
        raise BadInput(f"environment.factory {name}: {wrong[0]!r} is no factory but {found[wrong[0]]!r:.60}.")
    return dict(found)


def _own_code(given: EnvironmentConfig) -> str:
    """Name the user's code in an environment: its factory, or what the options of an adapter name; "" if none."""
    if given.factory == "verifiers":
        from kit.environments.verifiers import module_of

        return f"{module_of(given.options['id'])}:load_environment"
    return (given.options.get("client") if given.factory == "openenv" else given.factory) or ""


def source_hashes(config: Config) -> dict[str, str]:
    """`source_hash` of the environment's factory, or of each if there are several, and of the tools, by name."""
    found: dict[str, str] = {}
    named = [("environment.factory", _own_code(config.environment))]
    for key, name in [*named, *(("environment.tools", tool) for tool in config.environment.tools)]:
        if is_own(name):
            function = imported(name, key, may_be_async=True, kinds=(Mapping,))
            functions = function if isinstance(function, Mapping) else {"": function}
            found |= {f"{name} {which}".rstrip(): source_hash(one) for which, one in functions.items()}
    return found
