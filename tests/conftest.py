"""Models and runs that tests share: each is made once for all test processes, the runs by the recipe's command line.

`tiny_model_dir` has random weights. It never answers right, so its rewards have no spread and its gradients are zero.
`learning_model_dir` was supervised for a few seconds: some of its sampled answers are right, so a step learns. It has
the same weights on every CPU.
"""

import contextlib
import fcntl
import gc
import importlib
import io
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

# A shell starts what it puts in the background with Ctrl-C ignored, and every process under test would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

from kit.core import own_code
from kit.core.checksum import without_checksum
from kit.core.config.recipe import PLAIN
from kit.core.errors import run_command
from kit.core.run_directory import RunDir
from tests import processes, sandbox

# What is imported stays, so no garbage collection goes through it: not now, nor later (`pytest_collection_finish`).
gc.disable()
ROOT = sandbox.ROOT
CONFIG = ROOT / "recipes" / "configs" / "grpo-tiny-nf4-cpu.yaml"
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/cpu.yaml"]
# 4 problems x 4 completions a step, about 0.2 s.
SMALL = {
    "rollout.group_size": 4,
    "rollout.max_completion_length": 24,
    "train.per_device_train_batch_size": 16,
    "train.max_steps": 6,
    "train.save_steps": 2,
    "policy.lora_rank": 4,
    "policy.lora_alpha": 8,
    "watch.completions_every": 2,
}


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Go on in a copy of the checkout; what the command line asks to write is still written beside the caller."""
    if sandbox.inside():
        return
    here = config.invocation_params.dir
    files = {"--junitxml": config.option.xmlpath, "--basetemp": config.option.basetemp}
    outputs = [f"{option}={Path(here, value).absolute()}" for option, value in files.items() if value]
    if config.pluginmanager.hasplugin("cacheprovider"):
        outputs += ["-o", f"cache_dir={ROOT / '.pytest_cache'}"]
    config.pluginmanager.getplugin("capturemanager").stop_global_capturing()  # it holds the terminal's descriptors
    sandbox.enter(config.invocation_params.args, config.option.file_or_dir, here, outputs)


def pytest_unconfigure() -> None:
    sandbox.leave()


def pytest_collection_finish() -> None:
    """Going through the million objects that imports leave takes .3 s, and every training asks for it."""
    gc.freeze()
    gc.enable()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # nanobind would take them for leaks


@pytest.fixture(autouse=True)
def no_autocast_left_on():
    """A test that leaves autocast on fails itself, and not those after it."""
    yield
    torch = sys.modules.get("torch")
    if torch is not None and getattr(torch, "is_autocast_enabled", None) and torch.is_autocast_enabled("cpu"):
        torch.set_autocast_enabled("cpu", False)
        pytest.fail("autocast is still on")


@pytest.fixture(autouse=True)
def own_code_forgotten():
    """What a test's configurations and runs name as code is nothing to the next test."""
    yield
    own_code.reset()


# Mean |difference| of log-probs that a server samples and scores with the same BF16 weights. Batches of other sizes
# may sum in another order (seen: 4e-6 in one of 64 tokens, else the same bits). Blocks of the prefix cache that a
# version before computed make .08 to .19, the cache not cleared on purpose.
ROUNDING = 0.01


@dataclass
class Finished:
    """A command that ended: its exit code and what it wrote."""

    code: int
    out: str
    err: str


def run_here(*words: object) -> Finished:
    """`python -m …` in this process, whose libraries are loaded: a process of its own imports for 8 s."""
    module, *arguments = map(str, words)
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(sys, "argv", [module, *arguments])
        with warnings.catch_warnings(), pytest.raises(SystemExit) as ended:
            warnings.simplefilter("ignore", RuntimeWarning)  # the module may be imported already
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    return Finished(ended.value.code, out.getvalue(), err.getvalue())


def make_base(folder: Path, *arguments: Any) -> Path:
    """A model made by recipes/tiny_base.py in this process."""
    from recipes.tiny_base import main

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["tiny_base.py", "--out", str(folder), *map(str, arguments)])
        main()
    return folder


def rehearse(script: str, part: str) -> str:
    """What a part of a GPU's script says on the CPU, in Triton's interpreter, when it misses nothing."""
    pytest.importorskip("triton")
    command = [sys.executable, script, "--rehearse", "--part", part]
    environment = os.environ | {"PYTHONWARNINGS": "ignore"}
    done = processes.run(command, env=environment)
    assert done.returncode == 0 and "\n0 missed" in done.stdout, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module", autouse=True)
def no_server_left():
    """A server thread whose socket was closed under it spins, and takes a core from every file that follows."""
    yield
    for thread in threading.enumerate():
        if "serve_forever" in thread.name:
            thread.join(5)
            assert not thread.is_alive(), f"{thread.name} goes on; stop its server with shutdown()"


