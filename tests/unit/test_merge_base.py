"""The NF4 base: loaded, hashed and streamed to the same bytes."""

import copy
import errno
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import bitsandbytes as bnb
import numpy as np
import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file

from kit.core.errors import BadInput, CheckFailed
from kit.core.run_files import read_json
from kit.weights import fp8
from kit.weights import frozen_base as merge_base
from kit.weights.checkpoint import find_checkpoint
from kit.weights.frozen_base import (
    BaseCheckpoint,
    BaseTensor,
    dequantize,
    dequantized_tensors,
    hash_base,
    hash_quantized,
    load_base,
    load_frozen,
    load_nf4,
    quantize_weight,
    stored_linears,
)
from kit.weights.hashing import hash_fp8, hash_pairs, hash_tensor
from tests.unit.merge_fixture import LINEARS, make_model, shared_model, shared_run

# The NF4 values as published (QLoRA, appendix E), typed here so that the library's table is not its own witness.
NF4 = np.array([
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
])  # fmt: skip


def dequantize_in_numpy(weight, number: type = np.float64) -> np.ndarray:
    """NF4 to `number` from nibbles, table, block maxima and their own quantization; no bitsandbytes, no torch."""
    state = weight.quant_state
    packed = weight.data.numpy().reshape(-1)
    codes = np.stack([packed >> 4, packed & 15], axis=1).reshape(-1)
    absmax = state.absmax.numpy()
    if state.nested:
        blocks = np.repeat(state.state2.absmax.numpy().astype(number), state.state2.blocksize)[: absmax.size]
        absmax = state.state2.code.numpy().astype(number)[absmax] * blocks + number(state.offset.item())
    values = NF4.astype(number)[codes] * np.repeat(absmax.astype(number), state.blocksize)[: codes.size]
    return values.reshape(tuple(state.shape))


@pytest.mark.parametrize("double_quantization", [True, False])
def test_dequantize_equals_an_independent_dequantization(double_quantization):
    model = load_nf4(shared_model(), "float32", double_quantization, device="cpu")
    layer = model.model.layers[1].mlp.down_proj
    np.testing.assert_allclose(dequantize(layer).numpy(), dequantize_in_numpy(layer.weight), rtol=3e-7, atol=1e-9)


def test_packed_bytes_stored_as_bfloat16_are_the_same_base():
    """As FSDP2 needs them."""
    expected, model = (
        load_nf4(shared_model(), "float32", device="cpu", quant_storage=storage)
        for storage in (torch.uint8, torch.bfloat16)
    )
    assert model.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
    assert hash_base(model) == hash_base(expected)
    for found, other in zip(_linear4bit(model), _linear4bit(expected), strict=True):
        assert torch.equal(dequantize(found), dequantize(other))


def test_only_linear_layers_are_quantized_and_skipped_ones_are_not():
    model = load_nf4(shared_model(tied=False), "float32", skip_modules=["o_proj"], device="cpu")
    info = hash_base(model)
    assert {name.rpartition(".")[2] for name in info["quantized"]} == set(LINEARS) - {"o_proj"}
    assert {name.rpartition(".")[2] for name in stored_linears(model)} == set(LINEARS) - {"o_proj"}
    assert type(model.lm_head) is torch.nn.Linear
    assert "lm_head.weight" in info["tensors"]


def test_hash_survives_peft_an_eval_forward_and_a_cast_up():
    from peft import LoraConfig, get_peft_model

    model = load_nf4(shared_model(), "bfloat16", device="cpu")
    before = hash_base(model)
    wrapped = get_peft_model(model, LoraConfig(r=4, target_modules=LINEARS))
    assert hash_base(wrapped) == before
    with torch.no_grad():
        wrapped.eval()(torch.arange(1, 40)[None])
    model.model.norm.weight.data = model.model.norm.weight.data.float()
    assert hash_base(wrapped) == before


