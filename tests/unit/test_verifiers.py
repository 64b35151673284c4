"""The adapter for verifiers, beside the package (verifiers_cases.py, in .venv-verifiers) and without it."""

import pytest

from kit.core.config.schema import EnvironmentConfig
from kit.core.errors import BadInput
from kit.environments.verifiers import VerifiersEnvironment
from tests import sandbox, side_cases

CASES = sandbox.ROOT / "tests/unit/verifiers_cases.py"


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return side_cases.results("verifiers", CASES, tmp_path_factory.mktemp("verifiers"))


@pytest.mark.parametrize("name", side_cases.cases(CASES))
def test_with_the_package(results, name):
    assert results[name] == ""


def test_without_the_package_the_message_says_how_to_get_it():
    with pytest.raises(BadInput, match=r"package verifiers 0\.3\.1 .*`make verifiers`.*\.venv-verifiers/bin/python"):
        VerifiersEnvironment(EnvironmentConfig(), id="my-env")
