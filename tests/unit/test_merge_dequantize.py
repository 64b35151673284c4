"""`python -m merge dequantize`: the numbers of every layout that it reads, and what it refuses before it reads one."""

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kit.core.errors import BadInput, CheckFailed
from kit.core.run_directory import read_manifest, write_json
from kit.core.run_files import read_json
from kit.weights import shards
from kit.weights.model_files import dequantize_command, unquantized_config
from merge import dequantize
from merge.__main__ import main
from tests.unit.merge_fixture import make_model, read_all, shared_folder, shared_model

QWEN = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head"],
}
# Weight name, shape -> ({suffix: tensor} as it is stored, the numbers that it stands for, float64).
Store = Callable[[str, tuple[int, int]], tuple[dict[str, torch.Tensor], np.ndarray]]
INDEX = "model.safetensors.index.json"


def number(byte: int) -> float:
    """What a byte of E4M3 stands for: a sign, four bits of exponent and three behind the point. 0x7f is no number."""
    exponent, rest = byte >> 3 & 15, (byte & 7) / 8
    return (-1.0) ** (byte >> 7) * (2.0 ** (exponent - 7) * (1 + rest) if exponent else 2.0**-6 * rest)


E4M3 = [number(byte) for byte in range(256)]


def draw(name: str) -> np.random.Generator:
    """Other numbers for every tensor, the same in every process."""
    return np.random.default_rng(list(name.encode()))


def e4m3(tensor: torch.Tensor) -> np.ndarray:
    return np.array(E4M3)[tensor.view(torch.uint8).numpy()]


