"""The Dockerfile: every file it copies is there, the environment is the CUDA one, no rights and no surprises at start.

It is not built: that takes a Docker daemon, a registry and 20 GB. hadolint reads it, and the steps that need neither
root nor packages run in a clean directory: what it copies, and `make install` with a pip that only records.
"""

import re
import shlex
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.sandbox import tracked_files

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "launch/docker/Dockerfile"
INSTRUCTIONS = {"FROM", "RUN", "ARG", "USER", "WORKDIR", "COPY", "ENV", "VOLUME", "ENTRYPOINT", "CMD"}


def instructions(text: str) -> list[tuple[str, str]]:
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    found = [line.strip().partition(" ") for line in lines.replace("\\\n", " ").splitlines() if line.strip()]
    return [(name, " ".join(rest.split())) for name, _, rest in found]


def ignored(path: str) -> bool:
    """Whether .dockerignore keeps a path of the checkout out of the build."""
    rules = (line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#"))
    parts = path.split("/")
    starts = ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]
    return any(
        fnmatch(part, rule.removeprefix("**/")) for rule in rules for part in (parts if "**/" in rule else starts)
    )


def complaints(text: str) -> list[str]:
    found, given = [], instructions(text)
    if unknown := {name for name, _ in given} - INSTRUCTIONS:
        found.append(f"unknown instructions {sorted(unknown)}")
    last = {name: value for name, value in given}
    if not re.fullmatch(r"nvidia/cuda:13\.0\.\d-devel-ubuntu24\.04", last.get("FROM", "")):
        found.append("the base image is not pinned to a tag of CUDA 13.0 with its compiler")
    for name, value in given:
        words = [word for word in shlex.split(value) if not word.startswith("--")]
        if name == "COPY":
            found += [f"no {word}" for word in words[:-1] if not (ROOT / word).exists() or ignored(word)]
    if last.get("USER") in (None, "root", "0"):
        found.append("it runs as root")
    if last.get("ENTRYPOINT") != "[]":
        found.append("the base image's entry point is kept")
    install = [value for name, value in given if name == "RUN" and "make install" in value]
    python = re.search(r"PYTHON=python(\d+)\.(\d+)", install[0]) if len(install) == 1 else None
    if not python or "DEVICE=cuda" not in install[0]:
        return [*found, "it does not install the CUDA environment"]
    least = re.search(r"v >= \((\d+), (\d+)\)", (ROOT / "Makefile").read_text())
    if tuple(map(int, python.groups())) < tuple(map(int, least.groups())):
        found.append("its Python is older than the Makefile takes")
    apt = next(value for name, value in given if name == "RUN" and "apt-get install" in value)
    for package in (f"python{'.'.join(python.groups())}-{part}" for part in ("dev", "venv")):
        if package not in apt.split():
            found.append(f"{package} is not installed")
    copied = next(value for name, value in given if name == "COPY").split()
    for file in ("Makefile", *re.findall(r"requirements[\w-]*\.txt", _prerequisites())):
        if file not in copied:
            found.append(f"make install needs {file}, which is not there yet")
    return found


def _prerequisites() -> str:
    return re.search(r"^\$\(STAMP\):(.*)$", (ROOT / "Makefile").read_text(), re.M)[1]


def test_the_image_is_made_from_files_that_exist_for_cuda_and_without_rights():
    assert complaints(DOCKERFILE.read_text()) == []
    assert "vllm==" in (ROOT / "requirements-cuda.txt").read_text()
    assert ignored(".venv/bin/python")
    assert ignored("launch/__pycache__/x.pyc")
    assert not any(map(ignored, ("launch/up.py", "recipes/configs/grpo-tiny-nf4-cpu.yaml", "Makefile")))


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("13.0.2-devel-ubuntu24.04", "latest", "not pinned"),
        ("13.0.2-devel", "13.0.2-runtime", "with its compiler"),
        ("requirements-cuda.txt ./", "requirements-gpu.txt ./", "no requirements-gpu.txt"),
        ("requirements-cuda.txt ./", "./", "make install needs requirements-cuda.txt"),
        ("COPY --chown=kit . .", "COPY runs .", "no runs"),
        ("USER ${UID}", "USER root", "it runs as root"),
        ("ENTRYPOINT []", "", "entry point is kept"),
        ("DEVICE=cuda", "DEVICE=cpu", "does not install the CUDA environment"),
        ("PYTHON=python3.12", "PYTHON=python3.10", "older than the Makefile takes"),
        ("python3.12-venv", "", "python3.12-venv is not installed"),
        ("WORKDIR", "WORKIDR", "unknown instructions ['WORKIDR']"),
    ],
)
def test_a_planted_fault_is_found(old, new, complaint):
    text = DOCKERFILE.read_text()
    assert old in text
    assert complaint in "\n".join(complaints(text.replace(old, new)))


def lint(text: str) -> str:
    """What hadolint says of a Dockerfile."""
    command = [Path(sys.executable).with_name("hadolint"), "--no-color", "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True).stdout


def test_the_linter_has_nothing_to_say():
    text = DOCKERFILE.read_text()
    assert lint(text) == ""
    assert "DL3008" in lint(text.replace("# hadolint ignore=DL3008\n", ""))
    assert "DL3002" in lint(text.replace("USER ${UID}", "USER root"))


PYTHON = """#!/bin/sh
# python3.12 of the image: another version, and `-m venv` makes a pip that only records what it is asked for.
[ "$1 $2" = "-m venv" ] || exec {python} "$@"
mkdir -p "$3/bin" "$3/lib"
ln -s {python} "$3/bin/python"
printf '#!/bin/sh\\necho "$@" >> {asked}\\n' > "$3/bin/pip"
chmod +x "$3/bin/pip"
"""


def copied(words: list[str], place: Path) -> None:
    """Carry out a COPY into `place`: files of the checkout that .dockerignore leaves in."""
    *sources, _ = [word for word in words if not word.startswith("--")]
    for file in tracked_files(ROOT):
        if any(source == "." or file == Path(source) for source in sources) and not ignored(str(file)):
            (place / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / file, place / file)


def test_its_steps_run_in_a_clean_directory(tmp_path):
    place, asked = tmp_path / "kit", tmp_path / "asked"
    place.mkdir()
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python3.12"
    python.write_text(PYTHON.format(python=sys.executable, asked=asked))
    python.chmod(0o755)
    environment = {"PATH": f"{python.parent}:/usr/bin:/bin", "HOME": str(tmp_path)}

    def run(line: str) -> str:
        done = subprocess.run(["bash", "-c", line], cwd=place, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    steps = instructions(DOCKERFILE.read_text())
    after_user = steps[[name for name, _ in steps].index("USER") :]
    assert [name for name, _ in after_user if name in ("COPY", "RUN")] == ["COPY", "RUN", "COPY"]
    for name, value in after_user:
        if name == "COPY":
            copied(shlex.split(value), place)
        elif name == "RUN":
            run(value)
    assert asked.read_text().split("\n") == ["install --quiet --no-compile -r requirements-cuda.txt", ""]
    install = next(value for name, value in after_user if name == "RUN")
    run(install)
    assert len(asked.read_text().splitlines()) == 1  # the code that was copied after it installs nothing anew
    listed = subprocess.run(
        [sys.executable, "-m", "kit", "ls"], cwd=place, env=environment, capture_output=True, text=True
    )
    configs = {file.stem for file in (ROOT / "recipes/configs").rglob("*.yaml")}
    assert {line.split("\t")[0] for line in listed.stdout.splitlines()} >= configs, listed.stderr
