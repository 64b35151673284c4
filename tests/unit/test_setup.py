"""What every recipe does around its training, where no run of a recipe shows it."""

import errno
import os
import signal
import subprocess
import sys
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from torch import distributed

from kit.core.config.checks import check_config
from kit.core.config.load import load_config
from kit.core.errors import CheckFailed, Interrupted, run_command
from kit.core.formats import FORMATS
from kit.core.run_directory import RunDir, write_json, write_manifest
from kit.train.setup import (
    LONGEST_COLLECTIVE,
    describe_format,
    describe_plan,
    load_data,
    out_of_memory,
    training,
    wait_for_progress,
)
from tests import processes
from tests.conftest import CONFIG

# torch 2.11's words.
TORCH = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.81 GiB of which 1.20 GiB is "
    "free. If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF"
)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ([], "set train.micro_batch_tokens (104 or more); or set train.recompute to full"),
        (["--train.micro_batch_tokens=512"], "lower train.micro_batch_tokens (512; at least 104); or set"),
        (
            ["--train.micro_batch_tokens=104", "--train.recompute=full"],
            "--resume, set train.recompute_offload to true",
        ),
        (
            ["--train.micro_batch_tokens=104", "--train.recompute=full", "--train.recompute_offload=true"],
            "--resume, use a larger GPU.",
        ),
        (["--train.max_gpu_gib=40"], "or raise train.max_gpu_gib (40)"),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_gpu_without_memory_ends_the_run_with_the_keys_that_take_less(monkeypatch, changes, said, rank):
    monkeypatch.setenv("RANK", str(rank))
    closed = []
    trainer = SimpleNamespace(
        config=load_config(CONFIG, changes),
        state=SimpleNamespace(global_step=6),
        sampler=SimpleNamespace(close=lambda: closed.append(True)),
        accelerator=SimpleNamespace(is_main_process=rank == 0),
    )
    with pytest.raises(CheckFailed) as found, training(trainer, {}):
        raise torch.OutOfMemoryError(TORCH)
    text = str(found.value)
    assert text.startswith("step 7: out of GPU memory. ") and said in text and "Tried to allocate 2.00 GiB" in text
    assert "PYTORCH" not in text and closed == [True] * (rank == 0)


@pytest.mark.parametrize(
    ("stage", "changes", "said"),
    [
        ("2", ["--train.recompute=full"], "(104 or more); or set train.recompute_offload to true. "),
        ("3", [], "(104 or more); or set train.recompute to full and train.recompute_fraction to 1. "),
        ("3", ["--train.recompute=full"], "--resume, set train.micro_batch_tokens (104 or more). "),
    ],
)
def test_under_deepspeed_the_keys_that_it_refuses_are_not_named(monkeypatch, stage, changes, said):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", stage)
    config = load_config(CONFIG, changes)
    check_config(config, 1)
    assert said in str(out_of_memory(config, 7, RuntimeError(TORCH)))


@pytest.mark.parametrize("deepspeed", ["false", "true"])
def test_the_plan_says_that_a_bfloat16_adapter_loses_small_updates_without_float32_masters(monkeypatch, deepspeed):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", deepspeed)
    for dtype in ("float32", "bfloat16"):
        text = describe_plan(load_config(CONFIG, [f"--policy.adapter_dtype={dtype}"]), 200, 1)
        assert ("no float32 masters" in text) == (dtype == "bfloat16" and deepspeed == "false")


@pytest.mark.parametrize(
    ("saved", "rest"),
    [
        (True, "--resume continues from {}/checkpoints/step-000005"),
        (False, "there is no checkpoint yet (train.save_steps 50)"),
    ],
)
def test_an_interruption_says_where_a_resume_starts(saved, rest, tmp_path):
    run = RunDir(tmp_path)
    if saved:
        (run.checkpoints / "step-000005").mkdir(parents=True)
        write_manifest((run.checkpoints / "step-000005"), "training-state")
    trainer = SimpleNamespace(
        config=load_config(CONFIG, ["--train.save_steps", "50"]),
        state=SimpleNamespace(global_step=6),
        accelerator=SimpleNamespace(is_main_process=False),
        run=run,
    )
    with pytest.raises(Interrupted) as error, training(trainer, {}):
        raise KeyboardInterrupt
    assert str(error.value) == f"interrupted in step 7: {rest.format(tmp_path)}"


def test_an_interrupted_command_ends_by_the_signal_without_the_stack_of_what_was_running():
    program = "import os, signal\nfrom kit.core.errors import run_command\n"
    program += "import atexit; atexit.register(print, 'at exit')\n"
    program += "def deep(n): deep(n - 1) if n else os.kill(os.getpid(), signal.SIGINT)\n"
    done = processes.run([sys.executable, "-c", program + "run_command(lambda: deep(50))"])
    assert (done.returncode, done.stderr, done.stdout) == (-signal.SIGINT, "interrupted\n", "at exit\n")
    program = "from kit.core.errors import Interrupted, run_command\ndef main(): raise Interrupted('in step 7')\n"
    done = processes.run([sys.executable, "-c", program + "run_command(main)"])
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "in step 7\n")