def test_eval_forward_leaves_every_byte_where_bitsandbytes_would_repack(monkeypatch):
    model = load_nf4(shared_model(), "float32", device="cpu")
    assert {module.support_avx512bf16_for_cpu for module in _linear4bit(model)} == {False}
    # The machine of the test may lack AVX512-BF16, so the trap is sprung by hand: the guard has to name it.
    layer = model.model.layers[0].mlp.up_proj
    layer.weight.quant_state.packing_format_for_cpu = True
    with pytest.raises(CheckFailed, match="repacked"):
        hash_base(model)
    with pytest.raises(CheckFailed, match="repacked"):
        dequantize(layer)


def _linear4bit(model):
    from bitsandbytes.nn import Linear4bit

    return [module for module in model.modules() if isinstance(module, Linear4bit)]


@pytest.mark.parametrize("part", ["packed", "absmax", "nested absmax", "offset", "norm", "embedding"])
def test_hash_changes_with_one_byte(part):
    model = load_nf4(shared_model(), "float32", device="cpu")
    before = hash_base(model)
    weight = model.model.layers[0].self_attn.k_proj.weight
    tensor = {
        "packed": weight.data,
        "absmax": weight.quant_state.absmax,
        "nested absmax": weight.quant_state.state2.absmax,
        "offset": weight.quant_state.offset,
        "norm": model.model.norm.weight.data,
        "embedding": model.model.embed_tokens.weight.data,
    }[part]
    flat = tensor.reshape(-1).view(torch.uint8)
    flat[flat.numel() // 2] ^= 1
    after = hash_base(model)
    changed = [name for name, value in after["tensors"].items() if value != before["tensors"][name]]
    assert len(changed) == 1
    assert after["hash"] != before["hash"]


def test_hash_does_not_depend_on_the_number_of_threads():
    torch.manual_seed(0)
    weight = torch.randn(1024, 3072)  # 49,152 blocks: enough for torch to split the mean over threads
    threads = torch.get_num_threads()
    hashes, means = set(), set()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            means.add(weight.reshape(-1, 64).abs().amax(-1).mean().item())
            packed, state = quantize_weight(weight, True, None)
            hashes.add(hash_quantized(packed, state))
            hashes.add(hash_quantized(*quantize_weight(weight, True, state.offset.item())))
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(threads)
    assert len(means) > 1, "the trap this test is about is gone: the mean no longer depends on threads"
    assert len(hashes) == 1


def test_loading_quantizes_with_one_thread(monkeypatch):
    seen = []
    original = merge_base.one_thread

    def watched():
        seen.append(True)
        return original()

    monkeypatch.setattr(merge_base, "one_thread", watched)
    load_nf4(shared_model(), device="cpu")
    assert seen


def test_base_made_on_another_device_is_rebuilt_from_the_recorded_offset():
    info = json.loads(json.dumps(hash_base(load_nf4(shared_model(), "float32", device="cpu"))))
    name = "model.layers.1.mlp.gate_proj.weight"
    reader = BaseCheckpoint(shared_model(), info)
    shifted = np.nextafter(np.float32(info["offsets"][name]), np.float32(1)).item()
    packed, state = quantize_weight(reader.original(name), True, shifted)
    info["offsets"][name], info["tensors"][name] = shifted, hash_quantized(packed, state)
    model = load_base(BaseCheckpoint(shared_model(), info), "cpu")
    assert hash_base(model)["tensors"] == info["tensors"]
    with torch.no_grad():
        assert torch.isfinite(model(torch.arange(1, 9)[None]).logits).all()


def test_another_checkpoint_is_refused_by_the_tensor_that_differs(tmp_path):
    shutil.copytree(shared_model(), tmp_path / "other")
    name = "model.layers.1.self_attn.v_proj.weight"
    shard = next(f for f in (tmp_path / "other").glob("*.safetensors") if name in load_file(f))
    tensors = load_file(shard)
    tensors[name][3, 5] += 0.5
    save_file(tensors, shard, {"format": "pt"})
    with pytest.raises(CheckFailed, match=rf"is not the base the adapter was trained on.*{name} hashes to"):
        list(dequantized_tensors(tmp_path / "other", read_json(shared_run().base_file)))


def test_checkpoint_of_another_depth_is_refused_before_reading(tmp_path):
    make_model(tmp_path / "deep", num_hidden_layers=3)
    with pytest.raises(BadInput, match=r"it has model\.layers\.2"):
        BaseCheckpoint(tmp_path / "deep", read_json(shared_run().base_file))
    make_model(tmp_path / "shallow", num_hidden_layers=1)
    with pytest.raises(BadInput, match=r"it has no model\.layers\.1.* \(11 of 24\)"):
        BaseCheckpoint(tmp_path / "shallow", read_json(shared_run().base_file))


def test_tied_checkpoint_that_stores_the_output_embedding_too_reads_the_same(tmp_path):
    shutil.copytree(shared_model(), tmp_path / "twice")
    index = tmp_path / "twice" / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    shard = tmp_path / "twice" / listed["weight_map"]["model.embed_tokens.weight"]
    tensors = load_file(shard)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, shard, {"format": "pt"})
    listed["weight_map"]["lm_head.weight"] = shard.name
    index.write_text(json.dumps(listed))
    names = [name for name, _ in dequantized_tensors(tmp_path / "twice", read_json(shared_run().base_file))]
    assert sorted(names) == sorted(read_json(shared_run().base_file)["tensors"])


