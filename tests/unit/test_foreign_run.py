"""A run directory from elsewhere: reading it imports nothing that its config.json names and calls no address.

Commands on a run are started as a terminal would, in a directory with the module that the run names.
"""

import json
import shutil
import sys

import pytest

from kit.core import own_code
from kit.core.config.load import load_config, resolve
from kit.core.config.run_checks import check_run_directory
from kit.core.config.schema import EnvironmentConfig
from kit.core.errors import BadInput
from kit.core.own_code import FLAG, OwnCodeHeldBack
from kit.core.run_directory import RunDir, write_json
from kit.core.run_files import read_json
from kit.environments.load import load_environment
from tests.conftest import CONFIG, run_here
from tests.unit.merge_fixture import shared_folder, shared_run

MODULE = "planted_module"
SOURCE = """
open({marker!r}, "a").write("imported\\n")

def reward(completions, gold): return [1.0] * len(completions)
def prompt(row): return row["question"]
def loss(inputs, settings): return inputs.logps.sum()
def tool() -> str:
    "Nothing."
    return "nothing"
class Environment:
    def reset(self, **columns): return None
    def get_reward(self): return 1.0
"""
EVERYTHING = {
    "reward": {"functions": [f"{MODULE}:reward"], "options": {"llm_judge": {"url": "http://elsewhere"}}},
    "train": {"max_steps": 10, "loss": f"{MODULE}:loss"},
    "eval": {"reward": f"{MODULE}:reward", "formats": ["bf16"]},
    "environment": {"factory": f"{MODULE}:Environment", "tools": [f"{MODULE}:tool"]},
}


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """The file that an import of the module makes; the module is in the working directory."""
    marker = tmp_path / "imported.txt"
    (tmp_path / f"{MODULE}.py").write_text(SOURCE.format(marker=str(marker)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield marker
    sys.modules.pop(MODULE, None)


@pytest.fixture
def foreign(tmp_path, planted) -> RunDir:
    """A run whose config.json names the module wherever it can; with merged BF16 checkpoints and a metrics file."""
    from merge.__main__ import main

    whole = shared_folder() / "foreign-run"
    if not whole.exists():
        shutil.copytree(shared_run().path, whole)
        assert main(["--run", str(whole), "--format", "bf16", "--skip_verify"]) == 0
    run = RunDir(shutil.copytree(whole, tmp_path / "run"))
    name_in(run, **EVERYTHING, data={"format": f"{MODULE}:prompt"})
    (run.path / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward": 0.5, "kl": 0.1}) + "\n")
    return run


def name_in(run: RunDir, **groups: dict) -> None:
    """Set keys of a run's config.json."""
    values = read_json(run.config_file)
    for group, keys in groups.items():
        values["config"][group] = values["config"].get(group, {}) | keys
    write_json(run.config_file, values)


def name_only(run: RunDir, **groups: dict) -> None:
    """Make a run's config.json name these and no other code."""
    write_json(run.config_file, read_json(shared_run().config_file))
    (run.path / "rows.jsonl").write_text(json.dumps({"question": "q", "answer": "42", "tests": ["assert f() == 1"]}))
    name_in(run, train={"max_steps": 10}, data={"path": None, "eval_path": str(run.path / "rows.jsonl")})
    name_in(run, **groups)


@pytest.mark.parametrize(
    "words",
    [
        "launch.watch {run} --once",
        "launch.watch {run} --plot",
        "launch.watch {run} --html",
        "eval report --run {run}",
        "merge card --run {run}",
        "merge diagnose --run {run} --formats bf16 --layers q_proj --skip_control",
        "merge --run {run} --format fp8 --skip_verify",
    ],
)
def test_what_reads_a_run_without_its_code_does_so(foreign, planted, words):
    done = run_here(*words.format(run=foreign.path).split())
    assert done.code in (0, None), done.err
    assert not planted.exists()


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("eval --run {run} --formats bf16 --dry_run", "data.format"),
        ("merge --run {run} --format fp8 --dry_run", "data.format"),
        ("merge verify --run {run}", "data.format"),
    ],
)
def test_a_command_that_needs_the_code_names_it_and_the_flag_and_imports_it_with_the_flag(
    foreign, planted, words, key
):
    before = sorted(foreign.path.rglob("*"))
    done = run_here(*words.format(run=foreign.path).split())
    assert done.code == 2 and not planted.exists()
    assert f"{foreign.config_file} names {key} '{MODULE}:prompt'" in done.err
    assert str(planted.with_name(f"{MODULE}.py")) in done.err and FLAG in done.err
    assert sorted(foreign.path.rglob("*")) == before
    run_here(*words.format(run=foreign.path).split(), FLAG)
    assert planted.exists()


@pytest.mark.parametrize(
    ("groups", "key"),
    [
        ({"eval": {"reward": f"{MODULE}:reward"}}, "eval.reward"),
        ({"environment": {"factory": f"{MODULE}:Environment"}}, "environment.factory"),
        ({"environment": {"tools": [f"{MODULE}:tool"]}}, "environment.tools"),
        ({"environment": {"factory": "verifiers", "options": {"id": MODULE}}}, "environment.factory verifiers"),
        (
            {"environment": {"factory": "openenv", "options": {"url": "http://127.0.0.1:9", "token_env": "SECRET"}}},
            "environment.factory openenv ('http://127.0.0.1:9')",
        ),
        (
            {
                "eval": {"reward": "llm_judge"},
                "reward": {"options": {"llm_judge": {"url": "http://127.0.0.1:9/v1", "api_key_env": "SECRET"}}},
            },
            "eval.reward llm_judge ('http://127.0.0.1:9/v1')",
        ),
        (
            {"reward": {"allow_code_execution": True}, "data": {"answer_format": "mbpp", "answer_column": "tests"}},
            "sets reward.allow_code_execution",
        ),
        (
            {"environment": {"tools": ["python"], "allow_code_execution": True}, "eval": {"reward": "math"}},
            "sets environment.allow_code_execution",
        ),
    ],
)
def test_an_evaluation_uses_no_code_and_no_service_because_a_run_says_so(foreign, planted, groups, key):
    name_only(foreign, **groups)
    done = run_here("eval", "--run", foreign.path, "--formats", "bf16", "--dry_run")
    assert (done.code, planted.exists()) == (2, False), done.err
    assert key in done.err and FLAG in done.err and "Traceback" not in done.err


def test_what_the_user_names_is_imported_whatever_the_run_names(foreign, planted):
    name_only(foreign, eval={"reward": f"{MODULE}:prompt"})
    words = ["eval", "--run", foreign.path, "--formats", "bf16", "--dry_run"]
    assert run_here(*words).code == 2 and not planted.exists()
    run_here(*words, "--eval.reward", f"{MODULE}:reward")
    assert planted.exists()


def test_a_yaml_says_what_may_be_imported_and_a_run_of_the_same_name_adds_nothing(foreign, planted, tmp_path):
    other = f"{MODULE}:tool"
    name_only(foreign, environment={"tools": [other]})
    (tmp_path / "my.yaml").write_text(CONFIG.read_text() + f"\nenvironment: {{factory: '{MODULE}:Environment'}}\n")
    load_config(tmp_path / "my.yaml")
    config = resolve(foreign.config(), [], "a run")
    own_code.check(f"{MODULE}:Environment", "environment.factory")
    with pytest.raises(OwnCodeHeldBack, match=other):
        load_environment(config)
    assert not planted.exists()


def test_a_resume_imports_what_the_yaml_names_and_not_what_config_json_does(foreign, planted, tmp_path):
    yaml = tmp_path / "my.yaml"
    yaml.write_text(CONFIG.read_text())
    config = load_config(yaml, ["--run.output_dir", str(foreign.path)])
    (foreign.path / "checkpoints" / "step-000001").mkdir(parents=True)
    with pytest.raises(BadInput, match="was started with other settings"):
        check_run_directory(config, True, 1)
    assert not planted.exists()


def test_a_calibration_without_its_code_is_refused_and_not_made_on_fewer_prompts(foreign, planted):
    from merge.calibrated import calibration_set
    from tests.unit.merge_fixture import byte_tokenizer

    run = RunDir.open(foreign.path)
    with pytest.raises(OwnCodeHeldBack, match=r"data\.format"):
        calibration_set(run, byte_tokenizer(), 8, 64)
    assert not planted.exists()


def test_options_of_a_service_are_the_users_only_if_all_of_them_are(tmp_path):
    values = {"environment": {"factory": "openenv", "options": {"url": "http://theirs", "token_env": "SECRET"}}}
    own_code.hold_back(values, tmp_path / "config.json")
    resolve(
        values | {"run": {"name": "x"}, "model": {"id": "m"}, "train": {"max_steps": 1}},
        ["--environment.options.tool=go"],
        "a run",
    )
    options = values["environment"]["options"] | {"tool": "go"}
    own_code.trust({"environment": {"factory": "openenv", "options": {"url": "http://mine"}}})
    with pytest.raises(OwnCodeHeldBack, match="http://theirs"):
        own_code.check_service("openenv", options, "environment.factory")
    own_code.trust({"environment": {"factory": "openenv", "options": options}})
    own_code.check_service("openenv", options, "environment.factory")


@pytest.mark.parametrize(
    "values",
    [
        None,
        [],
        {"reward": None, "environment": [], "eval": 3, "data": {"format": ["x:y"]}, "train": {"loss": {}}},
        {"reward": {"functions": [None, ["a:b"], 1], "options": []}, "environment": {"tools": "a:b", "options": 1}},
    ],
)
def test_a_config_of_other_types_names_nothing_and_raises_nothing(values, tmp_path):
    own_code.hold_back(values, tmp_path / "config.json")
    own_code.check("a:b", "reward.functions")
    own_code.check("x:y", "data.format")


@pytest.mark.parametrize(
    "name", ["a\x00b:f", f"{'m' * 5000}:f", "../../etc/passwd:f", "\ud800:f", "\x1b[2J:f", ":", "..:f"]
)
def test_a_hostile_name_is_refused_in_one_readable_line(name, tmp_path):
    own_code.hold_back({"data": {"format": name}}, tmp_path / "config.json")
    with pytest.raises(OwnCodeHeldBack) as refused:
        own_code.check(name, "data.format")
    said = str(refused.value)
    assert FLAG in said and len(said) < 1000 + len(str(tmp_path)) and said.isprintable()


def test_the_kits_own_examples_need_no_flag(tmp_path):
    name = "recipes.environments.guess:GuessNumber"
    own_code.hold_back({"environment": {"factory": name}}, tmp_path / "config.json")
    own_code.check(name, "environment.factory")
    assert EnvironmentConfig(factory=name).is_given
