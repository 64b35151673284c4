"""A checkpoint from elsewhere: code that it brings is not run, whatever is typed, and its pickles are not read."""

import ast
import json
import sys

import pytest

from eval.backends import load_tokenizer
from kit.core.errors import BadInput
from kit.weights.model_files import read_config
from launch.vllm_command import NOT_SERVED
from merge.verify import read_tokenizer
from tests.conftest import ROOT

LOADERS = ("AutoConfig", "AutoTokenizer", "AutoModelForCausalLM", "AutoModelForSequenceClassification")
ROOMS = ("kit", "reward", "merge", "eval", "launch", "recipes")


@pytest.fixture
def brought(tmp_path, monkeypatch):
    """A checkpoint of an unknown kind with modules of its own; the file that an import of them makes. Whoever is asked
    whether to run them says yes."""
    marker = tmp_path / "ran.txt"
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("configuration_their", "modeling_their", "tokenization_their"):
        (folder / f"{name}.py").write_text(f"open({str(marker)!r}, 'w')\nraise RuntimeError('ran')\n")
    classes = {"AutoConfig": "configuration_their.C", "AutoModelForCausalLM": "modeling_their.M"}
    (folder / "config.json").write_text(json.dumps({"model_type": "their-own", "auto_map": classes}))
    tokenizer = {"tokenizer_class": "T", "auto_map": {"AutoTokenizer": ["tokenization_their.T", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "cache"))
    return folder, marker


@pytest.mark.parametrize("read", [read_config, read_tokenizer])
def test_code_that_a_checkpoint_brings_is_refused_and_not_run(brought, read):
    folder, marker = brought
    with pytest.raises(BadInput) as refused:
        read(folder)
    assert str(folder) in str(refused.value) and "\n" not in str(refused.value)
    assert not marker.exists() and "modeling_their" not in sys.modules


def test_an_evaluation_s_tokenizer_runs_no_code(brought):
    folder, marker = brought
    with pytest.raises(BadInput, match="code of its own"):
        load_tokenizer(folder, None)
    assert not marker.exists()


def test_every_loader_of_transformers_says_no_to_code():
    """Without the argument transformers asks at the terminal, and "y" runs it."""
    calls, silent = 0, []
    for file in (file for room in ROOMS for file in (ROOT / room).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            if node.func.attr == "from_pretrained" and getattr(node.func.value, "id", "") in LOADERS:
                calls += 1
                said = {one.arg: getattr(one.value, "value", None) for one in node.keywords}
                if said.get("trust_remote_code", True) is not False:
                    silent.append(f"{file.relative_to(ROOT)}:{node.lineno}")
    assert calls >= 15 and silent == []


def test_every_pickle_is_read_as_weights_only():
    found = []
    for file in (file for room in ROOMS for file in (ROOT / room).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [getattr(node, "module", None), *(alias.name for alias in node.names)]
                found += [f"{file.name}: {name}" for name in names if name in ("pickle", "dill", "joblib", "marshal")]
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                if "weights_only=True" not in ast.unparse(node):
                    found.append(f"{file.name}:{node.lineno} torch.load")
    assert found == []


@pytest.mark.parametrize("flag", ["trust_remote_code", "tool_parser_plugin", "reasoning_parser_plugin"])
def test_a_server_is_given_no_flag_that_runs_code(flag):
    assert flag in NOT_SERVED