def test_a_missing_checkpoint_is_bad_input(tmp_path):
    with pytest.raises(BadInput, match="no model config"):
        load_nf4(tmp_path / "nowhere")
    with pytest.raises(BadInput, match="--base"):
        find_checkpoint(tmp_path / "nowhere")


SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
SMALL_FILES = ["config.json", "tokenizer.json", "merges.txt", "chat_template.jinja", "tokenizer.model"]


@pytest.mark.parametrize(
    ("stored", "weights", "fetched"),
    [
        ([*SHARDS, "model.safetensors.index.json"], True, SHARDS),
        ([*SHARDS, "model.safetensors.index.json", "model.safetensors"], True, ["model.safetensors"]),
        (["model.safetensors"], True, ["model.safetensors"]),
        (["pytorch_model.bin"], True, []),
        ([*SHARDS, "model.safetensors.index.json"], False, []),
    ],
    ids=["shards", "shards and one file", "one file", "none", "not asked for"],
)
def test_of_a_hub_ids_weights_only_what_transformers_loads_is_fetched(tmp_path, monkeypatch, stored, weights, fetched):
    commits = iter(["a" * 40, "b" * 40])

    def download(name, revision, allow_patterns):
        """A branch that moves after each look at it."""
        place = tmp_path / (next(commits) if revision == "v1" else revision)
        place.mkdir(exist_ok=True)
        others = ["consolidated.safetensors", "original/model.safetensors", "model.fp32-00001-of-00009.safetensors"]
        for file in filter_repo_objects([*stored, *SMALL_FILES, *others], allow_patterns=allow_patterns):
            (place / file).parent.mkdir(exist_ok=True)
            (place / file).write_text(json.dumps({"weight_map": dict(zip("abc", [*SHARDS, SHARDS[0]], strict=True))}))
        return str(place)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert find_checkpoint("owner/model", "v1", weights) == tmp_path / ("a" * 40)
    found = {str(file.relative_to(tmp_path / ("a" * 40))) for file in tmp_path.rglob("*") if file.is_file()}
    index = {"model.safetensors.index.json"} & set(stored)
    assert found == {*SMALL_FILES, *fetched, *index}


@pytest.mark.parametrize("revision", [None, "ab" * 20])
def test_without_a_connection_a_cached_snapshot_is_found_by_branch_and_by_commit(tmp_path, monkeypatch, revision):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    place = tmp_path / "models--owner--tiny" / "snapshots" / ("ab" * 20)
    shutil.copytree(shared_model(), place)
    (tmp_path / "models--owner--tiny" / "refs").mkdir()
    (tmp_path / "models--owner--tiny" / "refs" / "main").write_text("ab" * 20)
    assert find_checkpoint("owner/tiny", revision) == place
    with pytest.raises(BadInput, match=r"no checkpoint at owner/tiny, neither a directory nor on the hub: .*offline"):
        find_checkpoint("owner/tiny", "cd" * 20)


