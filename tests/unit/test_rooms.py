"""The rooms of the repository: who may import whom, no circles, what stays light, the length of functions; by syntax.

The table is by folder (kit/README.md shows it). An import inside a function counts like any other; one under
`TYPE_CHECKING` does not run, so it is no part of a circle.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests import processes

ROOT = Path(__file__).parents[2]
MOST_FUNCTION_LINES = 80  # a screen; a file has no limit: it splits by subject
EMPTY_NAMES = {"utils", "util", "helpers", "helper", "misc", "common"}

# A folder -> the folders that its modules may import; always itself. A name stands for everything below it, and the
# longest that fits a module is the module's room.
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "kit": ("kit/core",),  # kit/__init__.py: Ctrl-C while a command imports the rest
    "kit/core": (),
    "kit/weights": ("kit/core",),
    "reward": ("kit/core",),
    "kit/data": ("kit/core", "reward"),  # a row is usable when a reward can read its reference
    "kit/plan": ("kit/core",),
    "kit/policy": ("kit/core", "kit/weights"),
    "kit/environments": ("kit/core", "reward"),  # reward: the code sandbox
    "kit/rollout": ("kit/core", "kit/weights", "kit/policy", "kit/environments"),
    "kit/rollout/server": ("kit/core", "kit/weights", "kit/rollout"),
    "kit/train": ("kit", "reward"),
    "merge": ("kit/core", "kit/weights", "kit/policy", "kit/data"),
    "launch": ("kit", "reward"),
    "eval": ("kit", "reward", "merge", "launch"),
    "recipes": ("kit", "reward", "merge", "launch", "eval"),
    "src": ("kit",),  # the installed command
    "bench": ("kit", "reward", "merge", "launch", "eval", "recipes", "tests"),
    "tests": ("kit", "reward", "merge", "launch", "eval", "recipes", "bench"),
}
# Scripts and tests: imported by no room, and free to import any.
NOT_ROOMS = {"bench", "tests"}
MADE_BY_RUNS = {"runs", "models"}
# The libraries of a folder at module level; what its functions import beside them, by module.
LIBRARIES = {"kit/core": {"yaml"}, "kit/plan": set()}
IN_FUNCTIONS = {
    "kit.core.checkpoint_files": {"safetensors"},
    "kit.core.chat": {"transformers", "jinja2"},  # whose dialect a chat template is written in
    "kit.plan.report": {"rich"},
    "kit.plan.shapes": {"transformers", "huggingface_hub"},  # a model's config.json
}
# What vLLM imports by name in its workers and its API server, and what they must not bring along.
SERVER = "kit/rollout/server"
NOT_IN_A_WORKER = ("kit.train", "peft", "trl")


class Import(NamedTuple):
    """One imported name: `from a import b` is a.b, which may be a module."""

    line: int
    name: str
    is_top: bool  # it runs when the module is imported
    is_typing: bool  # under TYPE_CHECKING: it never runs


def sources(root: Path, rooms_only: bool = True) -> list[Path]:
    """Every Python file of the rooms, or of the rooms, benchmarks and tests."""
    left_out = MADE_BY_RUNS | NOT_ROOMS if rooms_only else MADE_BY_RUNS
    folders = [entry for entry in sorted(root.iterdir()) if entry.is_dir() and not entry.name.startswith(".")]
    return [file for folder in folders if folder.name not in left_out for file in sorted(folder.rglob("*.py"))]


def module_name(root: Path, file: Path) -> str:
    parts = file.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def imports(root: Path, file: Path) -> list[Import]:
    """Everything that a file imports, wherever the import stands. Names given to `import_module` as text count too."""
    package = file.relative_to(root).parent.parts

    def visit(node: ast.AST, is_top: bool, is_typing: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            yield from (Import(node.lineno, alias.name, is_top, is_typing) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            start = ".".join([*base, *([node.module] if node.module else [])])
            yield from (Import(node.lineno, f"{start}.{alias.name}", is_top, is_typing) for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            if node.args and isinstance(node.args[0], ast.Constant):
                yield Import(node.lineno, str(node.args[0].value), is_top, is_typing)
        is_typing = is_typing or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
        is_top = is_top and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, is_top, is_typing)

    return list(visit(ast.parse(file.read_text(), str(file)), True, False))


def room_of(module: str) -> str | None:
    """The folder of the table that a module, or a name in one, belongs to."""
    fitting = (room for room in MAY_IMPORT if is_within(module, room.replace("/", ".")))
    return max(fitting, key=len, default=None)


def import_violations(root: Path) -> list[str]:
    """One line per import that runs to a folder which the table does not allow, and per folder without a row."""
    found = []
    for file in sources(root):
        module = module_name(root, file)
        room = room_of(module)
        if room is None:
            found.append(f"{file.relative_to(root)}: no rule says what {module.split('.')[0]}/ may import")
            continue
        for one in imports(root, file):
            target = room_of(one.name)
            if target is None or target == room:
                continue
            # A package's __init__ may be imported by whoever may import something inside it.
            if not any(target == allowed or target.startswith(f"{allowed}/") for allowed in MAY_IMPORT[room]):
                found.append(f"{file.relative_to(root)}:{one.line}: {room} may not import {one.name}")
    return found


def library_violations(root: Path) -> list[str]:
    """One line per library that a folder of `LIBRARIES` imports and may not."""
    found = []
    own = {room.split("/")[0] for room in MAY_IMPORT}
    for file in sources(root):
        module = module_name(root, file)
        room = next((room for room in LIBRARIES if is_within(module, room.replace("/", "."))), None)
        for one in imports(root, file) if room else ():
            top = one.name.split(".")[0]
            allowed = LIBRARIES[room] | (set() if one.is_top else IN_FUNCTIONS.get(module, set()))
            if not one.is_typing and top not in own | set(sys.stdlib_module_names) | allowed:
                where = "at module level" if one.is_top else "in a function"
                found.append(f"{file.relative_to(root)}:{one.line}: {room} may not import {one.name} {where}")
    return found


def graph(root: Path) -> dict[str, dict[str, int]]:
    """{module: {module that it imports: line}} of the rooms, without imports for types."""
    files = {module_name(root, file): file for file in sources(root)}
    found: dict[str, dict[str, int]] = {}
    for module, file in files.items():
        found[module] = {}
        for one in imports(root, file):
            target = one.name if one.name in files else one.name.rpartition(".")[0]
            if target in files and target != module and not one.is_typing:
                found[module].setdefault(target, one.line)
    return found


def circles(root: Path) -> list[str]:
    """One line per group of modules that import each other, directly or by others."""
    edges, reached = graph(root), {}
    for start in edges:
        seen, waiting = set(), [*edges[start]]
        while waiting:
            if (module := waiting.pop()) not in seen:
                seen.add(module)
                waiting += edges[module]
        reached[start] = seen
    groups = {
        tuple(sorted(other for other in reached[module] if module in reached[other]))
        for module in edges
        if module in reached[module]
    }
    return [f"these import each other: {', '.join(group)}" for group in sorted(groups)]


def worker_violations(root: Path) -> list[str]:
    """One line per import, in what the server half imports by any way, of what a vLLM worker must not load."""
    edges = graph(root)
    files = {module_name(root, file): file for file in sources(root)}
    waiting = [module for module in edges if is_within(module, SERVER.replace("/", "."))]
    loaded, found = set(), []
    while waiting:
        if (module := waiting.pop()) in loaded:
            continue
        loaded.add(module)
        waiting += edges[module]
        for one in imports(root, files[module]):
            if not one.is_typing and any(is_within(one.name, name) for name in NOT_IN_A_WORKER):
                found.append(f"{files[module].relative_to(root)}:{one.line}: a vLLM worker would load {one.name}")
    return sorted(found)


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


def test_rooms_import_only_what_the_table_allows():
    assert len(sources(ROOT)) > 200
    assert import_violations(ROOT) == []


def test_every_row_of_the_table_is_a_folder_and_the_table_has_no_circle():
    assert [room for room in MAY_IMPORT if not (ROOT / room).is_dir()] == []
    above: set[str] = {"kit"}  # the package itself imports nothing but kit/core
    for room, allowed in MAY_IMPORT.items():
        assert {*allowed} - NOT_ROOMS <= above | {"kit/core"}, f"{room} imports a room below it"
        above.add(room)


def test_no_modules_import_each_other():
    assert circles(ROOT) == []


def test_core_and_plan_import_no_library_but_yaml_at_module_level():
    assert library_violations(ROOT) == []


def test_what_a_vllm_worker_loads_has_no_trainer_and_no_peft():
    assert any(is_within(module, "kit.weights") for module in graph(ROOT)["kit.rollout.server.base_copy"])
    assert worker_violations(ROOT) == []


def test_functions_fit_a_screen_and_files_are_named_for_what_they_hold():
    assert shape_violations(ROOT) == []


@pytest.mark.parametrize(
    ("file", "text", "name"),
    [
        ("kit/core/errors.py", "from kit.weights.nf4 import x", "kit.weights.nf4.x"),
        ("kit/core/deep/er/load.py", "def f():\n    from kit import plan", "kit.plan"),
        ("kit/weights/nf4.py", "from kit.policy import load", "kit.policy.load"),
        ("kit/weights/nf4.py", "from ..policy import load", "kit.policy.load"),
        ("kit/data/leaks.py", "import kit.weights.nf4", "kit.weights.nf4"),
        ("kit/plan/cost.py", "if True:\n    import launch.up", "launch.up"),
        ("kit/policy/load.py", "from kit.data.problems import Problem", "kit.data.problems.Problem"),
        ("kit/policy/load.py", "from kit.rollout.sync import x", "kit.rollout.sync.x"),
        ("kit/rollout/client.py", "from kit.train.trainer import x", "kit.train.trainer.x"),
        ("kit/rollout/client.py", "from kit.rollout.server import remerge", "kit.rollout.server.remerge"),
        ("kit/rollout/server/remerge.py", "from kit.policy.load import x", "kit.policy.load.x"),
        ("kit/train/setup.py", "def f():\n    from launch.watching import page", "launch.watching.page"),
        ("kit/__init__.py", "from kit.train import trainer", "kit.train.trainer"),
        ("reward/answer.py", "from eval.score import score", "eval.score.score"),
        ("reward/answer.py", "from kit.data.problems import Problem", "kit.data.problems.Problem"),
        ("merge/merge.py", "import importlib\nimportlib.import_module('reward.answer')", "reward.answer"),
        ("merge/merge.py", "from kit.train import trainer", "kit.train.trainer"),
        ("launch/watch.py", "import merge.export", "merge.export"),
        ("eval/score.py", "from recipes import study", "recipes.study"),
        ("recipes/grpo.py", "from tests.conftest import x", "tests.conftest.x"),
        ("eval/score.py", "import bench.mismatch", "bench.mismatch"),
    ],
)
def test_an_import_that_the_table_does_not_allow_is_found(tmp_path, file, text, name):
    found = import_violations(plant(tmp_path, {file: text}))
    assert len(found) == 1
    assert found[0].startswith(f"{file}:")
    assert found[0].endswith(f"may not import {name}")


def test_allowed_imports_are_not_reported(tmp_path):
    files = {
        "kit/__init__.py": "from kit.core import errors",
        "kit/core/config/load.py": "import yaml, json\nfrom kit.core.errors import BadInput\nfrom . import schema",
        "kit/weights/frozen_base.py": "import torch\nfrom kit.core.errors import CheckFailed",
        "kit/data/problems.py": "from reward.answer import boxed_answer\nfrom kit.core import chat",
        "kit/policy/load.py": "import peft\nfrom kit.weights import frozen_base",
        "kit/rollout/client.py": "from kit.policy.sharding import x\nfrom kit.rollout.sync import AdapterSync",
        "kit/rollout/server/remerge.py": "from kit.rollout.noise import Noise\nfrom kit.weights import quantize",
        "kit/train/trainer.py": "import trl\nfrom kit import data\nfrom reward import REWARDS\nfrom . import setup",
        "merge/merge.py": "from kit.core.run_directory import publish\nfrom kit.data import problems",
        "launch/up.py": "from kit.plan.layout import fits\nimport rich",
        "eval/run.py": "from merge import verify\nfrom .score import s\nfrom launch.replicas import x",
        "recipes/grpo.py": "from kit.train import trainer\nfrom recipes.tiny import x\nimport eval.run",
        "bench/step.py": "from tests.unit import x\nfrom recipes import grpo",
        "reward/pool.py": "import math_verify",
    }
    assert import_violations(plant(tmp_path, files)) == []


def test_a_room_without_a_rule_is_found(tmp_path):
    assert import_violations(plant(tmp_path, {"tools/fix.py": ""})) == [
        "tools/fix.py: no rule says what tools/ may import"
    ]


@pytest.mark.parametrize(
    ("files", "modules"),
    [
        ({"a": "from eval import b", "b": "from eval.a import x"}, "eval.a, eval.b"),
        (
            {"a": "import eval.b", "b": "def f():\n    from eval.c import x", "c": "from . import a"},
            "eval.a, eval.b, eval.c",
        ),
    ],
)
def test_a_circle_is_found_also_through_functions(tmp_path, files, modules):
    plant(tmp_path, {f"eval/{name}.py": text for name, text in files.items()})
    plant(tmp_path, {"eval/d.py": "from eval import a"})  # leads into the circle and is no part of it
    assert circles(tmp_path) == [f"these import each other: {modules}"]


def test_an_import_for_types_makes_no_circle(tmp_path):
    types = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from eval.b import B\n"
    assert circles(plant(tmp_path, {"eval/a.py": types, "eval/b.py": "from eval.a import A"})) == []


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("kit/core/formats.py", "import torch", "import torch at module level"),
        ("kit/core/config/load.py", "class A:\n    from torch import nn", "import torch.nn at module level"),
        ("kit/core/config/load.py", "def f():\n    import torch", "import torch in a function"),
        ("kit/core/errors.py", "import numpy", "import numpy at module level"),
        (
            "kit/plan/memory.py",
            "try:\n    import torch\nexcept ImportError:\n    pass",
            "import torch at module level",
        ),
        (
            "kit/plan/shapes.py",
            "from transformers import AutoConfig",
            "import transformers.AutoConfig at module level",
        ),
    ],
)
def test_a_library_in_core_or_plan_is_found(tmp_path, file, text, said):
    found = library_violations(plant(tmp_path, {file: text}))
    assert len(found) == 1 and found[0].startswith(f"{file}:") and found[0].endswith(f"may not {said}")


def test_what_core_and_plan_may_import_is_not_reported(tmp_path):
    files = {
        "kit/core/formats.py": "import yaml, json",
        "kit/plan/shapes.py": "from kit.core import formats\ndef f():\n    from transformers import AutoConfig",
        "kit/core/chat.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch",
        "kit/weights/nf4.py": "import torch",
    }
    assert library_violations(plant(tmp_path, files)) == []


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"kit/rollout/server/remerge.py": "import peft"}, "kit/rollout/server/remerge.py:1: … peft"),
        (
            {
                "kit/rollout/server/remerge.py": "def f():\n    from kit.weights import quantize",
                "kit/weights/quantize.py": "from kit.weights.stored_weight import Layer",
                "kit/weights/stored_weight.py": "def f():\n    from peft.tuners import lora",
            },
            "kit/weights/stored_weight.py:2: … peft.tuners.lora",
        ),
        (
            {
                "kit/rollout/server/versions.py": "from kit.rollout import noise",
                "kit/rollout/noise.py": "from kit.train.trainer import PolicyTrainer",
            },
            "kit/rollout/noise.py:1: … kit.train.trainer.PolicyTrainer",
        ),
    ],
)
def test_a_trainer_or_peft_in_a_worker_is_found_however_it_gets_there(tmp_path, files, found):
    plant(tmp_path, files | {"kit/rollout/client.py": "import peft", "kit/rollout/server/__init__.py": ""})
    assert worker_violations(tmp_path) == [found.replace("…", "a vLLM worker would load")]


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


def modules_below(*folders: str) -> list[str]:
    return [module_name(ROOT, file) for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))]


def test_core_plan_and_the_data_readers_import_no_heavy_library():
    heavy = {"torch", "trl", "transformers", "datasets", "vllm", "peft"}
    light = [*modules_below("kit/core", "kit/plan", "kit/data"), "reward"]
    wire = ["kit.rollout.replica", "kit.rollout.canary"]  # what both sides of the rollout server speak
    for names, absent in ((light, {*heavy, "numpy"}), (wire, heavy)):
        program = (
            f"import sys, importlib\nfor name in {names}: importlib.import_module(name)\n"
            f"print(*({absent} & set(sys.modules)))"
        )
        done = processes.run([sys.executable, "-c", program])
        assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def test_the_trainer_imports_no_vllm():
    program = (
        "import sys, recipes.grpo_qlora, kit.train.trainer, kit.rollout.client, kit.rollout.canary_scores\n"
        "print(sorted(name for name in sys.modules if name.partition('.')[0] == 'vllm'))"
    )
    done = processes.run([sys.executable, "-c", program])
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr[-2000:]
