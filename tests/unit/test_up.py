"""Which GPUs and commands a configuration becomes, what is refused before anything starts, and what a log tells about
the end of a trainer. Starting and ending: test_up_processes.py."""

import shlex
import sys
from pathlib import Path

import pytest

from kit.core.config.load import load_config, to_dict
from kit.core.errors import BadInput
from kit.core.run_directory import write_json
from kit.plan.placement import Placement, place
from launch import up
from launch.starting import trainer_command as trainer_command_module
from launch.starting.jobs import Job, message
from launch.starting.trainer_command import (
    CPU,
    DDP,
    ONE_GPU,
    Command,
    choose_launcher,
    process_count,
    read_launcher,
    trainer_command,
)
from launch.vllm_command import Installed
from tests.unit.advice import commands
from tests.unit.command_lines import Command as Written
from tests.unit.command_lines import launch_arguments, problem

ROOT = Path(__file__).parents[2]
TINY, ONE_CARD, EIGHT = (
    f"recipes/configs/grpo-{name}.yaml"
    for name in ("tiny-nf4-cpu", "qwen3_8b-nf4-fp8-1x24gb", "qwen3_8b-nf4-fp8-deepmath-8gpu")
)
GPUS = [str(number) for number in range(8)]
URLS = {"rollout.server_urls": "['http://127.0.0.1:8000', 'http://127.0.0.1:8001']"}
ASLEEP, ROOM = {"server.sleep": True}, {"train.max_gpu_gib": 20}


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    monkeypatch.chdir(ROOT)
    for name in ("VLLM_API_KEY", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM"):
        monkeypatch.delenv(name, raising=False)


def words_of(changes: dict) -> list[str]:
    return [f"--{key}={value}" for key, value in ({"rollout.backend": "server"} | changes).items()]


def config(changes: dict):
    return load_config(TINY, words_of(changes))


@pytest.mark.parametrize(
    ("changes", "visible", "servers", "trainer"),
    [
        ({}, GPUS[:2], "0", "1"),
        ({}, GPUS, "0", "1 2 3 4 5 6 7"),
        (URLS, GPUS[:4], "0 1", "2 3"),
        ({"server.tensor_parallel": 2}, GPUS[:4], "0 1", "2 3"),
        ({"server.gpus": [3, 2], **URLS}, GPUS[:4], "3 2", "0 1"),
        # One card, and replicas that sleep: shared.
        ({}, ["0"], "0", "0"),
        (ASLEEP, GPUS[:2], "0", "0 1"),
        (ASLEEP | URLS, GPUS[:2], "0 1", "0 1"),
        # Named.
        ({"train.gpus": [1]}, GPUS[:4], "0", "1"),
        ({"train.gpus": [0], **ASLEEP}, GPUS[:4], "0", "0"),
        ({"train.gpus": [0], **ROOM}, GPUS[:4], "0", "0"),
        # All cards for both.
        ({"train.gpus": [0, 1], "server.gpus": [0, 1], **ROOM, **URLS}, GPUS[:2], "0 1", "0 1"),
        # Lists count from the first GPU of CUDA_VISIBLE_DEVICES, whatever it is called.
        ({"server.gpus": [1], "train.gpus": [0]}, ["6", "7"], "7", "6"),
        ({}, ["GPU-ab", "GPU-cd"], "GPU-ab", "GPU-cd"),
    ],
)
def test_the_trainer_gets_the_gpus_that_no_replica_uses(changes, visible, servers, trainer):
    found = place(config(changes), visible, replicas_on_gpus=True)
    assert (" ".join(found.servers), " ".join(found.trainer)) == (servers, trainer)


def test_without_servers_on_gpus_the_trainer_gets_all_and_a_cpu_launcher_none():
    assert place(config({}), GPUS[:2], replicas_on_gpus=False).trainer == ("0", "1")
    assert place(config({}), GPUS[:2], replicas_on_gpus=True, trainer_on_gpus=False) == Placement(("0",), ())
    assert place(config({}), [], replicas_on_gpus=False) == Placement((), (), is_machine_without=True)


@pytest.mark.parametrize(
    ("changes", "visible", "complaint"),
    [
        (URLS, GPUS[:2], r"the replicas take all 2 GPUs \(0, 1: 2 rollout.server_urls of .* 1"),
        ({"train.gpus": [0]}, GPUS[:2], r"train.gpus \(0\) and the replicas' GPUs \(0\) share 0"),
        ({"train.gpus": [0, 1]}, ["4", "5"], r"train.gpus \(4, 5\) and the replicas' GPUs \(4\) share 4"),
        ({"train.gpus": [5]}, GPUS[:2], r"train.gpus names 5; CUDA shows 2 GPUs here \(0, 1\), counted from 0"),
        ({"server.gpus": [4]}, GPUS[:2], "server.gpus names 4; CUDA shows 2 GPUs"),
        ({"train.gpus": [-1]}, GPUS[:2], r"train.gpus \(\[-1\]\) must be .* from 0 to 1023"),
        ({"train.gpus": [1, 1]}, GPUS[:2], r"train.gpus \(\[1, 1\]\) must name .* every GPU once"),
        ({"train.gpus": []}, GPUS[:2], "at least one GPU"),
        ({"train.gpus": [0]}, [], r"CUDA shows 0 GPUs here \(none\)"),
    ],
)
def test_gpus_that_do_not_suffice_are_refused_with_the_numbers(changes, visible, complaint):
    with pytest.raises(BadInput, match=complaint):
        place(config(changes), visible, replicas_on_gpus=True)


def command(placement: Placement, launcher: str | None = None, changes: dict | None = None) -> Command:
    found = read_launcher(launcher) if launcher else choose_launcher(len(placement.trainer))
    return trainer_command(config(changes or {}), TINY, ["--run.name", "x"], found, placement)


@pytest.mark.parametrize(
    ("gpus", "launcher", "processes", "file"),
    [
        ((), None, 1, CPU),
        (("3",), None, 1, ONE_GPU),
        (("2", "3"), None, 2, DDP),
        (("2", "3"), "accelerate_configs/zero2.yaml", 2, "accelerate_configs/zero2.yaml"),
        (("5",), DDP, 1, DDP),
    ],
)
def test_the_trainer_is_launched_with_one_process_per_gpu_and_sees_only_its_own(gpus, launcher, processes, file):
    found = command(Placement((), gpus, is_machine_without=not gpus), launcher)
    assert found.words[:3] == [sys.executable, "-m", "accelerate.commands.launch"]
    parsed = launch_arguments(found.words[3:])
    assert not isinstance(parsed, str), parsed
    assert (Path(parsed.config_file), parsed.num_processes) == (ROOT / file, processes)
    assert parsed.training_script == "recipes/grpo_qlora.py"
    assert parsed.training_script_args == ["--config", TINY, "--run.name", "x"]
    assert found.environment.get("CUDA_VISIBLE_DEVICES") == (",".join(gpus) if gpus else None)
    assert found.environment["OMP_NUM_THREADS"] == "1"
    # one_gpu.yaml would show the process GPU 0, and the small recipe computes in float32.
    assert not gpus or (parsed.gpu_ids, parsed.mixed_precision) == ("all", "no")


def test_several_processes_on_the_cpu_are_started_by_torchrun(tmp_path):
    (tmp_path / "cpu.yaml").write_text("{distributed_type: MULTI_CPU, use_cpu: true, num_processes: 2}\n")
    found = command(Placement((), (), is_machine_without=True), str(tmp_path / "cpu.yaml"))
    assert found.words[1:6] == ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    assert found.words[6:] == ["recipes/grpo_qlora.py", "--config", TINY, "--run.name", "x"]
    assert found.environment["ACCELERATE_USE_CPU"] == "true" and found.environment["OMP_NUM_THREADS"] == "1"


def test_a_set_number_of_threads_is_kept_and_a_cpu_trainer_sees_no_gpu(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    found = command(Placement(("0",), ()), CPU)
    assert found.environment["OMP_NUM_THREADS"] == "7" and found.environment["CUDA_VISIBLE_DEVICES"] == ""
    assert "CUDA_VISIBLE_DEVICES=''" in found.text and "OMP_NUM_THREADS=7" in found.text


@pytest.mark.parametrize(
    ("servers", "listed", "told"),
    [
        (("0",), None, [0]),
        (("4", "5"), "[4, 5]", None),
        (("7",), "[1]", [7]),
        (("GPU-ab",), None, None),
        ((), None, None),
    ],
)
def test_the_trainers_memory_checks_are_told_where_the_replicas_are(servers, listed, told):
    words = command(Placement(servers, ("1",)), changes={"server.gpus": listed} if listed else {}).words
    assert [word for word in words if word.startswith("--server.gpus")] == ([f"--server.gpus={told}"] if told else [])


@pytest.mark.parametrize(
    ("path", "gpus", "complaint"),
    [
        ("accelerate_configs/two_nodes.yaml", 1, "is for 2 machines and this command starts one"),
        ("accelerate_configs/none.yaml", 1, "no YAML file at accelerate_configs/none.yaml"),
        (TINY, 1, "no distributed_type"),
        (ONE_GPU, 2, f"starts one process and the trainer has 2 GPUs. Use {DDP}"),
        (DDP, 0, "is for GPUs and CUDA shows none here. Use accelerate_configs/cpu.yaml"),
    ],
)
def test_a_launcher_that_does_not_fit_is_refused(path, gpus, complaint):
    with pytest.raises(BadInput, match=complaint):
        process_count(read_launcher(path), gpus)


@pytest.fixture
def machine(monkeypatch):
    """`machine(GPUs)`: this machine has them, vLLM for CUDA, and whatever base is asked for."""

    def make(gpus: list[str], base: bool = True) -> None:
        stand_ins = {
            "installed_vllm": lambda: Installed("0.31.0", is_cpu=not gpus),
            "gpu_gib": lambda: 80.0,
            "check_ports": lambda found: None,
            "fits": lambda config: (True, "8 x h100\nIt fits."),
            "check_base": lambda *_: {},
        }
        for name, stand_in in (stand_ins | ({"base_directory": lambda config: ROOT} if base else {})).items():
            monkeypatch.setattr(up, name, stand_in)
        monkeypatch.setattr(trainer_command_module, "visible_gpus", lambda: gpus)

    return make


@pytest.fixture
def prepared(tmp_path):
    """`prepared(**flags)`: the small run prepared with these changes of its keys, in `tmp_path / "run"`."""

    def make(changes: dict | None = None, **flags) -> up.Start:
        keys = {"run.output_dir": tmp_path / "run", "model.dtype": "bfloat16"} | (changes or {})
        return up.prepare(TINY, words_of(keys), None, **{"resume": False, **flags})

    return make


def test_the_shipped_configuration_of_eight_gpus_becomes_four_replicas_and_four_processes(machine, capsys):
    machine(GPUS)
    start = up.prepare(EIGHT, [], None, resume=False)
    assert [plan.gpus for plan in start.servers] == [("4",), ("5",), ("6",), ("7",)]
    assert start.trainer.environment["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    assert start.trainer.words[3:7] == ["--config_file", DDP, "--num_processes", "4"]
    assert start.base is None
    up.print_commands(start)
    lines = [line for line in capsys.readouterr().out.splitlines() if line and not line.startswith("#")]
    printed = [Command(*split(line)) for line in lines]
    assert printed == [start.check, *(Command(p.command, p.environment) for p in start.servers), start.trainer]


def split(line: str) -> tuple[list[str], dict[str, str]]:
    """Words and environment of a command as a shell reads them."""
    words = shlex.split(line)
    first = next(number for number, word in enumerate(words) if word == sys.executable)
    return words[first:], dict(word.split("=", 1) for word in words[:first])


def test_replicas_get_the_gpus_that_their_list_names_among_those_that_are_visible(machine, prepared):
    machine(["6", "7", "9"])
    start = prepared({"server.gpus": [2]})
    assert (start.servers[0].gpus, start.placement.trainer) == (("9",), ("6", "7"))
    assert start.trainer.words[-1] == "--server.gpus=[9]"


def test_the_shipped_configuration_of_one_card_shares_it_and_writes_its_base_first(machine):
    machine(["0"], base=False)
    start = up.prepare(ONE_CARD, [], None, resume=False)
    assert (start.servers[0].gpus, start.placement.trainer) == (("0",), ("0",))
    assert start.base.words[1:] == ["-m", "merge", "base", "--config", ONE_CARD]
    assert start.base.environment == {"CUDA_VISIBLE_DEVICES": "0"}
    assert "shares GPU 0 with the replicas, which sleep while the trainer updates" in up.describe(start)


def test_all_cards_get_a_trainer_process_and_a_replica_where_the_configuration_says_so(machine, prepared):
    machine(["6", "7"])
    start = prepared({**URLS, "server.gpus": [0, 1], "train.gpus": [0, 1], **ROOM, "server.kv_cache_gib": 2})
    assert [one.gpus for one in start.servers] == [("6",), ("7",)]
    assert start.trainer.environment["CUDA_VISIBLE_DEVICES"] == "6,7"
    assert " --num_processes 2 " in start.trainer.text and "ddp.yaml" in start.trainer.text
    assert "shares GPU 6, 7 with the replicas, which stay in memory" in up.describe(start)


def test_an_existing_run_is_refused_before_anything_starts_and_resumed_when_asked(machine, prepared, tmp_path):
    machine([])
    run = tmp_path / "run"
    (run / "checkpoints" / "step-000002").mkdir(parents=True)
    write_json(run / "base.json", {})
    made = config({"run.output_dir": run, "model.dtype": "bfloat16"})
    write_json(run / "config.json", {"config": to_dict(made), "processes": 1})
    with pytest.raises(BadInput, match=r"holds a run already\. Continue it with --resume"):
        prepared()
    with pytest.raises(BadInput, match="no whole training-state under"):
        prepared(resume=True)
    with pytest.raises(BadInput, match=r"train.learning_rate was 0.001, is 0.5"):
        prepared({"train.learning_rate": 0.5}, resume=True)


def test_a_dry_run_leaves_the_run_directory_alone(machine, tmp_path, monkeypatch, capsys):
    machine([])
    monkeypatch.setattr(up.Start, "check", Command([sys.executable, "-c", "print('checked')"], {}))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    keys = words_of({"run.output_dir": tmp_path / "run"})
    monkeypatch.setattr(sys, "argv", ["up", "--config", TINY, *keys, "--dry_run"])
    assert up.main() == 0
    assert list(tmp_path.iterdir()) == [] and f"run      tiny -> {tmp_path / 'run'}" in capsys.readouterr().out


@pytest.mark.parametrize(("path", "trainer", "servers"), [(ONE_CARD, 1, 1), (EIGHT, 4, 4)])
def test_a_dry_run_without_a_gpu_places_a_gpu_recipe_where_its_lists_say(
    machine, monkeypatch, capsys, path, trainer, servers
):
    machine([], base=False)
    with pytest.raises(BadInput):
        up.prepare(path, [], None, resume=False)
    start = up.prepare(path, [], None, resume=False, dry_run=True)
    assert (len(start.placement.trainer), len(start.servers)) == (trainer, servers)
    said = up.describe(start)
    assert "there is no GPU here: memory, ports, vLLM" in said
    (plan,) = commands(said)
    monkeypatch.delitem(sys.modules, "launch.plan", raising=False)  # or runpy warns
    assert problem(Written(tuple(shlex.split(plan)), "describe")) is None
    up.print_commands(start)
    assert f"--num_processes {trainer} " in capsys.readouterr().out
    check = start.check
    assert check.environment["ACCELERATE_USE_CPU"] == "true" and check.words[-1] == "--dry_run"
    assert check.words[1:6] == ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(trainer)]


def test_a_stopped_run_is_told_how_it_goes_on(machine, prepared):
    machine([])
    start = prepared()
    assert up.what_is_left(start) == "Nothing was trained yet."
    start.run.path.mkdir()
    write_json(start.run.base_file, {})
    write_json(start.run.config_file, {"config": to_dict(start.config)})
    (again,) = commands(up.what_is_left(start))
    assert again.endswith("--overwrite")
    flags = shlex.split(again)[5:]
    assert up.prepare(TINY, flags[:-1], None, resume=False, overwrite=True).trainer.words[-1] == "--overwrite"


def test_a_run_that_does_not_fit_the_card_is_refused_before_anything_starts(machine, monkeypatch):
    machine(["0"])
    told = "1 x rtx4090\nIt does not fit. GPU 0: 35.6 of 23.5 GiB.\nThis would fit: --server.sleep true"
    monkeypatch.setattr(up, "fits", lambda config: (False, told))
    with pytest.raises(BadInput, match=r"35.6 of 23.5 GiB.\nThis would fit: --server.sleep true\n.*--ignore_plan"):
        up.prepare(ONE_CARD, [], None, resume=False)
    start = up.prepare(ONE_CARD, [], None, resume=False, ignore_plan=True)
    assert "memory   It does not fit. GPU 0: 35.6 of 23.5 GiB." in up.describe(start)


def test_a_model_that_no_plan_can_be_made_of_is_started(machine, monkeypatch):
    def unknown(config):
        raise BadInput("experts are not covered")

    machine(["0"])
    monkeypatch.setattr(up, "fits", unknown)
    assert "memory   not planned: experts" in up.describe(up.prepare(ONE_CARD, [], None, resume=False))


def test_a_batch_that_the_processes_do_not_fit_is_refused(machine, prepared):
    machine(GPUS[:4])
    with pytest.raises(BadInput, match=r"1 per device x 3 processes x 1 steps = 3"):
        prepared({"train.per_device_train_batch_size": 1})


SIMPLE = """error: train.trl.nothing is not a field of GRPOConfig.
and more about it
Traceback (most recent call last):
  File "accelerate/commands/launch.py", line 1, in simple_launcher
subprocess.CalledProcessError: Command '['python', 'recipes/grpo_qlora.py']' returned non-zero exit status 2.
"""
TORCHRUN = """step 1/80 reward 0.5
error: the server at http://127.0.0.1:8000 is gone
E1121 15:00:00.1 7 torch/distributed/elastic/multiprocessing/api.py:9] failed (exitcode: 2) local_rank: 0 (pid: 5)
Traceback (most recent call last):
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
=====================================================
recipes/grpo_qlora.py FAILED
-----------------------------------------------------
Failures:
[1]:
  exitcode  : -15 (pid: 6)
-----------------------------------------------------
Root Cause (first observed failure):
[0]:
  exitcode  : 2 (pid: 5)
=====================================================
"""
KILLED = """step 1/80 reward 0.5
Traceback (most recent call last):
subprocess.CalledProcessError: Command '['python', 'recipes/grpo_qlora.py']' died with <Signals.SIGKILL: 9>.
"""
RAISED = """Traceback (most recent call last):
  File "kit/train/trainer.py", line 1, in step
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB
Traceback (most recent call last):
subprocess.CalledProcessError: Command '['python', 'recipes/grpo_qlora.py']' returned non-zero exit status 1.
"""


BY_THE_KERNEL = "was killed by SIGKILL (the kernel does so if the machine or container runs out of memory"


@pytest.mark.parametrize(
    ("text", "code", "exit_code", "told", "untold"),
    [
        (
            SIMPLE,
            2,
            2,
            "trainer: train.trl.nothing is not a field of GRPOConfig.\nand more about it\n",
            "Called",
        ),
        (TORCHRUN, 2, 2, "trainer: the server at http://127.0.0.1:8000 is gone\n", "E1121"),
        (KILLED, -9, 1, BY_THE_KERNEL, "Tr"),
        (RAISED.replace("status 1", "status 137"), 137, 1, BY_THE_KERNEL, "Called"),
        (RAISED, 1, 1, "exit code 1. The first error in it: OutOfMemoryError: CUDA out of memory. Tried", "Called"),
        ("  File x\nValueError: 3\n", 1, 1, "exit code 1. The first error in it: ValueError: 3", "Called"),
        ("", 1, 1, "trainer ended with exit code 1. Its log is", "first error"),
    ],
)
def test_how_the_recipe_ended_is_read_from_its_log_because_accelerate_ends_with_1(
    tmp_path, text, code, exit_code, told, untold
):
    log = tmp_path / "trainer.log"
    log.write_text("==== an earlier start\nerror: of yesterday\n")
    program = f"import sys; print({text!r}, end=''); sys.exit(1)"
    with Job("trainer", Command([sys.executable, "-c", program], {}), log) as job:
        job.process.wait(30)
    assert job.ended() == code
    failed = job.failure(code)
    # The marker of the start holds the program's text: only what follows it is the program's.
    assert failed.exit_code == exit_code and told in str(failed) and str(log) in str(failed)
    assert untold not in str(failed) and "yesterday" not in str(failed)


def test_a_message_ends_where_the_launchers_words_begin():
    assert message(["x", "error: a", "b", "", "Traceback (most recent call last):", "c"]) == "a\nb"
    assert message(["no message", "OSError: x"]) is None
