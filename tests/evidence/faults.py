"""Which subtle faults the fast tests notice: puts each fault of a list into a copy of the kit and runs its tests.

    python tests/evidence/faults.py                      # every list in tests/evidence/fault_list
    python tests/evidence/faults.py --only sync canary   # the faults of files whose path contains one of these
    python tests/evidence/faults.py --processes 16       # on that many cores

A fault is one replacement of text in one file, with the tests that should fail because of it. The tests of a file's
faults run once without any first, and must pass. Third-party packages are imported once; each run is a fork, so a
fault takes seconds. Prints a row per file and every fault that no test noticed; exit code 1 when there is one.

Tests of a side environment that was not made (`make openenv verifiers`) notice nothing.

Not covered: faults that nobody thought of, and whether a test fails for the reason that the fault gives.
"""

import argparse
import importlib
import itertools
import multiprocessing
import os
import runpy
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections import Counter, defaultdict
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
LISTS = Path(__file__).parent / "fault_list"
PRELOADED = ("numpy", "torch", "datasets", "transformers", "trl", "peft", "bitsandbytes", "accelerate", "requests")
PRELOADED += ("scipy.stats", "torch._dynamo", "transformers.models.qwen3.modeling_qwen3", "peft.tuners.lora", "pytest")
LIMIT_S = 600.0  # a fault may make a test wait for ever: that is noticed too


@dataclass(frozen=True)
class Fault:
    """`old`, which stands once in `file`, becomes `new`; `tests` are the pytest ids that fail because of it."""

    file: str
    fault: str
    old: str
    new: str
    tests: tuple[str, ...]

    def put_in(self, root: Path) -> None:
        """Write the fault into the copy at `root`; `ValueError` when its text does not stand there exactly once."""
        text = (root / self.file).read_text()
        if (found := text.count(self.old)) != 1:
            raise ValueError(f"{self.file}: the text of {self.fault!r} stands there {found} times, expected once.")
        (root / self.file).write_text(text.replace(self.old, self.new))


def read_faults(folder: Path = LISTS) -> list[Fault]:
    """The faults of every list, sorted by file."""
    rows = [row for path in sorted(folder.glob("*.toml")) for row in tomllib.loads(path.read_text())["fault"]]
    return sorted((Fault(**row | {"tests": tuple(row["tests"])}) for row in rows), key=lambda fault: fault.file)


def copy_kit(folder: Path, names: list[Path]) -> Path:
    """A copy of the files of the kit that have these names, with links to the side environments that there are."""
    for name in names:
        (target := folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target)
    for made in ROOT.glob(".venv-*/.installed"):
        (folder / made.parent.name).symlink_to(made.parent.resolve())
    return folder


def run_tests(root: Path, tests: tuple[str, ...], log: Path) -> int:
    """pytest's exit code for `tests` in the copy at `root`, in a fork; -1 after `LIMIT_S`."""
    sys.stdout.flush()
    if (pid := os.fork()) == 0:
        code = 70
        try:
            os.setsid()
            os.chdir(root)
            with open(log, "w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            options = [
                "-x",
                "-q",
                "-p",
                "no:cacheprovider",
                "-p",
                "no:xdist",
                "-p",
                "no:unraisableexception",
                "--rootdir",
                str(root),
            ]
            code = int(importlib.import_module("pytest").main([*options, *tests]))
        finally:
            os._exit(code)
    began = time.monotonic()
    while time.monotonic() - began < LIMIT_S:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return -1


def verdict(root: Path, fault: Fault, log: Path, passing: dict[tuple[str, ...], bool]) -> str:
    """ "noticed", "missed", or what is wrong with the row: its tests fail without the fault, or collect nothing."""
    if not fault.tests:
        return "missed"
    if fault.tests not in passing:
        passing[fault.tests] = run_tests(root, fault.tests, log) == 0
    if not passing[fault.tests]:
        return f"its tests do not pass without it: {log.read_text()[-600:]}"
    whole = (root / fault.file).read_text()
    try:
        fault.put_in(root)
        code = run_tests(root, fault.tests, log)
    finally:
        (root / fault.file).write_text(whole)
    return "missed" if code == 0 else "noticed"


MINE: dict = {}  # of this process: its copy of the kit, its log, and which tests pass there without a fault


def start(folder: str, names: list[Path], mark: str) -> None:
    """Make this process's copy of the kit; `mark` is the variable by which pytest knows that it is one."""
    own = Path(tempfile.mkdtemp(dir=folder)).resolve()
    MINE.update(root=copy_kit(own / "kit", names), log=own / "log", passing={})
    os.environ[mark] = str(MINE["root"])


def check(faults: list[Fault]) -> list[tuple[Fault, str, float]]:
    """The verdicts on the faults of a file, with their seconds."""
    root, log, passing, found = MINE["root"], MINE["log"], MINE["passing"], []
    if run_tests(root, tuple(dict.fromkeys(test for fault in faults for test in fault.tests)), log) == 0:
        passing |= {fault.tests: True for fault in faults}  # else each fault's tests run by themselves
    for fault in faults:
        began = time.monotonic()
        said = verdict(root, fault, log, passing)
        found.append((fault, said, time.monotonic() - began))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--only", nargs="+", default=[""], help="parts of paths: the faults of these files")
    parser.add_argument("--processes", type=int, default=1, help="faults at a time, each in a copy of its own")
    parser.add_argument(
        "--verbose", action="store_true", help="a line for each fault, when those of its file are done"
    )
    arguments = parser.parse_args()
    faults = [fault for fault in read_faults() if any(part in fault.file for part in arguments.only)]
    sys.dont_write_bytecode = True  # a fault of the same length, put in within a second, would run as the last one's
    sandbox = runpy.run_path(str(ROOT / "tests" / "sandbox.py"))  # not as tests.sandbox, which forks import anew
    os.environ |= {"PYTHONDONTWRITEBYTECODE": "1", **sandbox["SET"]}
    for name in PRELOADED:
        importlib.import_module(name)
    counts, noticed, missed, by_file = Counter(), Counter(), [], defaultdict(list)
    for fault in faults:
        by_file[fault.file].append(fault)
    groups = sorted(by_file.values(), key=len, reverse=True)  # the long ones first, so that the processes end together
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("fork")  # with what is imported
        shared = folder, sandbox["tracked_files"](ROOT), sandbox["MARK"]
        with ProcessPoolExecutor(arguments.processes, context, start, shared) as pool:
            done = as_completed([pool.submit(check, group) for group in groups])
            for fault, said, seconds in itertools.chain.from_iterable(one.result() for one in done):
                counts[fault.file] += 1
                noticed[fault.file] += said == "noticed"
                if said != "noticed":
                    missed.append(f"{fault.file}: {fault.fault}: {said}")
                if arguments.verbose:
                    print(f"{said.splitlines()[0][:60]:10} {seconds:5.1f} s  {fault.file}: {fault.fault}", flush=True)
    print("| file | faults | noticed |\n|---|---|---|")
    for file, count in sorted(counts.items()):
        print(f"| {file} | {count} | {noticed[file]} |")
    print(f"| all | {counts.total()} | {noticed.total()} |")
    print(*sorted(missed), sep="\n")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
