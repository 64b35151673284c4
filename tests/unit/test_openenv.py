"""The adapter for OpenEnv, beside the package (openenv_cases.py, in .venv-openenv) and without it."""

import pytest

from kit.core.config.schema import EnvironmentConfig
from kit.core.errors import BadInput
from kit.environments.openenv import OpenEnvironment
from tests import sandbox, side_cases

CASES = sandbox.ROOT / "tests/unit/openenv_cases.py"


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return side_cases.results("openenv", CASES, tmp_path_factory.mktemp("openenv"))


@pytest.mark.parametrize("name", side_cases.cases(CASES))
def test_with_the_package(results, name):
    assert results[name] == ""


def test_without_the_package_the_message_says_how_to_get_it():
    with pytest.raises(
        BadInput, match=r"needs the package openenv 0\.10\.0 .*`make openenv`.*\.venv-openenv/bin/python"
    ):
        OpenEnvironment(EnvironmentConfig(), url="http://127.0.0.1:9")
