"""Every shipped recipe configuration loads strictly, passes the checks, and has a launch line that starts it."""

import os
from pathlib import Path

import pytest

from kit.core.config.checks import check_config
from kit.core.config.load import load_config
from kit.core.config.schema import Config
from kit.core.errors import BadInput, KitError
from launch.vllm_command import Installed, plans
from reward import reward_functions
from tests.unit.command_lines import ROOT, Command, in_comments, launch_arguments, problem, program
from tests.unit.test_accelerate_configs import announces

FOLDER = ROOT / "recipes/configs"
CONFIGS = sorted(path for path in FOLDER.rglob("*") if path.is_file())


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_recipe_whose_figures_are_of_boxes_pays_boxes_only(path):
    reward = load_config(path).reward
    assert "math" not in reward.functions or reward.options["math"]["form"] == "boxed"


def launches(path: Path) -> list[Command]:
    return [command for command in in_comments(path) if program(list(command.words)) == "accelerate"]


def server_complaints(path: Path, config: Config) -> list[str]:
    """Why the servers that the rollouts ask for would not start, on a machine of eight GPUs."""
    if config.rollout.backend != "server":
        return []
    found = []
    for start in (("python", "-m", "merge", "base"), ("python", "-m", "launch.server")):
        lines = [command for command in in_comments(path) if command.words[: len(start)] == start]
        if not lines:
            found.append(f"rollouts come from a server, and the header has no `{' '.join(start)}` line")
        for command in lines:
            if Path(command.words[command.words.index("--config") + 1]).name != path.name:
                found.append(f"{command.where} reads another configuration")
    try:
        plans(config, Installed("0.31.0", is_cpu=False), [str(gpu) for gpu in range(8)])
    except KitError as error:
        found.append(str(error))
    return found


def complaints(path: Path) -> list[str]:
    """Everything that is wrong with a configuration file, its header included."""
    try:
        config = load_config(path)
    except KitError as error:
        return [str(error)]
    found = [text for text in map(problem, in_comments(path)) if text]
    if not launches(path):
        return [*found, "the header has no `accelerate launch` line"]
    if found:
        return found
    for command in launches(path):
        arguments = launch_arguments(list(command.words[2:]))
        started = arguments.training_script_args
        if Path(started[started.index("--config") + 1]).name != path.name:
            found.append(f"{command.where} starts another configuration")
        try:
            with pytest.MonkeyPatch.context() as patch:
                if arguments.use_deepspeed or arguments.use_fsdp:
                    for name, value in announces(Path(arguments.config_file)).items():
                        patch.setenv(name, value)
                check_config(config, arguments.num_processes)
            reward_functions(config.reward, may_be_empty=config.environment.is_given)
        except KitError as error:
            found.append(str(error))
    return found + server_complaints(path, config)


def test_the_documented_recipes_are_all_there():
    assert {path.stem for path in CONFIGS} >= {
        "grpo-tiny-nf4-cpu",
        "grpo-qwen2.5_1.5b-nf4-gsm8k-1gpu",
        "grpo-qwen3_8b-nf4-fp8-deepmath-8gpu",
        "grpo-qwen3_8b-nf4-fp8-1x24gb",
    }
    assert {path.suffix for path in CONFIGS} == {".yaml"}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_configuration_loads_passes_the_checks_and_can_be_launched(path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert complaints(path) == []


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_trl_takes_every_configuration_also_where_there_is_no_gpu(path, tmp_path):
    from kit.core.run_directory import RunDir
    from kit.train.trainer import trainer_arguments

    config = load_config(path)
    (launch,) = launches(path)
    # This process stands for all of them.
    config.train.gradient_accumulation_steps *= launch_arguments(list(launch.words[2:])).num_processes
    made = trainer_arguments(config, RunDir(tmp_path / "run"))
    assert made.num_generations == config.rollout.group_size
    assert made.bf16 == (config.model.dtype == "bfloat16")


def test_run_names_differ_so_that_two_recipes_never_share_a_directory():
    names = [load_config(path).run.name for path in CONFIGS]
    assert sorted(set(names)) == sorted(names)


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("learning_rate: 2e-5", "learning_rat: 2e-5", "Did you mean train.learning_rate"),
        ("learning_rate: 2e-5", "learning_rate: fast", "must be a number"),
        ("backend: server", "backend: remote", "one of in_process, server"),
        # Divides the batch of one process and not that of four times three.
        ("group_size: 8", "group_size: 7", "must divide the generation batch (4 per device x 4 processes x 16"),
        ("--num_processes 4", "--num_processes 3 --num_machine 1", "num_machine"),
        ("functions: [math]", "functions: [maths]", "maths"),
        ("accelerate_configs/ddp.yaml", "accelerate_configs/dpp.yaml", "no accelerate config"),
        ("recipes/grpo_qlora.py", "recipes/grpo.py", "no file recipes/grpo.py"),
        ("--config recipes/configs/grpo-qwen3_8b-nf4-fp8-deepmath-8gpu.yaml", "--dry_run", "required: --config"),
        (
            "--config recipes/configs/grpo-qwen3_8b-nf4-fp8-deepmath-8gpu.yaml",
            "--config recipes/configs/grpo-tiny-nf4-cpu.yaml",
            "starts another configuration",
        ),
        ("merge base", "merge basis", "merge basis"),
        ("#   python -m merge base", "#   ssh", "no `python -m merge base` line"),
        ("#   python -m launch.server", "#   ssh", "no `python -m launch.server` line"),
        ("gpus: [4, 5, 6, 7]", "gpus: [4, 5, 6]", "need 4 GPUs, server.gpus lists 3"),
        ("weights: fp8_per_channel", "weights: fp8", "server.weights must be one of"),
        ("max_num_seqs: 256", "max_num_seqs: 4", "below rollout.group_size (8)"),
        ("sync: remerge", "sync: adapter\n  top_p: 0.9", "rollout.top_p"),
        ("accelerate launch", "torchrun", "no `accelerate launch` line"),
    ],
)
def test_a_planted_fault_is_found(tmp_path, old, new, complaint, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    source = FOLDER / "grpo-qwen3_8b-nf4-fp8-deepmath-8gpu.yaml"
    text = source.read_text()
    assert old in text
    path = tmp_path / source.name
    path.write_text(text.replace(old, new))
    assert complaint in "\n".join(complaints(path))


def test_the_process_count_is_that_of_the_launch_line(tmp_path):
    source = FOLDER / "grpo-qwen3_8b-nf4-fp8-deepmath-8gpu.yaml"
    config = load_config(source, ["--rollout.group_size", "128"])
    check_config(config, 4)
    with pytest.raises(BadInput, match="x 1 processes x"):
        check_config(config, 1)
    path = tmp_path / source.name
    path.write_text(source.read_text().replace("group_size: 8", "group_size: 128"))
    assert complaints(path) == []
    assert "WORLD_SIZE" not in os.environ
