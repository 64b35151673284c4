"""The examples of kit/environments/README.md."""

import asyncio
import re

import pytest
import yaml

from kit.core.config import environment_rules
from kit.core.config.load import config_from_dict
from kit.core.config.schema import EnvironmentConfig
from kit.environments import openenv, verifiers
from kit.environments.load import ADAPTERS, load_environment
from kit.environments.options import checked_options
from tests.conftest import ROOT

PAGE = (ROOT / "kit/environments/README.md").read_text()
YAMLS = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)]
CELLS = [yaml.safe_load(text) for text in re.findall(r"\| `(environment: [^`]*)` ?[|,]", PAGE.replace("…", "x"))]
LEAST = {"run": {"name": "a"}, "model": {"id": "a"}, "data": {"path": "a.jsonl"}, "train": {"max_steps": 1}}


def config_of(groups):
    return config_from_dict(LEAST | groups)


@pytest.mark.parametrize("groups", [*YAMLS, *CELLS], ids=lambda groups: str(groups["environment"])[:40])
def test_every_configuration_is_one_that_a_run_takes(groups):
    config = config_of(groups)
    assert config.environment.is_given
    assert environment_rules.faults(config, None) == []
    if config.environment.factory in ADAPTERS:
        adapter = {"openenv": openenv.OpenEnvironment, "verifiers": verifiers.VerifiersEnvironment}
        assert checked_options(adapter[config.environment.factory], config.environment.options)


def test_the_class_plays_and_pays(tmp_path, monkeypatch):
    (tmp_path / "my_environment.py").write_text(re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    environment = load_environment(config_of(YAMLS[0]))
    assert (environment.name, environment.owns_reward, environment.takes_tools) == ("Shop", True, True)
    episode = environment.start({"prompt": [{"role": "user", "content": "Buy."}], "price": 3, "question": "Buy."})
    assert episode.prompt[-1]["content"] == "Buy. You have 20 coins."
    call = {"type": "function", "function": {"name": "buy", "arguments": {"number": 6}}}
    assert asyncio.run(episode.respond({"role": "assistant", "tool_calls": [call]}))[0]["content"] == "2 coins left"
    assert asyncio.run(episode.reward()) == 1.0


def test_the_tables_name_every_key_with_its_default():
    default = EnvironmentConfig()
    for key, value in vars(default).items():
        row = next(line for line in PAGE.splitlines() if line.startswith("|") and f"`{key}`" in line)
        shown = {"factory": "–", "options": "–"}.get(key, yaml.safe_dump(value).split("\n")[0].removesuffix(".0"))
        assert f"| {shown} |".replace("`", "") in row.replace("`", ""), key


@pytest.mark.parametrize("adapter", [openenv.OpenEnvironment])
def test_the_table_of_openenv_has_every_option(adapter):
    import inspect

    table = PAGE[PAGE.index("## OpenEnv") : PAGE.index("## verifiers")]
    for one in inspect.signature(adapter).parameters.values():
        if one.kind is one.KEYWORD_ONLY:
            default = {None: "null", one.empty: "–"}.get(one.default, one.default)
            assert re.search(rf"^\| `{one.name}` \| `?{default}`? \|", table, re.MULTILINE), one.name