@pytest.fixture(scope="session")
def made_once(tmp_path_factory) -> Callable[[str, Callable[[Path], Any]], Path]:
    """`made_once(name, make)`: the folder that `make` fills, once for all test processes; the others wait for it."""
    folders = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # each process has a folder of its own in that of the session
        folders = folders.parent
    (folders := folders / "made-once").mkdir(exist_ok=True)

    def once(name: str, make: Callable[[Path], Any]) -> Path:
        folder, whole = folders / name, folders / f"{name}.whole"
        with open(folders / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not whole.exists():
                shutil.rmtree(folder, ignore_errors=True)  # what another process began and could not end
                make(folder)
                whole.touch()
        return folder

    return once


@pytest.fixture(scope="session")
def tiny_model_dir(made_once) -> Path:
    """Random Qwen3 weights with tokenizer, chat template and generated problems; nothing it says is right."""
    size = ("--hidden", 64, "--layers", 2, "--problems", 200, "--heldout", 40)
    return made_once("untrained", lambda folder: make_base(folder, "--steps", 0, *size))


@pytest.fixture(scope="session")
def learning_model_dir(made_once) -> Path:
    """A base with a third of its sampled answers right: of four groups of four, hardly ever has none a spread."""
    options = "--hidden 64 --layers 2 --limit 4 --problems 400 --heldout 40 --steps 200 --processes 1 --overwrite"

    def make(folder: Path) -> None:
        command = [sys.executable, "-m", "tests.float64_base", "--out", str(folder), *options.split()]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    return made_once("learning", make)


@pytest.fixture(scope="session")
def tools_model_dir(made_once) -> Path:
    """A model of recipes/tiny_tools.py, supervised for a few seconds: some of its turns call the calculator."""

    def make(folder: Path) -> None:
        from recipes.tiny_tools import main

        options = "--hidden 64 --layers 2 --steps 150 --problems 2000 --heldout 40 --processes 1 --overwrite"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["tiny_tools.py", "--task=calculator", f"--out={folder}", *options.split()])
            main()

    return made_once("tools", make)


@pytest.fixture(scope="session")
def recipe_arguments() -> Callable[..., list[str]]:
    """`recipe_arguments(model, run directory, {key: value})`: the command line of a small run."""

    def make(model: Path, output: Path, changes: dict | None = None, flags: tuple[str, ...] = ()) -> list[str]:
        keys = {"run.output_dir": output, "model.path": model, "data.path": model, **SMALL, **(changes or {})}
        return ["--config", str(CONFIG), *(f"--{key}={value}" for key, value in keys.items()), *flags]

    return make


@pytest.fixture(scope="session")
def launch() -> Callable[[list[str]], subprocess.Popen]:
    """Start `accelerate launch recipes/grpo_qlora.py` as a user does, in a process group of its own."""

    def start(arguments: list[str]) -> subprocess.Popen:
        command = [*LAUNCH, PLAIN, *arguments]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True, start_new_session=True)

    return start


@pytest.fixture(scope="session")
def tiny_run(made_once, launch, recipe_arguments, learning_model_dir) -> RunDir:
    """A finished run of 6 steps with checkpoints at 2, 4 and 6 (the last two kept). Copy it before changing it."""

    def train(folder: Path) -> None:
        out, err = processes.finish(process := launch(recipe_arguments(learning_model_dir, folder)))
        assert process.returncode == 0, f"{out}\n{err}"
        (folder / "stdout.txt").write_text(out)

    return RunDir(made_once("tiny-run", train))


def main_of(file: str) -> Callable[[], None]:
    """The `main()` of a recipe's file."""
    return importlib.import_module(file.removesuffix(".py").replace("/", ".")).main


@pytest.fixture(scope="session")
def recipe() -> Callable[..., Finished]:
    """`recipe(arguments, file)`: a recipe's command line in this process (imports cost 10 s per launch): exit code and
    output."""

    def run(arguments: list[str], file: str = PLAIN) -> Finished:
        out, err = io.StringIO(), io.StringIO()
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            patch.setattr(sys, "argv", [file, *arguments])
            with pytest.raises(SystemExit) as ended:
                run_command(main_of(file))
        return Finished(ended.value.code, out.getvalue(), err.getvalue())

    return run


@pytest.fixture(scope="session")
def build_trainer() -> Callable[..., Any]:
    """The trainer as a recipe builds it, not yet started; `rewards` replaces the configured reward functions."""

    class Built(Exception):
        pass

    def build(arguments: list[str], rewards: list | None = None, file: str = PLAIN) -> Any:
        from kit.train.trainer import PolicyTrainer

        found = []

        def stop(trainer: Any, resume: bool) -> None:
            found.append(trainer)
            raise Built

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", [file, *arguments])
            patch.setattr(PolicyTrainer, "train_run", stop)
            if rewards is not None:
                patch.setattr("reward.reward_functions", lambda *_, **__: (rewards, [1.0] * len(rewards)))
            with pytest.raises(Built):
                main_of(file)()
        return found[0]

    return build


@pytest.fixture(scope="session")
def read_jsonl() -> Callable[[Path], list[dict]]:
    """The objects of a jsonl file without their checksums; a line that is not strict JSON fails the test."""

    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is not JSON")

    def read(path: Path) -> list[dict]:
        rows = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
        return [without_checksum(row, path) for row in rows]

    return read
