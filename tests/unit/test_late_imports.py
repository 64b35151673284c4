"""`--help` of every command, and what a command refuses at once, waits for no large library."""

import json
import subprocess
import sys

from tests.conftest import ROOT

# Each takes a large part of a second to import, torch and transformers several.
LARGE = ("torch", "transformers", "trl", "peft", "datasets", "vllm", "bitsandbytes", "scipy", "matplotlib", "sympy")
# What a command starts in a process of its own; a user never types it.
WORKERS = {
    "launch.export.schema",
    "launch.starting.leash",
    "launch.checks.steps",
    "merge.awq",
    "merge.llamacpp",
    "eval.vllm_worker",
}
WORKERS |= {"reward.worker", "reward.sandbox_child"}
FURTHER = {
    "merge": ["base", "dequantize", "diagnose", "card", "gguf", "import", "verify"],
    "eval": ["gate", "report", "endpoint", "lm_eval"],
    "reward": ["check", "attack", "audit"],
    "launch.export": ["verl"],
}
PROGRAM = """
import contextlib, io, json, runpy, sys
commands, large, found = *json.loads(sys.argv[1]), {}
for words in commands:
    sys.argv, said = [*words, "--help"], io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        runpy.run_module(words[0], run_name="__main__")
    found[" ".join(words)] = [said.getvalue(), sorted({*large} & {*sys.modules})]
print(json.dumps(found))
"""


def commands() -> list[list[str]]:
    """Every `python -m …` of the rooms that a user types, with its further commands."""
    files = [
        file
        for room in ("kit", "recipes", "merge", "eval", "launch", "reward")
        for file in (ROOT / room).rglob("*.py")
    ]
    names = {
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
        for file in files
        if 'if __name__ == "__main__"' in file.read_text()
    }
    return [
        [name, *word] for name in sorted(names - WORKERS) for word in [[], *([one] for one in FURTHER.get(name, []))]
    ]


def test_help_imports_no_large_library():
    words = [sys.executable, "-c", PROGRAM, json.dumps([commands(), LARGE])]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {"eval", "eval gate", "merge", "merge base", "launch.up", "recipes.tiny_base", "reward check"} <= set(found)
    assert {name: said for name, (said, _) in found.items() if "usage: " not in said} == {}
    # All run in one process: the first that imports one is the one to look at.
    assert next(((name, large) for name, (_, large) in found.items() if large), None) is None
