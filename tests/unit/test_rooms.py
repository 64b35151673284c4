"""The rooms of the repository: who may import whom, the length of functions and the names of files, by syntax."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import processes

ROOT = Path(__file__).parents[2]
MOST_FUNCTION_LINES = 80  # a screen; a file has no limit: it splits by subject
EMPTY_NAMES = {"utils", "util", "helpers", "helper", "misc", "common"}

FOUNDATION = ("recipes.parts.errors", "recipes.parts.rundir", "recipes.parts.config", "recipes.parts.lora")
FOUNDATION += (
    "recipes.parts.choices",
    "recipes.parts.config_types",
    "recipes.parts.quant_format",
    "recipes.parts.own_format",
)
FOUNDATION += ("recipes.parts.served_format", "recipes.parts.recipe", "recipes.parts.modelopt_config")
FOUNDATION += ("recipes.parts.stored_base", "recipes.parts.chat", "recipes.parts.runstate")
# What both sides of the rollout server speak; part of the foundation, with two libraries more.
WIRE = ("recipes.parts.replica", "recipes.parts.canary")
FOUNDATION_LIBRARIES = {"yaml"}
WIRE_LIBRARIES = {"numpy", "requests"}
LIBRARIES_IN_FUNCTIONS = {
    "recipes.parts.quant_format": {"torch"},  # to look at the GPU
    "recipes.parts.chat": {"transformers", "jinja2"},  # whose dialect a chat template is written in
}
# Every room may import itself and the foundation.
MAY_IMPORT = {
    "reward": (),
    # A policy that was trained for a format is scored with its quantizers.
    "merge": ("recipes.parts.data", "recipes.parts.fake_quant", "recipes.parts.qat"),
    "recipes.parts": ("reward", "merge"),
    # `train.recompute: auto`, and what a replica takes of a shared card, are the plan's arithmetic; the alerts at the
    # end of a run are the watcher's.
    "recipes.parts.setup": (
        "recipes.parts",
        "reward",
        "launch.planning.recompute",
        "launch.planning.replica",
        "launch.watching.health",
        "launch.watching.metrics",
    ),
    "recipes": ("recipes.parts", "reward", "merge"),
    # A benchmark starts and ends servers as a run does, and a report reads a run's metrics as the watcher does.
    "eval": (
        "recipes.parts.data",
        "recipes.parts.leaks",
        "recipes.parts.kept_weights",
        "reward",
        "merge",
        "launch.watching.metrics",
        "launch.replicas",
        "launch.vllm_command",
    ),
    # Jobs are checked before they wait in a queue; an export translates the data and the rewards too; the plan counts
    # the layers that are run again, a calibration and a teacher. A server's workers compute in the policy's numbers
    # and make its noise.
    "launch": (
        "recipes.parts.checks",
        "recipes.parts.shared_card",
        "recipes.parts.data",
        "recipes.parts.recompute",
        "recipes.parts.calibration",
        "recipes.parts.distill",
        "recipes.parts.fake_quant",
        "recipes.parts.noise",
        "recipes.parts.trl_fields",
        "reward",
    ),
    # A worker reads a base that is not in NF4 from its checkpoint.
    "launch.base_copy": ("launch", "merge.checkpoint", "merge.fp8"),
    # What the doctor tries in child processes: the policy as the trainer loads it, and what the recipe refuses before.
    "launch.checks.steps": ("launch", "merge.base", "recipes.parts"),
}
NOT_ROOMS = {"bench", "tests", "runs", "models"}


def sources(root: Path, rooms_only: bool = True) -> list[Path]:
    """Every Python file of the rooms, or of the rooms and the tests."""
    left_out = NOT_ROOMS if rooms_only else NOT_ROOMS - {"bench", "tests"}
    folders = [entry for entry in sorted(root.iterdir()) if entry.is_dir() and not entry.name.startswith(".")]
    return [file for folder in folders if folder.name not in left_out for file in sorted(folder.rglob("*.py"))]


def module_name(root: Path, file: Path) -> str:
    parts = file.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def imports(root: Path, file: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of everything a file imports, wherever the import stands.

    `from a import b` gives a.b: b may be a module. Names given to `import_module` as text count too.
    """
    package = file.relative_to(root).parent.parts
    for node in ast.walk(ast.parse(file.read_text(), str(file))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            start = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{start}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            if node.args and isinstance(node.args[0], ast.Constant):
                yield node.lineno, str(node.args[0].value)


def import_violations(root: Path) -> list[str]:
    """One line per forbidden import, and per folder that no rule covers."""
    files = sources(root)
    own = {file.relative_to(root).parts[0] for file in files}
    found = []
    for file in files:
        module = module_name(root, file)
        room = max((name for name in MAY_IMPORT if is_within(module, name)), key=len, default=None)
        if room is None:
            found.append(f"{file.relative_to(root)}: no rule says what {module.split('.')[0]}/ may import")
            continue
        is_foundation = module in (*FOUNDATION, *WIRE)
        allowed = FOUNDATION if is_foundation else (*FOUNDATION, *WIRE, room, *MAY_IMPORT[room])
        libraries = FOUNDATION_LIBRARIES | (WIRE_LIBRARIES if module in WIRE else set())
        libraries |= LIBRARIES_IN_FUNCTIONS.get(module, set())
        for line, name in imports(root, file):
            top = name.split(".")[0]
            if top in own:
                # A package's __init__ may be imported by whoever may import something inside it.
                fine = any(is_within(name, package) for package in allowed)
            else:
                fine = not is_foundation or top in sys.stdlib_module_names or top in libraries
            if not fine:
                who = "the foundation" if is_foundation else room
                found.append(f"{file.relative_to(root)}:{line}: {who} may not import {name}")
    return found


def shape_violations(root: Path) -> list[str]:
    """One line per function that is too long and per file with a name that says nothing."""
    found = []
    for file in sources(root, rooms_only=False):
        text, where = file.read_text(), file.relative_to(root)
        if EMPTY_NAMES & {part.removesuffix(".py") for part in where.parts}:
            found.append(f"{where}: the name says nothing about what is inside")
        for node in ast.walk(ast.parse(text, str(file))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = node.end_lineno - node.lineno + 1
                if length > MOST_FUNCTION_LINES:
                    found.append(
                        f"{where}:{node.lineno}: {node.name} has {length} lines, at most {MOST_FUNCTION_LINES}"
                    )
    return found


def plant(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_rooms_import_only_what_they_may():
    assert len(sources(ROOT)) > 10
    assert import_violations(ROOT) == []


def test_functions_fit_a_screen_and_files_are_named_for_what_they_hold():
    assert shape_violations(ROOT) == []


@pytest.mark.parametrize(
    ("file", "text", "name"),
    [
        ("launch/watch.py", "import merge.base", "merge.base"),
        ("launch/deep/er/plan.py", "def f():\n    from recipes.parts import trainer", "recipes.parts.trainer"),
        ("launch/plan.py", "from recipes import parts", "recipes.parts"),
        ("reward/answer.py", "from eval.score import score", "eval.score.score"),
        ("merge/base.py", "import importlib\nimportlib.import_module('reward.answer')", "reward.answer"),
        ("merge/base.py", "from ..reward import answer", "reward.answer"),
        ("eval/score.py", "from recipes.parts.trainer import Trainer", "recipes.parts.trainer.Trainer"),
        ("eval/score.py", "from recipes.parts.database import x", "recipes.parts.database.x"),
        ("recipes/parts/policy.py", "from recipes import grpo", "recipes.grpo"),
        ("recipes/grpo.py", "if True:\n    import launch.watch", "launch.watch"),
        ("recipes/parts/config.py", "import torch", "torch"),
        ("recipes/parts/config.py", "import numpy", "numpy"),
        ("recipes/parts/replica.py", "def f():\n    import torch", "torch"),
        ("recipes/parts/canary.py", "from recipes.parts.scorer import x", "recipes.parts.scorer.x"),
        ("launch/server.py", "from recipes.parts.sync import AdapterSync", "recipes.parts.sync.AdapterSync"),
        ("recipes/parts/rundir.py", "from recipes.parts.data import x", "recipes.parts.data.x"),
    ],
)
def test_a_forbidden_import_is_found(tmp_path, file, text, name):
    rooms = {f"{room}/__init__.py": "" for room in ("recipes", "reward", "merge", "eval", "launch")}
    found = import_violations(plant(tmp_path, rooms | {file: text}))
    assert len(found) == 1
    assert found[0].startswith(f"{file}:")
    assert found[0].endswith(f"may not import {name}")


def test_allowed_imports_are_not_reported(tmp_path):
    files = {
        "recipes/parts/config.py": "import yaml\nimport json\nfrom recipes.parts.errors import BadInput",
        "recipes/parts/errors.py": "",
        "recipes/parts/data.py": "",
        "recipes/parts/replica.py": "import numpy, requests\nfrom recipes.parts.errors import KitError",
        "launch/server.py": "from recipes.parts.replica import Replica\nfrom recipes.parts import canary",
        "recipes/parts/policy.py": "import torch\nfrom reward import REWARDS\nfrom . import data\nimport merge.base",
        "recipes/grpo.py": "from recipes.parts import policy\nfrom recipes.tiny import x",
        "eval/run.py": "from recipes.parts.data import load\nfrom merge import verify\nfrom .score import s",
        "launch/watch.py": "from recipes.parts.config import load_config\nimport rich",
        "reward/pool.py": "from recipes.parts.errors import KitError\nimport math_verify",
        "merge/base.py": "from recipes.parts.rundir import publish",
    }
    assert import_violations(plant(tmp_path, files)) == []


def test_a_room_without_a_rule_is_found(tmp_path):
    assert import_violations(plant(tmp_path, {"tools/fix.py": ""})) == [
        "tools/fix.py: no rule says what tools/ may import"
    ]


def test_long_functions_and_empty_names_are_found(tmp_path):
    body = "".join(f"    x{i} = {i}\n" for i in range(MOST_FUNCTION_LINES - 1))
    files = {
        "tests/unit/test_utils.py": f"def f():\n{body}",
        "tests/helpers.py": f"class A:\n  async def f(self):\n{body}    pass\n",
        "eval/common/x.py": "",
    }
    found = shape_violations(plant(tmp_path, files))
    assert sorted(line.split(":")[0] for line in found) == [
        "eval/common/x.py",
        "tests/helpers.py",
        "tests/helpers.py",
    ]


def test_the_foundation_and_the_data_readers_import_no_heavy_library():
    light = [*FOUNDATION, *(name for name in ["recipes.parts.data"] if (ROOT / "recipes/parts/data.py").exists())]
    heavy = {"torch", "trl", "transformers", "datasets", "vllm"}
    for names, absent in ((light, {*heavy, "numpy"}), (WIRE, heavy)):
        program = (
            f"import sys, importlib\nfor name in {names}: importlib.import_module(name)\n"
            f"print(*({absent} & set(sys.modules)))"
        )
        done = processes.run([sys.executable, "-c", program])
        assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def test_the_trainer_imports_no_vllm():
    program = (
        "import sys, recipes.grpo_qlora, recipes.parts.trainer, recipes.parts.rollout, recipes.parts.scorer\n"
        "print(sorted(name for name in sys.modules if name.partition('.')[0] == 'vllm'))"
    )
    done = processes.run([sys.executable, "-c", program])
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr[-2000:]
