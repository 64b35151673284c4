"""The limit on a process that a test starts is on its progress."""

import ast
import os
import re
import subprocess
import sys
import time

import pytest

from tests import processes
from tests.conftest import ROOT

WORKS = "import time\nuntil = time.process_time() + {cpu}\nwhile time.process_time() < until: pass\nprint('done')"
# Its child works, it only waits.
PARENT = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', sys.argv[1]])"


@pytest.mark.parametrize("parent", [False, True], ids=["itself", "its child"])
def test_a_process_that_works_is_waited_for_beyond_the_limit(parent, monkeypatch):
    monkeypatch.setattr(processes, "LEAST_CPU_S", 0.01)
    program = WORKS.format(cpu=1.5)
    command = [sys.executable, "-c", PARENT, program] if parent else [sys.executable, "-c", program]
    started = time.monotonic()
    done = processes.run(command, still_s=1.0)
    assert (done.returncode, done.stdout) == (0, "done\n") and time.monotonic() - started > 1.5


def test_a_process_that_stands_still_is_killed_with_its_group_and_what_it_said_is_told():
    program = (
        "import subprocess, sys, time\nchild = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)'])"
    )
    program += "\nprint('child', child.pid, flush=True)\ntime.sleep(99)"
    with pytest.raises(AssertionError, match=r"did nothing for 0.8 s and was killed. child \d+") as error:
        processes.run([sys.executable, "-c", program], still_s=0.8)
    child = int(str(error.value).split("child ")[-1].split()[0])
    processes.wait_until(lambda: not os.path.exists(f"/proc/{child}") or ") Z " in open(f"/proc/{child}/stat").read())


def test_a_wait_ends_with_the_process_it_waits_on():
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"], stdout=subprocess.PIPE, text=True)
    with pytest.raises(AssertionError, match="ended with exit code 3"):
        processes.wait_until(lambda: False, process)
    with pytest.raises(AssertionError, match=r"nothing happened for 0\.1 s"):
        processes.wait_until(lambda: False, still_s=0.1)


def limits(source: str) -> list[int]:
    """Lines that limit a process by the clock: `subprocess.run`, `.communicate` and `.wait` with a timeout."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            named = [key.value for key in node.keywords if key.arg == "timeout"]
            numbers = named and not (isinstance(named[0], ast.Constant) and named[0].value is None)
            is_task = isinstance(node.func.value, ast.Name) and node.func.value.id == "asyncio"
            if numbers and not is_task and node.func.attr in ("run", "communicate", "wait", "check_output"):
                found.append(node.lineno)
            if node.func.attr == "timeout" and isinstance(node.func.value, ast.Attribute):  # pytest.mark.timeout(…)
                found.append(node.lineno)
    return found


def test_no_test_limits_a_process_by_the_clock():
    source = (
        "subprocess.run(x, timeout=60)\np.communicate(timeout=5)\n@pytest.mark.timeout(9)\ndef f(): get(u, timeout=3)"
    )
    assert sorted(limits(source)) == [1, 2, 3]
    files = [file for folder in ("unit", "smoke", "chaos") for file in (ROOT / "tests" / folder).glob("*.py")]
    texts = {file.name: text for file in files if re.search(r"\btimeout\b", text := file.read_text())}
    wrong = [f"{name}:{line}" for name, text in texts.items() for line in limits(text)]
    assert wrong == [], "use tests/processes.py: run, finish or wait_until"