def spread(scale: np.ndarray, shape: tuple[int, int], rows: int, columns: int) -> np.ndarray:
    """The scale of every value of a weight, whose blocks are cut where the weight ends."""
    return scale.astype(np.float64)[np.arange(shape[0])[:, None] // rows, np.arange(shape[1])[None] // columns]


def rounded(value: np.ndarray) -> torch.Tensor:
    """The product of a code and a scale, exact in float64, as float32 has it and then BF16."""
    return torch.from_numpy(value.astype(np.float32)).to(torch.bfloat16)


def fp8(suffix: str, rows: int | None, columns: int | None, dtype: torch.dtype = torch.float32) -> Store:
    """Random codes, and a scale per block of (rows, columns); None is all of them."""

    def store(name: str, shape: tuple[int, int]) -> tuple[dict[str, torch.Tensor], np.ndarray]:
        block = rows or shape[0], columns or shape[1]
        numbers = draw(name)
        codes = numbers.integers(0, 127, shape, np.uint8) | numbers.integers(0, 2, shape, np.uint8) << 7
        grid = [-(-size // side) for size, side in zip(shape, block, strict=True)]
        scale = torch.from_numpy(numbers.uniform(1e-4, 1e-3, grid)).to(dtype)
        stored = {"weight": torch.from_numpy(codes).view(torch.float8_e4m3fn), suffix: scale}
        if grid == [1, 1] and columns is None:
            stored[suffix] = scale.reshape(1)
        return stored, e4m3(stored["weight"]) * spread(scale.double().numpy(), shape, *block)

    return store


def int8(name: str, shape: tuple[int, int]) -> tuple[dict[str, torch.Tensor], np.ndarray]:
    codes = draw(name).integers(-128, 128, shape, np.int8)
    scale = torch.from_numpy(draw(name).uniform(1e-4, 1e-3, (shape[0], 1))).float()
    return {
        "weight": torch.from_numpy(codes),
        "weight_scale": scale,
        "input_scale": torch.ones(1),
    }, codes * scale.double().numpy()


def words(values: np.ndarray) -> torch.Tensor:
    """Numbers of -8 to 7 along the last axis, eight to an int32, the first in the lowest bits, 8 added to each."""
    nibbles = (values + 8).astype(np.uint32).reshape(*values.shape[:-1], -1, 8)
    return torch.from_numpy((nibbles << np.arange(0, 32, 4, dtype=np.uint32)).sum(-1, dtype=np.uint32).view(np.int32))


def int4(zeros: bool = False, order: bool = False) -> Store:
    """INT4 in groups of 32 inputs; with zero points, or with inputs that are not in the order of their groups."""

    def store(name: str, shape: tuple[int, int]) -> tuple[dict[str, torch.Tensor], np.ndarray]:
        numbers, groups = draw(name), shape[1] // 32
        codes = numbers.integers(-8, 8, shape)
        scale = torch.from_numpy(numbers.uniform(1e-3, 1e-2, (shape[0], groups))).to(torch.bfloat16)
        group_of, zero = np.arange(shape[1]) // 32, np.zeros((shape[0], groups), int)
        stored = {"weight_packed": words(codes), "weight_scale": scale, "weight_shape": torch.tensor(shape)}
        if zeros:
            zero = numbers.integers(-8, 8, zero.shape)
            stored["weight_zero_point"] = words(zero.T).T.contiguous()
        if order:
            group_of = numbers.permutation(group_of)
            stored["weight_g_idx"] = torch.from_numpy(group_of).int()
        return stored, (codes - zero[:, group_of]) * scale.double().numpy()[:, group_of]

    return store


def compressed(layout: str, bits: int, kind: str, strategy: str, **weights: Any) -> dict:
    """A quantization_config as llm-compressor writes it."""
    arguments = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False, **weights}
    group = {"targets": ["Linear"], "weights": arguments}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


LAYOUTS: dict[str, tuple[dict, Store]] = {
    "fp8 in blocks": (QWEN, fp8("weight_scale_inv", 128, 128)),
    "fp8 in blocks, scales in BF16": (QWEN, fp8("weight_scale_inv", 128, 128, torch.bfloat16)),
    "fp8 in blocks of 64 x 96": (QWEN | {"weight_block_size": [64, 96]}, fp8("weight_scale_inv", 64, 96)),
    "FP8, channels": (compressed("float-quantized", 8, "float", "channel"), fp8("weight_scale", 1, None)),
    "FP8, channels, scales in FP16": (
        compressed("float-quantized", 8, "float", "channel"),
        fp8("weight_scale", 1, None, torch.float16),
    ),
    "FP8, channels, by a preset's name": (
        compressed("float-quantized", 8, "float", "channel") | {"config_groups": {"FP8_DYNAMIC": ["Linear"]}},
        fp8("weight_scale", 1, None),
    ),
    "FP8, one scale": (compressed("float-quantized", 8, "float", "tensor"), fp8("weight_scale", None, None)),
    "FP8, blocks": (
        compressed("float-quantized", 8, "float", "block", block_structure=[128, 128]),
        fp8("weight_scale", 128, 128, torch.bfloat16),
    ),
    "INT8, channels": (compressed("int-quantized", 8, "int", "channel"), int8),
    "INT4, groups": (compressed("pack-quantized", 4, "int", "group", group_size=32), int4()),
    "INT4, zero points": (
        compressed("pack-quantized", 4, "int", "group", group_size=32, symmetric=False),
        int4(zeros=True),
    ),
    "INT4, inputs in another order": (
        compressed("pack-quantized", 4, "int", "group", group_size=32, actorder="group"),
        int4(order=True),
    ),
}


def store_quantized(source: Path, folder: Path, settings: dict, store: Store) -> dict[str, torch.Tensor]:
    """A copy of a checkpoint of several shards whose projections are stored quantized, every scale in the last file;
    returns what its tensors stand for."""
    shutil.copytree(source, folder)
    files = sorted(folder.glob("*.safetensors"))
    contents = {file: load_file(file) for file in files}
    expected: dict[str, torch.Tensor] = {}
    for tensors in [dict(content) for content in contents.values()]:
        for name, weight in tensors.items():
            expected[name] = weight
            if not name.endswith("_proj.weight"):
                continue
            stored, value = store(name, tuple(weight.shape))
            expected[name] = rounded(value)
            home = next(content for content in contents.values() if content.get(name) is weight)
            del home[name]
            for suffix, part in stored.items():
                place = home if suffix in ("weight", "weight_packed") else contents[files[-1]]
                place[f"{name.removesuffix('.weight')}.{suffix}"] = part
    for file, content in contents.items():
        save_file(content, file, {"format": "pt"})
    if len(files) > 1:
        weight_map = {name: file.name for file, content in contents.items() for name in content}
        write_json(folder / INDEX, {"metadata": {}, "weight_map": weight_map})
    write_json(folder / "config.json", read_json(folder / "config.json") | {"quantization_config": settings})
    return expected


def cut_model() -> Path:
    """Made once: two shards, 320 values behind the MLP's first layers and 64 keys, which blocks of 128 cut."""
    folder = shared_folder() / "cut"
    return folder if folder.exists() else make_model(folder, intermediate_size=320, num_hidden_layers=1)


@pytest.fixture
def quantized(tmp_path) -> Path:
    """A checkpoint in the layout of Qwen3-8B-FP8."""
    store_quantized(cut_model(), tmp_path / "quantized", *LAYOUTS["fp8 in blocks"])
    return tmp_path / "quantized"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_tensor_is_code_times_scale_rounded_once_to_bf16(layout, tmp_path):
    expected = store_quantized(cut_model(), tmp_path / "from", *LAYOUTS[layout])
    assert main(["dequantize", "--model.path", str(tmp_path / "from"), "--out", str(tmp_path / "to")]) == 0
    found = read_all(tmp_path / "to")
    assert found.keys() == expected.keys()
    assert sum("proj" in name for name in found) == 7 and len(list((tmp_path / "to").glob("*.safetensors"))) == 2
    wrong = [name for name, one in expected.items() if not torch.equal(found[name], one)]
    assert wrong == [] and {one.dtype for one in found.values()} == {torch.bfloat16}


def test_whole_blocks_are_what_transformers_makes_of_them(tmp_path):
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    source = make_model(tmp_path / "plain", num_hidden_layers=1, head_dim=64)
    store_quantized(source, tmp_path / "from", QWEN, fp8("weight_scale_inv", 128, 128))
    assert main(["dequantize", "--model.path", str(tmp_path / "from"), "--out", str(tmp_path / "to")]) == 0
    settings = FineGrainedFP8Config(dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "from", dtype="bfloat16", quantization_config=settings)
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "to", dtype="bfloat16").state_dict()
    assert all(torch.equal(ours[name], one) for name, one in theirs.state_dict().items())


def test_scales_of_a_quantized_cache_are_left_out(quantized, tmp_path):
    change_tensors(quantized, lambda t: t.update({"model.layers.0.self_attn.k_scale": torch.ones(1)}))
    assert main(["dequantize", "--model.path", str(quantized), "--out", str(tmp_path / "out")]) == 0
    assert read_all(tmp_path / "out").keys() == read_all(cut_model()).keys()


def test_the_checkpoint_is_plain_and_says_what_it_was_made_of(quantized, tmp_path):
    out = tmp_path / "models" / "plain"
    assert main(["dequantize", "--model.path", str(quantized), "--out", str(out)]) == 0
    manifest = read_manifest(out, "checkpoint", deep=True)
    assert manifest["quantization_config"] == QWEN and manifest["format"] == "bf16"
    assert manifest["model"] == manifest["source"]["path"] == str(quantized)
    assert "float32, rounded once to bfloat16" in manifest["method"] and len(manifest["dequantized"]) == 7
    assert manifest["versions"]["torch"] == torch.__version__
    assert {"config.json", INDEX, "tokenizer.json"} < set(manifest["source"]["files"])
    assert "quantization_config" not in read_json(out / "config.json")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (out / name).read_bytes() == (quantized / name).read_bytes()
    assert unquantized_config(out).model_type == "qwen3"


def change(folder: Path, **settings: Any) -> None:
    config = read_json(folder / "config.json")
    write_json(folder / "config.json", config | {"quantization_config": config["quantization_config"] | settings})


def change_tensors(folder: Path, alter: Callable[[dict], Any]) -> None:
    """Alter the tensors of the last file, which has the scales, and list what is then in it."""
    file = sorted(folder.glob("*.safetensors"))[-1]
    tensors = load_file(file)
    alter(tensors)
    save_file(tensors, file, {"format": "pt"})
    listed = {name: home for name, home in read_json(folder / INDEX)["weight_map"].items() if home != file.name}
    write_json(folder / INDEX, {"metadata": {}, "weight_map": listed | dict.fromkeys(tensors, file.name)})


def unquantize(tensors: dict) -> None:
    """Leave the scales of all codes, and values where the codes were."""
    tensors |= {name: one.to(torch.bfloat16) for name, one in tensors.items() if one.dtype == torch.float8_e4m3fn}


SCALE = "model.layers.0.mlp.up_proj.weight_scale_inv"
COMPRESSED = compressed("float-quantized", 8, "float", "channel")
MIXED = COMPRESSED["config_groups"]["group_0"]
FAULTS: list[tuple[Callable[[Path], Any], str]] = [
    (lambda f: change(f, quant_method="bitsandbytes"), r"quant_method bitsandbytes, which cannot be undone here. "
     r"Supported: fp8 with weight_block_size, and compressed-tensors in the layouts float-quantized, int-quantized"),
    (lambda f: change(f, weight_block_size=None), "fp8 with weight_block_size None, which cannot be undone"),
    (lambda f: change(f, **compressed("nvfp4-pack-quantized", 4, "float", "group")), "nvfp4-pack-quantized.* undone"),
    (lambda f: change(f, quant_method="compressed-tensors", config_groups={"a": MIXED, "b": MIXED}), "2 groups of la"),
    (lambda f: change(f, **COMPRESSED), "holds no weight_scale, so none"),
    (lambda f: change(f, **COMPRESSED | {"config_groups": {"FP9": ["Linear"]}}), "scheme name FP9"),
    (lambda f: change(f, **COMPRESSED | {"config_groups": ["FP8"]}), "with 0 groups of layers"),
    (lambda f: change(f, **COMPRESSED | {"config_groups": {"a": {"targets": []}}}),
     "of inputs alone"),
    (lambda f: change(f, weight_block_size=[64, 64]), r"scale_inv is F32 of shape .*; fp8 of a weight of .* has \("),
    (lambda f: write_json(f / "config.json", read_json(cut_model() / "config.json")), "is not quantized .* to undo"),
    (lambda f: write_json(f / "config.json", read_json(f / "config.json") | {"hidden_size": 256}), "expected"),
    (lambda f: (f / "config.json").unlink(), "no model config at"),
    (lambda f: sorted(f.glob("*.safetensors"))[0].unlink(), "lacks model-00001-of-00002.safetensors"),
    (lambda f: change_tensors(f, lambda t: t.pop(SCALE)), r"up_proj.weight as F8_E4M3 without a scale \(model.layers"),
    (lambda f: change_tensors(f, lambda t: t.update({SCALE: t[SCALE].T.contiguous()})), r"of shape \(1, 3\); fp8 of"),
    (lambda f: change_tensors(f, unquantize), "_proj.weight as BF16; fp8 has F8_E4M3"),
    (lambda f: change_tensors(f, lambda t: t.update({"model.more.weight": torch.ones(2)})), "has model.more.weight"),
    (lambda f: change_tensors(f, lambda t: t.pop("model.norm.weight")), "it has no model.norm.weight"),
    (lambda f: shutil.rmtree(f), r"--model.path .* is not a directory \(in .* Hub ids go into --model.id"),
]  # fmt: skip


@pytest.mark.parametrize(("spoil", "message"), FAULTS)
def test_what_cannot_be_undone_is_refused_before_a_weight_is_read(spoil, message, quantized, tmp_path, monkeypatch):
    def no_weights(*_: Any) -> None:
        raise AssertionError("a weight was read")

    spoil(quantized)
    monkeypatch.setattr(dequantize, "read_tensor", no_weights)
    for flags in ([], ["--dry_run"]):
        with pytest.raises(BadInput, match=message):
            main(["dequantize", "--model.path", str(quantized), "--out", str(tmp_path / "out"), *flags])
    assert not (tmp_path / "out").exists()


def test_what_is_there_is_kept_without_overwrite_and_replaced_with_it(quantized, tmp_path):
    out, mine = tmp_path / "out", tmp_path / "mine"
    words = ["dequantize", "--model.path", str(quantized), "--out"]
    assert main([*words, str(out), "--dry_run"]) == 0 and not out.exists()
    assert main([*words, str(out)]) == 0
    (out / "config.json").write_text("{}")
    with pytest.raises(BadInput, match=r"exists already\. Pass --overwrite"):
        main([*words, str(out)])
    assert main([*words, str(out), "--overwrite"]) == 0
    assert read_json(out / "config.json")["dtype"] == "bfloat16" and read_manifest(out, "checkpoint", deep=True)
    mine.mkdir()
    (mine / "notes.txt").write_text("mine")
    for place, message in ((mine, "not a checkpoint of this kit"), (quantized, "is where"), (tmp_path, "is where")):
        with pytest.raises(BadInput, match=message):
            main([*words, str(place), "--overwrite"])
    assert (mine / "notes.txt").read_text() == "mine" and (quantized / "config.json").is_file()


def test_a_full_disk_an_interruption_and_a_source_that_changes_leave_nothing(quantized, tmp_path, monkeypatch):
    command = ["dequantize", "--model.path", str(quantized), "--out", str(tmp_path / "models" / "out")]
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1 << 10))
        with pytest.raises(BadInput, match=r"0.0 MiB free and the base needs 0.4 MiB"):
            main(command)

    def ends_with(error: BaseException) -> Callable[..., Any]:
        def fail(*_: Any) -> None:
            raise error

        return fail

    def touch(*_: Any) -> None:
        (quantized / "tokenizer.json").write_text("{}")

    ends = [
        (shards.os, "fsync", ends_with(OSError(28, "No space left on device")), CheckFailed, "No space left"),
        (dequantize, "dequantize_blocks", ends_with(KeyboardInterrupt("Ctrl-C")), KeyboardInterrupt, "Ctrl-C"),
        (dequantize, "write_config", touch, CheckFailed, "changed while it was read: tokenizer.json has 2 bytes"),
    ]
    for owner, name, replacement, kind, message in ends:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, replacement)
            with pytest.raises(kind, match=message):
                main(command)
        assert list((tmp_path / "models").iterdir()) == []