COMMANDS = ["recipes/grpo_qlora.py", "-m recipes.study", "-m merge", "-m eval"]
COMMANDS += ["-m launch.up", "-m launch.server", "-m launch.plan", "-m reward"]


@pytest.mark.parametrize("command", COMMANDS)
def test_ctrl_c_ends_a_command_with_one_line_while_it_imports(command, tmp_path):
    late = "json" if command == "-m merge" else "yaml"  # a module that is imported after kit.core.errors
    (tmp_path / f"{late}.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = processes.run([sys.executable, *command.split(), "--help"], env=environment)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "interrupted\n"), done.stderr


class Full(Exception):
    """As safetensors' error: no OSError, and the number in the text."""


FULL = [
    OSError(errno.ENOSPC, "No space left on device", "/there/file.json"),
    OSError(errno.EDQUOT, "Disk quota exceeded"),
    OSError("encoder: No space left on device"),
    Full("Error while serializing: I/O error: No space left on device (os error 28)"),
    RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598"),
]


@pytest.mark.parametrize("error", FULL, ids=repr)
def test_a_full_disk_is_one_message_whoever_writes(error, capsys):
    def write() -> None:
        raise error

    with pytest.raises(SystemExit) as ended:
        run_command(write)
    said = capsys.readouterr().err
    assert ended.value.code == 1 and said.startswith("error: the disk is full: ") and "free some space" in said
    with pytest.raises(RuntimeError):
        run_command(lambda: (_ for _ in ()).throw(RuntimeError("CUDA error: an illegal memory access")))


def test_a_file_that_a_full_disk_refuses_is_named(tmp_path):
    (tmp_path / f".eval.json.{os.getpid()}.tmp").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left on device: '.*/eval\.json'"):
        write_json(tmp_path / "eval.json", {"key": 1})


@pytest.mark.parametrize(("alone_s", "said"), [(0.0, "error: process 1: its reward\n"), (60.0, "")])
def test_a_process_that_fails_alone_says_why_and_one_that_follows_the_main_process_does_not(alone_s, said):
    program = "from kit.core import errors\ndef main():\n    print('failing', flush=True)\n"
    program += f"    raise errors.CheckFailed('its reward')\nerrors.ALONE_S = {alone_s}\nerrors.run_command(main)"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", program], env={**os.environ, "RANK": "1"}, **pipes) as process:
        assert process.stdout.readline() == "failing\n"
        if not said:
            process.terminate()  # as a launcher does once the main process has ended
        assert processes.finish(process)[1] == said
    assert process.returncode == (1 if said else -signal.SIGTERM)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fp8", "weights fp8, a scale per output channel; inputs fp8, a scale per token"),
        ("fp8_block", "weights fp8, a scale per 128 x 128; inputs fp8, a scale per block"),
        ("fp8_static", "weights fp8, a scale per whole weight; inputs fp8, a scale per tensor"),
        ("w4a16", "weights int4, a scale per 1 x 128; inputs unquantized"),
    ],
)
def test_the_plan_says_what_of_a_weight_and_of_inputs_shares_a_scale(name, said):
    lines = describe_format(FORMATS[name], load_config(CONFIG)).splitlines()
    assert lines[0] == f"format    {name}: {said}"
    assert len(lines) == 1 + FORMATS[name].needs_calibration


@pytest.mark.parametrize("heldout", ["What is 3 plus 2?", "What is 13 plus 2?"])
def test_held_out_problems_that_are_trained_on_are_named_before_the_run(tmp_path, capsys, heldout):
    rows = "".join(f'{{"question": "What is {i} plus 2?", "answer": "{i + 2}"}}\n' for i in range(8))
    (tmp_path / "train.jsonl").write_text(rows)
    (tmp_path / "heldout.jsonl").write_text(f'{{"question": "{heldout}", "answer": "5"}}\n')
    tokenizer = SimpleNamespace(apply_chat_template=lambda *_, **__: {"input_ids": [1]})
    load_data(load_config(CONFIG, ["--data.path", str(tmp_path)]), tokenizer, 1)
    said = "WARNING: 1 of 1 held-out problems are training problems" in capsys.readouterr().out
    assert said == ("13" not in heldout)


@pytest.mark.parametrize(("stall_s", "limit_s"), [(900.0, LONGEST_COLLECTIVE.total_seconds()), (0.0, 5.0)])
def test_collectives_of_a_watched_run_wait_for_as_long_as_a_process_makes_progress(stall_s, limit_s):
    distributed.init_process_group(
        "gloo", store=distributed.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=5)
    )
    try:
        wait_for_progress(stall_s)
        backend = distributed.group.WORLD._get_backend(torch.device("cpu"))
        assert backend.options._timeout.total_seconds() == limit_s
    finally:
        distributed.destroy_process_group()
