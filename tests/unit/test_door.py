"""`kit`: one name for the commands. What it starts, what it refuses, what it lists and completes."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kit import __main__ as door
from kit.commands import COMMANDS, CONFIGS, OWN, SUBCOMMANDS, config_names, environment, module_arguments
from kit.core.as_typed import VARIABLE, AsTyped
from kit.core.config.load import choices_of, leaves, load_config
from kit.core.errors import BadInput
from launch import train
from launch.slurm import __main__ as slurm
from launch.starting import trainer_command
from launch.vllm_command import Installed
from recipes import catalogue
from tests import processes
from tests.conftest import ROOT
from tests.unit.command_lines import launch_arguments
from tests.unit.test_late_imports import FURTHER
from tests.unit.test_late_imports import commands as typed_commands

TINY, TWO = "grpo-tiny-nf4-cpu", "grpo-qwen3_8b-nf4-fp8-gsm8k-2gpu"


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def started(monkeypatch):
    """What `os.execve` was called with, instead of calling it."""
    found = []
    monkeypatch.setattr(os, "execve", lambda *arguments: found.append(arguments))
    return found


def kit(*words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    return processes.run([sys.executable, "-m", "kit", *words], cwd=cwd, env=os.environ | {"PYTHONPATH": str(ROOT)})


@pytest.mark.parametrize(
    ("words", "becomes"),
    [
        ("merge --run runs/tiny --format fp8", "merge --run runs/tiny --format fp8"),
        ("merge base --config x.yaml", "merge base --config x.yaml"),
        ("gate --run runs/tiny", "eval gate --run runs/tiny"),
        (f"plan {TINY} --gpu h200:2", f"launch.plan --config recipes/configs/{TINY}.yaml --gpu h200:2"),
        ("up README.md --resume", "launch.up --config README.md --resume"),
        (f"serve stop {TINY}", f"launch.server stop --config recipes/configs/{TINY}.yaml"),
        (f"serve {TINY} --detach", f"launch.server --config recipes/configs/{TINY}.yaml --detach"),
        ("train --config x.yaml --train.beta 0", "launch.train --config x.yaml --train.beta 0"),
        ("watch runs/tiny", "launch.watch runs/tiny"),
        ("doctor", "launch.doctor"),
    ],
)
def test_a_command_becomes_its_module_with_the_arguments_as_they_are(started, words, becomes):
    door.main(words.split())
    ((program, arguments, variables),) = started
    assert (program, arguments) == (sys.executable, [sys.executable, "-m", *becomes.split()])
    assert variables["PYTHONPATH"].split(os.pathsep)[0] == str(ROOT)


def test_every_module_that_a_user_types_has_a_command_or_a_reason():
    # Started by `kit python`, or by make: seldom typed, or shown by another command's help.
    others = {
        "recipes.real",
        "recipes.tiny_tools",
        "recipes.verifiers_rows",
        "recipes.catalogue",
        "reward.bench",
        "kit",
    }
    others |= {"recipes.grpo_qlora", "recipes.grpo_qat", "recipes.distill_qat", "recipes.sft_qlora"}  # kit train
    others |= {"eval.qat_study", "eval.serving", "reward.make"}
    typed = {words[0] for words in typed_commands()}
    assert {command.words[0] for command in COMMANDS.values()} <= typed
    assert typed - {command.words[0] for command in COMMANDS.values()} - others == set()


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("trian my.yaml", "unknown command trian. Did you mean train?"),
        ("zzz", "unknown command zzz. `kit --help` lists them."),
        ("plan grpo-tiny-nf4-cpv", "Did you mean grpo-tiny-nf4-cpu?"),
        ("train my.yaml", f"my.yaml is neither a file (seen from {ROOT}) nor the name of a configuration."),
    ],
)
def test_a_typo_is_refused_with_a_hint(words, hint):
    with pytest.raises(BadInput, match=re.escape(hint)):
        door.main(words.split())


def test_help_has_a_line_for_every_command(capsys):
    assert door.main([]) == 0
    said = capsys.readouterr().out
    assert [name for name in [*COMMANDS, *OWN] if not re.search(rf"^  {name}  ", said, re.M)] == []
    assert max(map(len, said.splitlines())) <= 110


def test_a_file_of_the_user_hides_no_module_of_the_kit_and_can_be_imported(tmp_path):
    (tmp_path / "reward.py").write_text("raise SystemExit('the user's')".replace("'s", ""))
    (tmp_path / "my_rewards.py").write_text("print('mine')")
    done = kit("python", "-c", "import reward.pool, my_rewards, math; math.sqrt(4)", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "mine\n"), done.stderr
    assert kit("reward", "--help", cwd=tmp_path).returncode == 0


def test_python_finds_no_module_in_a_working_directory_that_is_a_run(tmp_path):
    for name in ("numpy.py", "sitecustomize.py", "planted.py"):
        (tmp_path / name).write_text(f"open({str(tmp_path / 'ran.txt')!r}, 'w')")
    (tmp_path / "metrics.jsonl").touch()
    done = kit("python", "-c", "import importlib.util as u, numpy; print(u.find_spec('planted'))", cwd=tmp_path)
    assert (done.stdout, (tmp_path / "ran.txt").exists()) == ("None\n", False), done.stderr


def test_the_exit_code_is_that_of_the_module(tmp_path):
    done = kit("merge", "--run", str(tmp_path / "none"), "--format", "fp8")
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_the_table_of_both_pages_is_what_ls_shows():
    shown = {one.name: (one.hardware, one.measured) for one in catalogue.entries()}
    assert set(shown) == set(config_names())
    for page in ("README.md", "recipes/README.md"):
        listed = {}
        for line in (ROOT / page).read_text().splitlines():
            cells = [cell.strip() for cell in line.split("|")[1:-1]]
            found = (
                re.search(r"(?:configs/([\w.-]+)\.yaml\)|, `((?:grpo|sft|distill)-[\w.-]+)`)$", cells[0])
                if len(cells) == 3
                else None
            )
            if found:
                measured = re.sub(r" (\[\d\]|\(\[\w+\]\([^)]*\)\))$", "", cells[2])
                listed[found[1] or found[2]] = (cells[1], measured)
        assert len(listed) > 8
        assert listed == {name: shown[name] for name in listed}, page
    assert set(listed) == set(shown), "recipes/README.md lists them all"


def test_ls_finds_by_words_and_prints_for_people_and_programs(capsys):
    assert catalogue.main(["ls", "TINY", "grpo_qat"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.split("\t")[:3] == ["grpo-tiny-qat-nvfp4-cpu", "grpo_qat.py", "2 CPU cores"]
    assert catalogue.main(["ls", "--json", TINY]) == 0
    assert json.loads(capsys.readouterr().out)["measured"].startswith("reward .49")
    with pytest.raises(BadInput, match=r"no configuration has tinny in its row. Did you mean tiny\?"):
        catalogue.main(["ls", "tinny"])


def test_every_configuration_states_its_hardware_and_what_was_measured(tmp_path):
    assert [one.name for one in catalogue.entries() if catalogue.UNSTATED in one] == []
    (tmp_path / "x.yaml").write_text((CONFIGS / f"{TINY}.yaml").read_text().replace("# Measured:", "#"))
    assert catalogue.read_entry(tmp_path / "x.yaml")[2:] == ("2 CPU cores", "not stated")


def test_cp_copies_and_never_overwrites(tmp_path, capsys):
    mine = tmp_path / "my.yaml"
    assert catalogue.main(["cp", TINY, str(mine)]) == 0
    assert mine.read_text() == (CONFIGS / f"{TINY}.yaml").read_text()
    assert "kit train" in capsys.readouterr().out
    mine.write_text("changed")
    with pytest.raises(BadInput, match=f"{mine} exists already"):
        catalogue.main(["cp", TINY, str(mine)])
    assert mine.read_text() == "changed"
    assert catalogue.main(["cp", TINY, str(tmp_path)]) == 0 and (tmp_path / f"{TINY}.yaml").is_file()
    with pytest.raises(BadInput, match="no directory"):
        catalogue.main(["cp", TINY, str(tmp_path / "none/my.yaml")])


@pytest.mark.parametrize(
    ("gpus", "overrides", "launcher", "file", "count"),
    [
        ([], [], None, "cpu", 1),
        (["0"], [], None, "one_gpu", 1),
        (["0", "1"], [], None, "ddp", 2),
        (["0", "1"], [], "zero2", "zero2", 2),
        (["0", "1"], [], "accelerate_configs/fsdp2.yaml", "fsdp2", 2),
        (["0", "1"], ["--train.gpus=[1]"], None, "one_gpu", 1),
        (["0", "1"], [], "cpu", "cpu", 1),
    ],
)
def test_train_chooses_the_accelerate_configuration_or_takes_the_named_one(
    monkeypatch, gpus, overrides, launcher, file, count
):
    monkeypatch.setattr(trainer_command, "visible_gpus", lambda: gpus)
    words = ["--model.dtype", "bfloat16", *overrides]
    found = train.prepare(str(CONFIGS / f"{TINY}.yaml"), words, launcher, ["--resume"])
    parsed = launch_arguments(found.words[3:])
    assert not isinstance(parsed, str), parsed
    assert (Path(parsed.config_file), parsed.num_processes) == (ROOT / f"accelerate_configs/{file}.yaml", count)
    assert parsed.training_script == "recipes/grpo_qlora.py" and parsed.quiet
    assert parsed.training_script_args[-1] == "--resume"


def test_replicas_on_this_machine_keep_their_gpus_and_others_take_none(monkeypatch):
    monkeypatch.setattr(trainer_command, "visible_gpus", lambda: ["0", "1", "2"])
    monkeypatch.setattr(train, "installed_vllm", lambda: Installed("0.31.0", is_cpu=False))
    words = ["--model.dtype=bfloat16", "--rollout.backend=server"]
    config = str(CONFIGS / f"{TINY}.yaml")
    assert train.prepare(config, words).environment["CUDA_VISIBLE_DEVICES"] == "1,2"
    away = [*words, "--rollout.server_urls=['http://10.0.0.9:8000']"]
    assert train.prepare(config, away).environment["CUDA_VISIBLE_DEVICES"] == "0,1,2"


def test_a_dry_run_for_gpus_of_another_machine_starts_its_number_of_processes(monkeypatch):
    monkeypatch.setattr(trainer_command, "visible_gpus", lambda: [])
    found = train.prepare(str(CONFIGS / f"{TWO}.yaml"), [], None, ["--dry_run"])
    assert found.words[1:6] == ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    assert found.words.count("--dry_run") == 1 and found.environment["ACCELERATE_USE_CPU"] == "true"


def test_an_unknown_launcher_and_an_unknown_flag_are_refused():
    with pytest.raises(BadInput, match=r"--launcher: no YAML file at zero9 .* Name a file of accelerate_configs"):
        train.prepare(str(CONFIGS / f"{TINY}.yaml"), [], "zero9")
    with pytest.raises(BadInput, match=r"unknown argument --launchr. Did you mean --launcher\?"):
        train.prepare(str(CONFIGS / f"{TINY}.yaml"), ["--launchr", "cpu"])


@pytest.fixture(scope="module")
def completion(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("completion") / "kit"
    done = kit("completion", "bash")
    assert done.returncode == 0, done.stderr
    file.write_text(done.stdout)
    return file


def completed(script: Path, *words: str) -> list[str]:
    """What TAB offers after the last of `words`."""
    program = f'source {script}; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _kit; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = processes.run(["bash", "-c", program, "bash", "kit", *words])
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")
def test_tab_offers_commands_configurations_options_keys_and_choices(completion):
    assert completed(completion, "tr") == ["train"]
    assert completed(completion, "train", "grpo-tiny-n") == [TINY]
    assert completed(completion, "cp", "grpo-tiny-n") == [TINY]
    assert completed(completion, "plan", "--config", "grpo-tiny-n") == [TINY]
    assert completed(completion, "merge", "--run", "x", "--compare") == ["--compare_bases"]
    assert completed(completion, "train", "x.yaml", "--train.learn") == ["--train.learning_rate"]
    assert completed(completion, "up", "x.yaml", "--rollout.backend", "") == ["in_process", "server"]
    assert completed(completion, "eval", "") == list(SUBCOMMANDS["eval"])
    assert completed(completion, "completion", "z") == ["zsh"]
    assert completed(completion, "watch", "runs") == []  # files, by readline
    assert set(completed(completion, "doctor", "--")) >= {f"--{key}" for key in leaves()}


def test_subcommands_are_those_of_the_modules():
    words = {command.words[0]: SUBCOMMANDS.get(name, ()) for name, command in reversed(COMMANDS.items())}
    assert [f"{module} {word}" for module, known in FURTHER.items() for word in {*known} - {*words[module]}] == []
    for name, words in SUBCOMMANDS.items():
        if name in COMMANDS:
            said = kit(name, "--help").stdout
            assert [word for word in words if word not in said] == [], name


def test_every_key_with_a_set_of_values_offers_them(completion):
    text = completion.read_text()
    for key, (hint, item) in leaves().items():
        if values := choices_of(hint, item):
            line = re.search(rf"--{re.escape(key)}\) words='?([^']*)'? ;;", text)
            assert line and line[1].split() == list(map(str, values)), key


def test_the_environment_keeps_what_the_user_put_on_the_path(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/a:/b")
    assert environment()["PYTHONPATH"].split(":") == [str(ROOT), "/a", "/b"]  # ROOT is the working directory
    monkeypatch.chdir("/")
    assert environment()["PYTHONPATH"].split(":") == [str(ROOT), "/a", "/b", "/"]


def test_a_name_of_ls_is_a_configuration_that_loads():
    (*_, path) = module_arguments(COMMANDS["plan"], [TINY])
    assert load_config(path).run.name == "tiny"


@pytest.mark.parametrize(
    ("said", "typed"),
    [
        ("python -m merge --run runs/a --format bf16", "kit merge --run runs/a --format bf16"),
        ("Make it: python -m eval gate --run a, `python -m eval report`", "Make it: kit gate --run a, `kit report`"),
        ("usage: python -m launch.server [start | stop]", "usage: kit serve [start | stop]"),
        ("python -m launch.plan\npython -m  eval.serving", "kit plan\nkit python -m eval.serving"),
        ("python -m merge diagnose, python -m launch.planner", "kit merge diagnose, kit python -m launch.planner"),
        ("/usr/bin/python -m merge", "/usr/bin/python -m merge"),
        ("python -m pip install x; kit python -m merge", "python -m pip install x; kit python -m merge"),
        ("python -m evaluate", "python -m evaluate"),
    ],
)
def test_messages_name_the_commands_that_the_user_types(said, typed):
    stream = io.StringIO()
    assert AsTyped(stream, json.loads(environment()[VARIABLE])).write(said) == len(said)
    assert stream.getvalue() == typed


def test_a_slurm_job_on_the_standard_output_needs_no_kit(monkeypatch):
    written = io.StringIO()
    monkeypatch.setattr(sys, "stdout", AsTyped(written, json.loads(environment()[VARIABLE])))
    monkeypatch.setattr(sys, "argv", ["launch.slurm", "--config", str(CONFIGS / f"{TINY}.yaml"), "--nodes", "1"])
    assert slurm.main() == 0
    assert "python -m " in written.getvalue() and "kit " not in written.getvalue()


def test_what_kit_starts_says_kit_and_python_says_python():
    done = kit("gate")
    assert done.returncode == 2 and "kit gate: error:" in done.stderr and "python -m" not in done.stderr
    alone = {name: value for name, value in os.environ.items() if name != VARIABLE}
    done = processes.run([sys.executable, "-m", "eval", "gate"], cwd=ROOT, env=alone | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 2 and "python -m eval gate: error:" in done.stderr
