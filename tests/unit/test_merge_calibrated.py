"""Calibration reads the run's own prompts and sees what the layers see; AWQ is whole or not there."""

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from kit.core.errors import BadInput
from kit.core.run_directory import RunDir, read_manifest, write_json
from merge.calibrated import Calibration, calibration_set, check_awq, input_peaks, write_awq
from merge.quantize import Refused
from merge.verify import load_for_scoring
from tests.unit.merge_fixture import read_all, shared_model
from tests.unit.test_merge_quantize import merged_run, no_verify, quantized, wide_run

SYSTEM = "<|im_start|>system\nAnswer.<|im_end|>\n"


def jsonl(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def chat(question: str) -> str:
    return f"{SYSTEM}<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture
def tokenizer():
    return AutoTokenizer.from_pretrained(shared_model())


@pytest.fixture
def run(tmp_path) -> RunDir:
    """Ten training problems, two held out, and the logged completions of two steps."""
    run = RunDir(tmp_path / "run")
    run.completions.mkdir(parents=True)
    train = jsonl(tmp_path / "train.jsonl", [{"question": f"train {i}?", "answer": str(i)} for i in range(10)])
    held_out = jsonl(tmp_path / "test.jsonl", [{"question": f"held out {i}?", "answer": str(i)} for i in range(2)])
    data = {"path": str(train), "eval_path": str(held_out), "answer_format": "plain", "system_prompt": "Answer."}
    write_json(run.config_file, {"config": {"data": data}})
    for step, logged in ((1, [0, 1]), (20, [1, 1, 2])):
        rows = [{"prompt": chat(f"train {i}?"), "completion": f"step {step}.<|im_end|>"} for i in logged]
        jsonl(run.completions / f"step-{step:06d}.jsonl", rows)
    return run


def texts(run: RunDir, tokenizer, samples: int, length: int = 512) -> list[str]:
    return [tokenizer.decode(ids) for ids in calibration_set(run, tokenizer, samples, length).sequences]


def test_newest_completions_come_first_and_then_other_training_prompts(run, tokenizer):
    found = texts(run, tokenizer, 6)
    assert found[0] == chat("train 1?") + "step 20.<|im_end|>"
    assert found[1] == chat("train 2?") + "step 20.<|im_end|>"
    assert found[2] == chat("train 0?") + "step 1.<|im_end|>"
    assert [text for text in found[3:]] == [chat(f"train {i}?") for i in (3, 5, 7)]  # spread over the other seven
    assert texts(run, tokenizer, 2) == found[:2]


def test_all_prompts_are_used_once_and_none_that_is_held_out(run, tokenizer):
    found = texts(run, tokenizer, 128)
    assert len(found) == 10
    assert {text.split("user\n")[1].split("<|im_end|>")[0] for text in found} == {f"train {i}?" for i in range(10)}


def test_facts_are_of_what_is_used(run, tokenizer):
    calibration = calibration_set(run, tokenizer, 128, 40)
    lengths = [len(ids) for ids in calibration.sequences]
    assert max(lengths) == 40
    facts = calibration.facts
    assert (facts["samples"], facts["with_completion"], facts["max_length"]) == (10, 3, 40)
    assert facts["tokens"] == sum(lengths)
    assert facts["hash"] == calibration_set(run, tokenizer, 128, 40).facts["hash"]
    assert facts["hash"] != calibration_set(run, tokenizer, 9, 40).facts["hash"]


def test_without_the_data_the_completions_alone_are_used_and_that_is_said(run, tokenizer, tmp_path, capsys):
    (tmp_path / "train.jsonl").unlink()
    assert len(texts(run, tokenizer, 128)) == 3
    assert "calibrating on 3 logged completions alone" in capsys.readouterr().out
    for file in run.completions.iterdir():
        file.unlink()
    with pytest.raises(BadInput, match=r"nothing to calibrate on: .*train\.jsonl does not exist"):
        calibration_set(run, tokenizer, 128, 512)


def wide_calibration():
    merged = merged_run()[2]
    return merged, calibration_set(wide_run(), AutoTokenizer.from_pretrained(merged), 6, 64)


def test_a_peak_is_the_largest_input_of_its_layer():
    merged, names = merged_run()[2], merged_run()[0].quantized
    model = load_for_scoring(merged, "cpu").model
    with torch.no_grad():
        every = model.layers[0].input_layernorm(model.embed_tokens.weight[3:250]).abs().amax(-1)
    order = (every.argsort(descending=True) + 3).tolist()
    peaks = input_peaks(merged, names, Calibration([order[100:105], order[:3], order[200:]], {}))
    assert peaks.keys() == names
    for layer in "qkv":
        assert peaks[f"model.layers.0.self_attn.{layer}_proj.weight"] == pytest.approx(every.max().item())
    assert peaks["model.layers.1.mlp.gate_proj.weight"] == peaks["model.layers.1.mlp.up_proj.weight"]
    assert len(set(peaks.values())) == 2 * 4  # the inputs of qkv, o, gate and up, down


def test_a_layer_without_input_is_refused():
    merged, calibration = wide_calibration()
    with pytest.raises(Refused, match=r"no layer model\.absent\.weight"):
        input_peaks(merged, {"model.absent.weight"}, calibration)


def test_no_environment_for_awq_is_bad_input_with_the_fix(tmp_path):
    with pytest.raises(BadInput, match=r"absent does not exist.*make llmcompressor.*--awq_python"):
        check_awq(tmp_path / "absent")
    with pytest.raises(BadInput, match="has no llm-compressor"):
        check_awq(Path(sys.executable))


def compressor(tmp_path: Path, body: str) -> Path:
    """A Python that says it has llm-compressor, and does `body` with the `request` instead of running it."""
    file = tmp_path / "python"
    lines = [f"#!{sys.executable}", "import json, shutil, sys", "from pathlib import Path"]
    lines += ["if '-c' in sys.argv:", "    print('9.9')", "    sys.exit()"]
    file.write_text("\n".join([*lines, "request = json.loads(Path(sys.argv[-1]).read_text())", body]) + "\n")
    file.chmod(0o755)
    return file


def test_awq_is_published_with_the_configuration_of_w4a16(tmp_path):
    (base, _, merged), calibration = merged_run(), wide_calibration()[1]
    source = quantized("w4a16")[2]
    python = compressor(tmp_path, f"shutil.copytree({str(source)!r}, request['out'], dirs_exist_ok=True)")
    seen = []
    manifest = write_awq(merged, tmp_path / "awq", base, calibration, python, lambda d: seen.append(d), policy="grpo")
    assert manifest == read_manifest(tmp_path / "awq", "checkpoint", deep=True)
    assert (manifest["format"], manifest["policy"], manifest["retained_update"]) == ("awq", "grpo", None)
    assert manifest["calibration"] == {**calibration.facts, "llmcompressor": "9.9"}
    assert (tmp_path / "awq" / "config.json").read_text() == (source / "config.json").read_text()
    assert all(torch.equal(t, read_all(source)[n]) for n, t in read_all(tmp_path / "awq").items())
    assert seen[0].parent == tmp_path  # verified before it had its name


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("sys.exit('out of memory')", r"exit code 1.*out of memory"),
        ("import os; os.kill(os.getpid(), 9)", "exit code -9"),
        ("shutil.copytree(request['model'], request['out'], dirs_exist_ok=True)", "left out 42 .*weight_packed"),
    ],
)
def test_awq_that_failed_leaves_nothing(tmp_path, body, message):
    (base, _, merged), calibration = merged_run(), wide_calibration()[1]
    with pytest.raises(Refused, match=f"(?s){message}") as refused:
        write_awq(merged, tmp_path / "awq", base, calibration, compressor(tmp_path, body), no_verify)
    assert refused.value.share is None
    assert [entry.name for entry in tmp_path.iterdir()] == ["python"]