def test_a_disk_that_a_download_fills_is_not_called_a_missing_checkpoint(monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("huggingface_hub.snapshot_download", full)
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", full)
    for read in (find_checkpoint, merge_base.unquantized_config):
        with pytest.raises(OSError, match="No space left"):
            read("owner/model")


def test_model_without_nf4_has_no_nf4_hash():
    with pytest.raises(BadInput, match="no linear layer"):
        hash_base(torch.nn.LayerNorm(4))


def test_the_commit_of_a_hub_model_is_recorded():
    model = load_nf4(shared_model(), device="cpu")
    assert hash_base(model)["revision"] is None
    model.config._commit_hash = "c" * 40
    assert hash_base(model)["revision"] == "c" * 40


@pytest.mark.parametrize("quantization", ["nf4", "fp8", "none"])
def test_a_checkpoint_that_lacks_a_parameter_is_refused(tmp_path, quantization):
    shutil.copytree(shared_model(), tmp_path / "model")
    for file in (tmp_path / "model").glob("*.safetensors"):
        tensors = load_file(file)
        if tensors.pop("model.norm.weight", None) is not None:
            save_file(tensors, file, {"format": "pt"})
    with pytest.raises(BadInput, match=r"has no model\.norm\.weight \(1 of \d+ parameters"):
        load_frozen(tmp_path / "model", quantization, device="cpu")


def test_a_tensors_hash_covers_every_value_its_shape_and_its_type_in_training(monkeypatch):
    value = torch.arange(24.0).reshape(4, 6) / 7
    known = hash_tensor(value)
    monkeypatch.setattr("kit.weights.hashing.HASH_BYTES", 40)  # ten values at once
    assert hash_tensor(value) == known == hash_tensor(value.double())
    for place in range(24):
        other = value.clone()
        other.view(-1)[place] += 1
        assert hash_tensor(other) != known
    assert hash_tensor(value.T.contiguous()) != known != hash_tensor(value.reshape(6, 4))
    assert hash_tensor(value, torch.bfloat16) == hash_tensor(value.bfloat16()) != known


def test_the_hash_of_all_tensors_covers_names_and_not_their_order():
    known = hash_pairs({"a": "1", "b": "2"})
    assert hash_pairs({"b": "2", "a": "1"}) == known
    assert (
        len({known, hash_pairs({"a": "2", "b": "1"}), hash_pairs({"c": "1", "b": "2"}), hash_pairs({"a": "1"})}) == 4
    )


@pytest.mark.parametrize("double_quantization", [True, False])
def test_the_hash_of_an_nf4_weight_covers_all_that_it_is_read_with(double_quantization):
    packed, state = quantize_weight(torch.randn(48, 64), double_quantization, None)
    known, hashes = hash_quantized(packed, state), set()
    changes = {"shape": torch.Size((64, 48)), "dtype": torch.bfloat16, "blocksize": 128, "quant_type": "fp4"}
    changes |= {"code": state.code * 2, "absmax": state.absmax.flip(0)}
    if double_quantization:
        changes["offset"] = state.offset + 1
    for name, other in changes.items():
        changed = copy.copy(state)
        setattr(changed, name, other)
        hashes.add(hash_quantized(packed, changed))
    for name in ("absmax", "code") if double_quantization else ():
        changed, changed.state2 = copy.copy(state), copy.copy(state.state2)
        setattr(changed.state2, name, getattr(state.state2, name) * 2)
        hashes.add(hash_quantized(packed, changed))
    hashes.add(hash_quantized(packed ^ 1, state))
    assert known not in hashes and len(hashes) == (10 if double_quantization else 7)


def test_the_hash_of_an_fp8_weight_covers_codes_scales_and_type():
    codes, scale = fp8.quantize_weight(torch.randn(6, 8))
    other = (codes.view(torch.uint8) ^ 1).view(torch.float8_e4m3fn)
    made = [(codes, scale, torch.float32), (other, scale, torch.float32), (codes, scale * 2, torch.float32)]
    made += [(codes, scale, torch.bfloat16), (codes.reshape(8, 6), scale, torch.float32)]
    assert len({hash_fp8(*one) for one in made}) == 5


@pytest.mark.parametrize("shape", [(1, 64), (5, 10), (40, 24), (3, 7)])
@pytest.mark.parametrize("into", ["dequantized", "original"])
def test_rows_of_a_base_tensor_are_those_of_the_whole_whatever_its_width(tmp_path, monkeypatch, shape, into):
    """Pieces begin and end with a block of 64 values, which a width need not divide."""
    torch.manual_seed(0)
    weight = torch.randn(shape)
    info = {"quantization": {"type": "nf4", "storage_dtype": "float32", "double_quantization": True}, "offsets": {}}
    base = SimpleNamespace(info=info, into=into, storage="nf4", quantized={"w"}, dtype=torch.float32, device="cpu")
    base.read, base.quantize = lambda name: weight, lambda name, value: quantize_weight(value, True, None)
    whole = dequantize_4bit(*quantize_weight(weight, True, None)) if into == "dequantized" else weight
    monkeypatch.setattr("kit.weights.frozen_base.PIECE", (64, 64))
    with ThreadPoolExecutor(1) as pool:
        tensor = BaseTensor(base, "w", pool)
        rows = torch.cat([tensor.rows(*piece) for piece in tensor.pieces()])
    assert torch.equal(rows, whole)


def test_a_processor_that_could_repack_leaves_loaded_layers_as_they_are(monkeypatch):
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: True)
    assert bnb.nn.Linear4bit(8, 8).support_avx512bf16_for_cpu
    model = load_nf4(shared_model(), "float32", device="cpu")
    assert {module.support_avx512bf16_for_cpu for module in _linear4bit(model)} == {False}