def test_a_hub_id_is_read_from_its_snapshot_and_known_by_its_commit(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    commit, repository = "ab" * 20, tmp_path / "hub" / "models--owner--tiny-FP8"
    expected = store_quantized(cut_model(), repository / "snapshots" / commit, *LAYOUTS["fp8 in blocks"])
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    with pytest.raises(BadInput) as refused:
        unquantized_config("owner/tiny-FP8", "main")
    command = f"python -m merge {(words := shlex.join(['dequantize', '--model.id', 'owner/tiny-FP8']))}"
    assert str(refused.value).endswith(f"{command} --model.revision main --out models/tiny-FP8-bf16")
    assert main([*words.split(), "--out", str(tmp_path / "out")]) == 0
    manifest = read_manifest(tmp_path / "out", "checkpoint")
    assert (manifest["model"], manifest["revision"]) == ("owner/tiny-FP8", commit)
    assert manifest["source"] == {"commit": commit, "path": None, "files": {}}
    assert all(torch.equal(read_all(tmp_path / "out")[name], one) for name, one in expected.items())
    for file in (repository / "snapshots" / commit).glob("*.safetensors"):  # a dry run has none to look at
        file.unlink()
    assert main([*words.split(), "--out", str(tmp_path / "other"), "--dry_run"]) == 0
    assert "so weights are not checked" in capsys.readouterr().out and not (tmp_path / "other").exists()


@pytest.mark.parametrize(("method", "is_named"), [("fp8", True), ("compressed-tensors", True), ("gptq", False)])
def test_a_quantized_base_is_refused_with_the_command_where_there_is_one(method, is_named, tmp_path):
    place = tmp_path / "a model's"
    place.mkdir()
    config = read_json(shared_model() / "config.json") | {"quantization_config": {"quant_method": method}}
    (place / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadInput) as refused:
        unquantized_config(place)
    _, found, command = str(refused.value).partition("what this writes: ")
    assert bool(found) == is_named
    if is_named:
        wanted = ["python", "-m", "merge", "dequantize", "--model.path", str(place), "--out", "models/a model's-bf16"]
        assert shlex.split(command) == wanted and command == dequantize_command(place)
