"""One calculator by TRL's contract, on an OpenEnv server and as a verifiers environment: runs of the recipe's command
line, the latter two by the interpreters of their side environments."""

import subprocess
import sys

import pytest

from kit.core.run_directory import RunDir
from kit.core.run_files import read_json
from tests import processes, sandbox

KEYS = {
    "environment.max_turns": 3,
    "rollout.max_prompt_length": 100,
    "rollout.max_completion_length": 64,
    "train.max_steps": 2,
    "watch.completions_every": 1,
    "reward.functions": "[tests.smoke.test_environment_adapters:called]",
    "reward.options": "{}",
}


def called(completions, **columns):
    """A reward that a model with little training earns: for results that it has read."""
    return [float(sum(message["role"] == "tool" for message in episode)) for episode in completions]


@pytest.fixture(scope="module")
def train(recipe_arguments, tools_model_dir, tmp_path_factory):
    """`train(python, name, {key: value})`: the directory of a run."""

    def run(python, name, keys):
        folder = tmp_path_factory.mktemp(name) / "run"
        done = processes.run(
            [python, "recipes/grpo_qlora.py", *recipe_arguments(tools_model_dir, folder, KEYS | keys)]
        )
        assert done.returncode == 0, done.stderr
        return RunDir(folder)

    return run


@pytest.fixture(scope="module")
def plain(train):
    return train(sys.executable, "trl", {"environment.factory": "recipes.environments.calculator:Calculator"})


def assert_same(run, other, read_jsonl):
    """Both runs sampled, were answered, earned and learned the same."""
    for step in (1, 2):
        rows, others = (read_jsonl(one.completions / f"step-{step:06d}.jsonl") for one in (run, other))
        for key in ("messages", "advantage", "end"):
            assert [row[key] for row in rows] == [row[key] for row in others]
        assert any(row["advantage"] for row in rows), "something was learned"
    adapters = [(one.adapter_dir(2) / "adapter_model.safetensors").read_bytes() for one in (run, other)]
    assert adapters[0] == adapters[1]


def test_an_openenv_server_teaches_what_the_class_teaches(train, plain, read_jsonl):
    python, port = sandbox.side_environment("openenv") / "bin/python", processes.free_port()
    keys = {"environment.factory": "openenv"}
    keys["environment.options"] = f"{{url: 'http://127.0.0.1:{port}', tool: calculate}}"
    # As many sessions as a step has completions.
    command = [python, "-m", "tests.unit.openenv_servers", "arithmetic", str(port), "16"]
    with subprocess.Popen(command, cwd=sandbox.ROOT) as server:
        try:
            processes.wait_until(lambda: processes.listens(port), server)
            run = train(python, "openenv", keys)
        finally:
            server.kill()
    assert_same(run, plain, read_jsonl)


def test_an_environment_of_verifiers_teaches_what_the_class_teaches(train, plain, read_jsonl):
    python = sandbox.side_environment("verifiers") / "bin/python"
    keys = {"environment.factory": "verifiers"}
    keys["environment.options"] = "{id: tests.unit.verifiers-environments, args: {kind: calculator}}"
    run = train(python, "verifiers", keys)
    assert_same(run, plain, read_jsonl)
    sources = read_json(run.config_file)["own_environment"]
    assert sources.keys() == {"tests.unit.verifiers_environments:load_environment"}