def test_a_base_is_loaded_again_with_the_layers_that_its_run_skipped():
    folder = shared_model(tied=False)
    info = hash_base(load_nf4(folder, "float32", skip_modules=["o_proj"], device="cpu"))
    again = load_base(BaseCheckpoint(folder, info), "cpu")
    assert hash_base(again)["tensors"] == info["tensors"]
    assert type(again.model.layers[0].self_attn.o_proj) is torch.nn.Linear


def test_tensors_of_another_type_in_the_file_are_those_of_the_training(tmp_path):
    shutil.copytree(shared_model(), tmp_path / "model")
    for file in (tmp_path / "model").glob("*.safetensors"):
        save_file({name: one.float() * 1.001 for name, one in load_file(file).items()}, file, {"format": "pt"})
    model = load_nf4(tmp_path / "model", "bfloat16", device="cpu")
    base = BaseCheckpoint(tmp_path / "model", hash_base(model), "cpu")
    embedding = base.tensor("model.embed_tokens.weight")
    assert embedding.dtype == torch.bfloat16 and torch.equal(embedding, model.model.embed_tokens.weight)
    layer = model.model.layers[0].mlp.up_proj
    assert torch.equal(base.tensor("model.layers.0.mlp.up_proj.weight"), dequantize(layer))


@pytest.mark.parametrize("quantization", ["fp8", "none"])
def test_a_loaded_base_that_is_not_base_jsons_is_refused(quantization):
    info = hash_base(load_frozen(shared_model(), quantization, "float32", device="cpu"))
    assert load_base(BaseCheckpoint(shared_model(), info), "cpu")
    for name in ("model.norm.weight", "model.layers.0.mlp.up_proj.weight"):
        other = info | {"tensors": info["tensors"] | {name: "0" * 32}}
        with pytest.raises(CheckFailed, match=f"{name} hashes to .*, base.json says 0000"):
            load_base(BaseCheckpoint(shared_model(), other), "cpu")
