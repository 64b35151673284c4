"""The configuration: what is refused, in which words, and what wins over what. No weights, no torch."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from kit.core.config.load import config_from_dict, load_config, parse_command, to_dict
from kit.core.errors import BadInput

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "recipes" / "configs" / "grpo-tiny-nf4-cpu.yaml"


def refusal(*overrides: str) -> str:
    with pytest.raises(BadInput) as caught:
        load_config(CONFIG, list(overrides))
    return str(caught.value)


def yaml_file(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text)
    return path


SMALLEST = "run: {name: x}\nmodel: {id: m}\ntrain: {max_steps: 1}\n"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--train.learning_rat", "1"], "unknown key train.learning_rat. Did you mean train.learning_rate?"),
        (["--train.lora_rank", "8"], "unknown key train.lora_rank. Did you mean policy.lora_rank?"),
        (["--trian.beta", "0"], "unknown key trian. Did you mean train?"),
        (["--train.zzz", "0"], "unknown key train.zzz. Valid keys: max_steps, learning_rate,"),
        (["--eval.gate.min_gian", "0"], "unknown key eval.gate.min_gian. Did you mean eval.gate.min_gain?"),
        (["--train.max_steps", "many"], "train.max_steps must be an integer, it is 'many' (str)."),
        (["--train.max_steps", "1.5"], "train.max_steps must be an integer, it is 1.5 (float)."),
        (["--train.max_steps", "true"], "train.max_steps must be an integer, it is True (bool)."),
        (["--train.beta", "true"], "train.beta must be a number, it is True (bool)."),
        (["--train.mask_truncated", "1"], "train.mask_truncated must be true or false, it is 1 (int)."),
        (["--reward.functions", "math"], "reward.functions must be a list of text, it is 'math' (str)."),
        (["--reward.weights", "[1, x]"], "reward.weights must be a list of a number or null"),
        (
            ["--train.loss_type", "ppo"],
            "train.loss_type must be one of dr_grpo, dapo, grpo, gspo, cispo, sapo, it is 'ppo' (str).",
        ),
        (["--policy.quantization", "fp4"], "policy.quantization must be one of nf4, fp8, none, it is 'fp4' (str)."),
        (["--model", "x"], "unknown argument --model. Keys are given as --group.key value."),
        (["--run.name.first", "x"], "--run.name.first: name is not a group of keys."),
        (["--train.beta"], "--train.beta needs a value."),
        (["train.beta", "1"], "unknown argument train.beta."),
        # of a command that takes overrides and is not started with --config, --dry_run or --resume
        (["--resume"], "unknown argument --resume. Keys are given as --group.key value."),
        (["--policy.quant_cgf", "fp8"], ".yaml and the command line: unknown key policy.quant_cgf."),
    ],
)
def test_a_wrong_key_type_or_choice_is_refused_in_these_words(overrides, message):
    assert message in refusal(*overrides)


def test_all_faults_are_reported_at_once():
    found = refusal("--train.lr", "1", "--train.max_steps", "x", "--model.dtype", "int8", "--data.pth", "x")
    for key in ("train.lr", "train.max_steps", "model.dtype", "data.pth"):
        assert key in found
    assert len(found.splitlines()) == 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--res"], "unknown argument --res."),
        (["--dry"], "unknown argument --dry"),
        (["--train.lo", "grpo"], "unknown key train.lo"),
        (["--lo", "grpo"], "unknown argument --lo"),
        (["--dry-run"], "--dry-run. Did you mean --dry_run"),
    ],
)
def test_an_abbreviated_flag_or_key_is_refused(words, message):
    with pytest.raises(BadInput) as caught:
        parse_command("x", ["--config", str(CONFIG), *words])
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("module", "typed", "hint"),
    [
        ("launch.server", "--detatch", " Did you mean --detach?"),
        ("launch.slurm.__main__", "--nodse=2", " Did you mean --nodes?"),
        ("recipes.study", "--servin", " Did you mean --serving?"),
        ("recipes.study", "--resme", " Keys are given as --group.key value."),  # a recipe's flag that it does not have
    ],
)
def test_a_misspelled_flag_is_hinted_at_by_those_of_its_command(monkeypatch, module, typed, hint):
    monkeypatch.setattr("sys.argv", [module, "--config", str(CONFIG), typed])
    with pytest.raises(BadInput) as caught:
        importlib.import_module(module).main()
    assert str(caught.value) == f"unknown argument {typed}.{hint}"


@pytest.mark.parametrize("text", ["1e-4", "1.0e-4", "0.0001"])
def test_a_number_that_yaml_reads_as_text_is_a_number(tmp_path, text):
    path = yaml_file(tmp_path, SMALLEST.replace("max_steps: 1", f"max_steps: 1, learning_rate: {text}"))
    assert load_config(path).train.learning_rate == 1e-4
    assert load_config(CONFIG, ["--train.learning_rate", text]).train.learning_rate == 1e-4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run: [1", "is not YAML"),
        ("just text", "must hold the groups run, model"),
        ("", "must hold the groups run, model"),
        ("- run", "must hold the groups run, model"),
        (SMALLEST + "policy: {lora_rank: 8}\npolicy: {lora_alpha: 8}\n", "duplicate key policy"),
        (SMALLEST + "policy:\n  lora_rank: 8\n  lora_rank: 16\n", "duplicate key lora_rank"),
        (SMALLEST + "policy: 16\n", "policy must be a group of keys, it is 16"),
        (SMALLEST + "policy: false\n", "policy must be a group of keys, it is False"),
        (SMALLEST + "policy: []\n", "policy must be a group of keys, it is []"),
        (
            SMALLEST + "policy: {lora_rnk: 8}\n",
            "run.yaml: unknown key policy.lora_rnk. Did you mean",
        ),
        ("run: {seed: 1}\n", "run.name is missing: name of the run"),
        ("run: {seed: 1}\n", "model.id is missing"),
        ("run: {seed: 1}\n", "train.max_steps is missing"),
    ],
)
def test_a_file_that_is_not_a_configuration_is_refused(tmp_path, text, message):
    with pytest.raises(BadInput) as caught:
        load_config(yaml_file(tmp_path, text))
    assert message in str(caught.value)


def test_bytes_that_are_not_text_and_a_missing_file_are_refused(tmp_path):
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(BadInput, match="is not UTF-8: invalid start byte at byte 0"):
        load_config(tmp_path / "binary.yaml")
    with pytest.raises(BadInput, match="no config file at"):
        load_config(tmp_path / "absent.yaml")
    with pytest.raises(BadInput, match="cannot be read as a config file: it is a directory"):
        load_config(tmp_path)


def test_the_command_line_wins_over_the_yaml_and_the_yaml_over_the_default(tmp_path):
    path = yaml_file(tmp_path, SMALLEST + "watch:\n")
    assert load_config(path).train.beta == 0.01 and load_config(path).watch.completions_every == 10
    assert load_config(path, ["--watch.completions_every", "5"]).watch.completions_every == 5  # in an empty group
    path.write_text(SMALLEST.replace("max_steps: 1", "max_steps: 1, beta: 0.5"))
    assert load_config(path).train.beta == 0.5
    assert load_config(path, ["--train.beta", "0.7"]).train.beta == 0.7
    assert load_config(path, ["--train.beta=0.7", "--train.beta", "0.9"]).train.beta == 0.9


@pytest.mark.parametrize(
    ("key", "typed", "value"),
    [
        ("run.name", "007", "007"),
        ("data.system_prompt", "Note: think first", "Note: think first"),
        ("data.system_prompt", "null", None),
        ("model.revision", "20260101", "20260101"),
        ("data.prompt_suffix", "[brackets", "[brackets"),
        ("policy.target_modules", "[q_proj, v_proj]", ["q_proj", "v_proj"]),
        ("policy.target_modules", "all-linear", "all-linear"),
        ("reward.weights", "[1, 0.5]", [1.0, 0.5]),
        ("train.trl", "{cast_lm_head_to_fp32: true}", {"cast_lm_head_to_fp32": True}),
        ("rollout.top_p", "1", 1.0),
    ],
)
def test_a_value_of_the_command_line_is_what_was_typed(key, typed, value):
    found = to_dict(load_config(CONFIG, [f"--{key}", typed]))
    for part in key.split("."):
        found = found[part]
    assert (found, type(found)) == (value, type(value))


def test_a_run_directory_in_the_home_directory_is_not_one_named_tilde(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    config = load_config(yaml_file(tmp_path, SMALLEST), ["--run.output_dir", "~/runs/x"])
    assert config.run.directory == tmp_path / "runs" / "x"


def test_a_resolved_configuration_loads_as_itself():
    config = load_config(CONFIG, ["--reward.weights", "[2]", "--eval.gate.format", "bf16"])
    assert config_from_dict(to_dict(config)) == config


def test_a_default_list_is_not_shared_between_configurations():
    first, second = load_config(CONFIG), load_config(CONFIG)
    first.watch.report_to.append("wandb")
    first.train.trl["x"] = 1
    assert second.watch.report_to == [] and second.train.trl == {}


def test_help_lists_every_key_with_its_default(capsys):
    with pytest.raises(SystemExit) as ended:
        parse_command("x", ["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "train.max_steps (required): optimizer steps" in text
    assert "another model by id or path, stored as policy.quantization says" in text
    assert "train.beta (default 0.01)" in text and "eval.gate.min_parse_rate (default 0.9)" in text


def test_the_configuration_is_read_and_checked_without_torch():
    code = (
        "import sys; from kit.core.config.load import load_config; from kit.core.config.checks import *\n"
        f"config = load_config({str(CONFIG)!r}); check_config(config, 1)\n"
        "loaded = {'torch', 'transformers', 'trl'} & set(sys.modules); sys.exit(str(loaded) if loaded else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
