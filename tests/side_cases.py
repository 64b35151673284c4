"""Tests that run inside a side environment, beside the package that it is for.

A file `*_cases.py` holds them as plain pytest functions. `cases` lists their names, for a test of this environment to
be parametrized with, and `results` runs all of them by the side environment's interpreter.
"""

import ast
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from tests import processes, sandbox


def cases(file: Path) -> list[str]:
    """Names of the tests in `file`, which is not imported: its packages are not here."""
    return [
        node.name
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]


def results(environment: str, file: Path, folder: Path) -> dict[str, str]:
    """What each test of `file` said in `.venv-<environment>`: "" if it passed."""
    python, report = sandbox.side_environment(environment) / "bin/python", folder / "report.xml"
    options = ["-q", "--noconftest", "-p", "no:cacheprovider", "-p", "no:xdist", f"--junitxml={report}"]
    done = processes.run([python, "-m", "pytest", file, *options], cwd=sandbox.ROOT)
    assert report.is_file(), f"{done.stdout}\n{done.stderr}"
    found = dict.fromkeys(cases(file), "did not run: " + done.stdout[-2000:])
    for case in ElementTree.parse(report).iter("testcase"):
        name = str(case.get("name")).partition("[")[0]
        failed = "".join(part.text or str(part.get("message")) for part in case if part.tag in ("failure", "error"))
        found[name] = failed if found[name].startswith("did not run") else found[name] + failed
    return found
