"""References of code tasks: the tests that a completion must pass, as JSON text in the column `gold`.

    {"tests": ["assert add(1, 2) == 3", …], "setup": "import math", "prompt": "", "names": ["add"]}

`prompt` is code that the model was shown and may rely on; it runs before the completion and before the tests. `setup`
runs only before the tests and stays hidden. `names` are the functions that the tests call and the completion must
define; by default, the names that the tests use and nothing defines. Also accepted: `entry_point` for a single name,
and `test` for a text instead of a list; one that defines `check`, as HumanEval's do, is followed by
`check(entry_point)`.
"""

import ast
import builtins
import json
import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from reward.sandbox import Job

FORMATS = ("code", "mbpp", "humaneval")
_KEYS = {"tests", "test", "setup", "prompt", "names", "entry_point"}


def gold_from_row(row: Mapping[str, Any], answer_format: str, column: str) -> tuple[str | None, str]:
    """The `gold` text of a data set's row, or None and what is wrong with the row.

    `code`: `column` holds the JSON described above, as text or as an object. `mbpp`: `column` (test_list) holds the
    asserts, beside test_imports and test_setup_code. `humaneval`: `column` (test) defines `check`, beside prompt and
    entry_point.
    """
    value = row.get(column)
    if answer_format == "mbpp":
        imports = row.get("test_imports") or []
        value = {"tests": value, "prompt": "\n".join(imports), "setup": row.get("test_setup_code") or ""}
        value["names"] = _tested_functions(row.get("code"), value["tests"])
        value["setup"] += _forgotten_imports(value["tests"], value["names"])
    elif answer_format == "humaneval":
        value = {"test": value, "prompt": row.get("prompt") or "", "entry_point": row.get("entry_point")}
    if isinstance(value, Mapping):
        value = json.dumps(value)
    if not isinstance(value, str):
        return None, f"the tests are {value!r:.40}, not JSON text"
    try:
        job = read_gold(value)
    except ValueError as error:
        return None, str(error)
    kept = {"tests": list(job.tests), "setup": job.setup, "prompt": job.prompt, "names": list(job.names)}
    return json.dumps(kept), ""


def shown_test(gold: str) -> str:
    """The first test, to append to MBPP's question: it gives the function's name and arguments."""
    return f"\n\nYour code is tested like this:\n{read_gold(gold).tests[0]}"


@lru_cache(maxsize=4096)
def read_gold(gold: str) -> Job:
    """Parse a `gold` text into a job without code; `ValueError` says what is wrong with it."""
    try:
        value = json.loads(gold)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"the tests are not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"the tests are a JSON {type(value).__name__}, expected an object")
    if unknown := set(value) - _KEYS:
        raise ValueError(f"unknown key {min(unknown)!r}, expected some of {', '.join(sorted(_KEYS))}")
    if ("tests" in value) == ("test" in value):
        raise ValueError("expected either 'tests' (a list) or 'test' (a text)")
    setup, prompt = _text(value, "setup"), _text(value, "prompt")
    names = [value["entry_point"]] if value.get("entry_point") is not None else list(value.get("names") or [])
    if any(not isinstance(name, str) or not name.isidentifier() for name in names):
        raise ValueError(f"the names of the tested functions are {names!r:.60}")
    tests = value.get("tests")
    if tests is None:
        setup, tests = _check_function(setup, _text(value, "test"), names)
    if not isinstance(tests, list) or not tests or any(not isinstance(t, str) or not t.strip() for t in tests):
        raise ValueError(f"the tests are {tests!r:.60}, expected a list of statements")
    undefined = _undefined([prompt, setup, *tests])
    if forgotten := [name for name in undefined if name in sys.stdlib_module_names and name not in names]:
        raise ValueError(f"the tests use the module {forgotten[0]} without importing it; add it to setup")
    names = list(dict.fromkeys([*names, *undefined]))
    if not names:
        raise ValueError("the tests call nothing that a completion would define; give entry_point")
    if not any(_uses(text, names) for text in [setup, *tests]):
        raise ValueError(f"the tests never use {', '.join(names)}")
    return Job(code="", tests=tuple(tests), names=tuple(names), setup=setup, prompt=prompt)


def _tested_functions(solution: Any, tests: Any) -> list[str]:
    """Functions of a reference solution that the tests call; one of MBPP's is named sum, like Python's builtin."""
    if not isinstance(solution, str) or not isinstance(tests, list) or not all(isinstance(t, str) for t in tests):
        return []
    try:
        defined = [node.name for node in _parse(solution).body if isinstance(node, ast.FunctionDef)]
        return [name for name in defined if any(_uses(test, [name]) for test in tests)]
    except ValueError:
        return []


def _forgotten_imports(tests: Any, names: list[str]) -> str:
    """Import statements for modules that MBPP's tests use but leave to the solution to import."""
    try:
        used = _undefined(tests) if isinstance(tests, list) else []
    except (ValueError, TypeError):
        return ""  # reported by read_gold
    return "".join(f"\nimport {name}" for name in used if name in sys.stdlib_module_names and name not in names)


def _text(value: dict, key: str) -> str:
    text = value.get(key) or ""
    if not isinstance(text, str):
        raise ValueError(f"{key} is a {type(text).__name__}, expected text")
    return text


def _check_function(setup: str, test: str, names: list[str]) -> tuple[str, list[str]]:
    """Setup and tests of a `test` text: HumanEval's `check` moves to the setup and is called once."""
    if not any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in _parse(test).body):
        return setup, [test]
    if len(names) != 1:
        raise ValueError("the test defines check(candidate) and entry_point does not say what to check")
    return f"{setup}\n{test}", [f"check({names[0]})"]


def _parse(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{type(error).__name__} in the tests: {error}") from None


def _uses(text: str, names: list[str]) -> bool:
    return any(isinstance(node, ast.Name) and node.id in names for node in ast.walk(_parse(text)))


def _undefined(texts: list[str]) -> list[str]:
    """Names that the texts read but neither they nor Python define, in order of first use."""
    read, defined = [], set(dir(builtins)) | {"__name__"}
    for node in (node for text in texts for node in ast.walk(_parse(text))):
        if isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Load):
                read.append((node.lineno, node.col_offset, node.id))
            else:
                defined.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, ast.alias):
            defined.add((node.asname or node.name).split(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            defined.add(node.name)
    return list(dict.fromkeys(name for *_, name in sorted(read) if name not in defined))
