"""The wheel and `pip install -e .` in a fresh environment: one import package that hides nobody's module, and `kit`.

The environment is new, with nothing but the kit installed in it (`--no-deps`): a .pth file shows it the packages of
the one that the tests run in, so that torch is not installed again.
"""

import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests import processes, sandbox
from tests.conftest import ROOT
from tests.unit.test_install import requirement_lines

ROOMS = ("kit", "recipes", "reward", "launch", "merge", "eval", "accelerate_configs")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PLAIN = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def checked(*command: object, cwd: Path = ROOT) -> str:
    done = processes.run(list(map(str, command)), cwd=cwd, env=PLAIN)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def fresh_environment(folder: Path, *what: object) -> Path:
    """The `bin` of a new environment in which pip has installed `what`, without dependencies."""
    checked(sys.executable, "-m", "venv", "--without-pip", folder)
    library = folder / sysconfig.get_path("purelib", vars={"base": ""}).lstrip("/")
    (library / "of_the_tests.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--python", folder / "bin/python")
    checked(*pip, "install", "--no-deps", "--no-index", "--no-build-isolation", *what)
    return folder / "bin"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check")
    checked(*pip, "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", folder, ROOT)
    (file,) = folder.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    return fresh_environment(tmp_path_factory.mktemp("wheel") / "venv", wheel)


def test_the_wheel_is_one_package_with_every_file_of_the_rooms(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert {name.split("/")[0] for name in names} == {"grpo_kit"}
    rooms = {str(name) for name in sandbox.tracked_files(ROOT) if name.parts[0] in ROOMS}
    others = {"__init__.py", "requirements.txt", "requirements-cpu.txt", "requirements-cuda.txt"}
    assert {name.removeprefix("grpo_kit/") for name in names} == rooms | others


def imports_nothing_of_ours(python: Path, folder: Path) -> None:
    program = (
        "import importlib.util, math\n"
        f"print(*(name for name in {(*ROOMS, 'bench', 'tests', 'src')} if importlib.util.find_spec(name)))\n"
        "print(math.__spec__.origin)\nimport grpo_kit\nprint(importlib.util.find_spec('eval'))"
    )
    found, origin, evaluation = checked(python, "-c", program, cwd=folder).splitlines()
    assert (found, evaluation) == ("", "None")
    assert origin == "built-in" or "lib-dynload" in origin


def test_nothing_but_the_package_can_be_imported_and_math_is_pythons(installed, tmp_path):
    imports_nothing_of_ours(installed / "python", tmp_path)
    done = processes.run([installed / "python", "-c", "import eval"], cwd=tmp_path, env=PLAIN)
    assert done.returncode == 1 and "No module named 'eval'" in done.stderr


def test_an_editable_install_shows_the_package_alone_and_runs_the_checkout(tmp_path):
    tools = fresh_environment(tmp_path / "venv", "--editable", ROOT)
    imports_nothing_of_ours(tools / "python", tmp_path)
    where = checked(tools / "kit", "python", "-c", "import eval; print(eval.__file__)", cwd=tmp_path)
    assert where.strip() == str(ROOT / "eval/__init__.py")


def test_a_user_goes_from_ls_to_a_merged_checkpoint_with_the_wheel_alone(installed, tiny_model_dir, tmp_path):
    kit = installed / "kit"
    assert "grpo-tiny-nf4-cpu\tgrpo_qlora.py\t2 CPU cores\t" in checked(kit, "ls", cwd=tmp_path)
    checked(kit, "cp", "grpo-tiny-nf4-cpu", "my.yaml", cwd=tmp_path)
    (tmp_path / "reward.py").write_text("raise RuntimeError('a file of the user')")
    model = (f"--model.path={tiny_model_dir}", f"--data.path={tiny_model_dir}")
    assert "GiB" in checked(kit, "plan", "--config", "my.yaml", *model, cwd=tmp_path)
    short = (*model, "--train.max_steps=1", "--rollout.max_completion_length=8")
    said = checked(kit, "train", "my.yaml", "--dry_run", *short, cwd=tmp_path)
    assert "grpo_kit/accelerate_configs/cpu.yaml" in said and not (tmp_path / "runs").exists()
    assert "step 1/1" in checked(kit, "train", "my.yaml", *short, cwd=tmp_path)
    checked(kit, "merge", "--run", "runs/tiny", "--format", "bf16", "--policy", "grpo", cwd=tmp_path)
    assert list((tmp_path / "runs/tiny/merged/grpo/bf16").glob("*.safetensors"))
    # What a message says, with `kit` before it.
    checked(kit, "python", "-m", "launch.watch", "runs/tiny", "--once", cwd=tmp_path)
    refused = processes.run([kit, "merge", "--run", "runs/none", "--format", "bf16"], cwd=tmp_path, env=PLAIN)
    assert refused.returncode == 2 and refused.stderr.startswith("error: ")


def test_a_wheel_names_no_revision_of_the_repository_that_it_is_installed_in(installed, tmp_path):
    program = "from kit.train.record import git_revision; print(git_revision())"
    site = checked(installed / "python", "-c", "import grpo_kit; print(grpo_kit.__path__[0])", cwd=tmp_path).strip()
    git = ("git", "-C", site, "-c", "user.name=a", "-c", "user.email=a@b")
    checked(*git, "init", "--quiet")
    checked(*git, "commit", "--quiet", "--allow-empty", "--message", "another project")
    assert checked(installed / "kit", "python", "-c", program, cwd=tmp_path) == "None\n"


def test_the_wheel_requires_what_the_requirements_files_pin():
    def pinned(name: str) -> set[str]:
        return {str(Requirement(line)) for line in requirement_lines(ROOT / name)}

    text = (ROOT / "requirements.txt").read_text()
    tests = set(re.findall(r"^[\w.-]+==\S+", text.partition("# --- tests and lint")[2], re.M))
    project = PROJECT["project"]
    assert set(project["dependencies"]) == pinned("requirements.txt") - tests
    extras = {name: set(lines) for name, lines in project["optional-dependencies"].items()}
    torch = {line for line in pinned("requirements-cpu.txt") if line.startswith("torch==")}
    assert extras == {"cpu": pinned("requirements-cpu.txt") - torch, "cuda": pinned("requirements-cuda.txt")}
    assert set(PROJECT["build-system"]["requires"]) <= tests


def test_the_command_tells_a_typo(installed, tmp_path):
    done = subprocess.run([installed / "kit", "trian"], cwd=tmp_path, env=PLAIN, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "error: unknown command trian. Did you mean train?\n")
