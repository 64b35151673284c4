"""The fold: dequantize + s·B·A in float32, one rounding, and nothing half-written."""

import errno
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kit.core.errors import BadInput, CheckFailed
from kit.core.run_directory import RunDir, read_manifest, write_manifest
from kit.core.run_files import read_json
from kit.weights.frozen_base import BaseCheckpoint, load_nf4
from kit.weights.shards import TensorFile
from merge.merge import read_adapter, write_bf16, write_config
from merge.quantize import retained_share
from merge.verify import base_checkpoint, check_adapter_base, load_policy
from tests import processes
from tests.unit.merge_fixture import (
    alter_adapter,
    make_model,
    make_run,
    read_all,
    shared_folder,
    shared_model,
    shared_run,
)
from tests.unit.test_merge_base import dequantize_in_numpy
from tests.unit.test_merge_stream import single_model


def merge_to(run, folder, adapter=None):
    base = base_checkpoint(run)
    updates = read_adapter(adapter or run.newest_adapter(), base)
    write_bf16(base, updates, folder, lambda _: None, policy="grpo")
    return read_all(folder)


def expected_in_float64(run, scales) -> dict[str, np.ndarray]:
    """dequantize + s·B·A of every module, in numpy float64, from the adapter file and `scales` by module name."""
    config = run.config()["model"]
    model = load_nf4(config["path"], config["dtype"], device="cpu")
    factors = load_file(run.newest_adapter() / "adapter_model.safetensors")
    expected = {}
    for name in read_json(run.base_file)["quantized"]:
        layer = model.get_submodule(name).weight
        weight = dequantize_in_numpy(layer)
        if config["dtype"] == "bfloat16":  # what the trainer computes with: the dequantized weight in BF16
            # by way of float32: from float64, a product near a tie would round to the other side
            weight = torch.from_numpy(dequantize_in_numpy(layer, np.float32)).bfloat16().double().numpy()
        key = f"base_model.model.{name}"
        if f"{key}.lora_A.weight" in factors:
            a, b = (factors[f"{key}.lora_{x}.weight"].double().numpy() for x in "AB")
            weight = weight + scales(name, a.shape[0]) * (b @ a)
        expected[f"{name}.weight"] = weight
    return expected


def assert_rounded_once(merged: torch.Tensor, exact: np.ndarray, name: str) -> None:
    """Within half a BF16 step of the exact value: 8 significant bits, plus the float32 sum's own error."""
    half_step = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(exact), 1e-30))) - 8)
    error = np.abs(merged.double().numpy() - exact)
    assert (error <= half_step * 1.001 + 1e-7).all(), (name, (error / half_step).max())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_merged_equals_float64_dequantize_plus_update_to_bf16_rounding(tmp_path, tied, dtype):
    run = shared_run(tied, dtype)
    merged = merge_to(run, tmp_path / "out")
    for name, exact in expected_in_float64(run, lambda _, rank: 16 / rank).items():
        assert merged[name].dtype == torch.bfloat16
        assert_rounded_once(merged[name], exact, name)
    originals = read_all(shared_model(tied))
    for name in set(merged) - {f"{n}.weight" for n in read_json(run.base_file)["quantized"]}:
        assert torch.equal(merged[name], originals[name]), name
    assert set(merged) == set(originals)


def test_rslora_and_patterns_scale_each_module_by_its_own_rank_and_alpha(tmp_path):
    lora = {
        "use_rslora": True,
        "rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 4},
        "alpha_pattern": {"down_proj": 40, "layers.0.self_attn.o_proj": 1},
    }
    run = make_run(tmp_path / "run", shared_model(), update=0.05, **lora)

    def scale(name, rank):
        ranks = {True: 8, name.endswith("q_proj"): 2, name == "model.layers.1.mlp.up_proj": 4}
        assert rank == ranks[True]
        alpha = 40 if name.endswith("down_proj") else 1 if name == "model.layers.0.self_attn.o_proj" else 16
        return alpha / math.sqrt(rank)

    merged = merge_to(run, tmp_path / "out")
    for name, exact in expected_in_float64(run, scale).items():
        assert_rounded_once(merged[name], exact, name)


@pytest.fixture(scope="module")
def biased_run():
    """A run on a Qwen2, whose q, k and v have biases."""
    folder = shared_folder()
    return make_run(folder / "run-biased", make_model(folder / "model-biased", family="Qwen2"), update=0.05)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_a_base_with_biases_keeps_them_and_the_adapters_type_does_not_matter(tmp_path, biased_run, stored):
    run = RunDir(shutil.copytree(biased_run.path, tmp_path / "run"))
    adapter = run.adapter_dir(10)
    file = adapter / "adapter_model.safetensors"
    save_file({name: t.to(stored) for name, t in load_file(file).items()}, file)
    facts = {k: v for k, v in read_json(adapter / "manifest.json").items() if k not in ("kind", "created", "files")}
    write_manifest(adapter, "adapter", **facts)
    merged = merge_to(run, tmp_path / "out")
    for name, exact in expected_in_float64(run, lambda _, rank: 16 / rank).items():
        assert_rounded_once(merged[name], exact, name)
    originals = read_all(Path(run.config()["model"]["path"]))
    biases = [name for name in originals if name.endswith(".bias")]
    assert len(biases) == 6
    assert all(torch.equal(merged[name], originals[name]) and originals[name].any() for name in biases)


@pytest.mark.parametrize("source", ["tied", "untied", "float32"])
def test_merged_into_the_original_base_is_its_weights_plus_the_update_rounded_once(tmp_path, source):
    model = single_model() if source == "float32" else shared_model(source == "tied")
    if source == "float32":  # whose values BF16, in which the run loaded it, does not have
        run = make_run(tmp_path / "run", model, "bfloat16")
    else:
        run = shared_run(source == "tied", "bfloat16")
    base = BaseCheckpoint(model, read_json(run.base_file), into="original")
    updates = read_adapter(run.newest_adapter(), base)
    made = write_bf16(base, updates, tmp_path / "out", lambda _: None)
    assert (made["into"], made["retained_update"]) == ("original", pytest.approx(1, abs=0.02))
    merged, originals = read_all(tmp_path / "out"), read_all(model)
    factors = load_file(run.newest_adapter() / "adapter_model.safetensors")
    for name, original in originals.items():
        key = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{key}.lora_A.weight" not in factors:
            assert torch.equal(merged[name], original.to(torch.bfloat16))
            continue
        a, b = (factors[f"{key}.lora_{x}.weight"].double().numpy() for x in "AB")
        assert_rounded_once(merged[name], original.double().numpy() + 16 / 8 * (b @ a), name)


def test_merging_into_the_original_base_still_asks_for_the_base_that_was_trained_on(tmp_path):
    other = make_model(tmp_path / "model", seed=5)
    base = BaseCheckpoint(other, read_json(shared_run().base_file), into="original")
    with pytest.raises(CheckFailed, match="is not the base the adapter was trained on"):
        write_bf16(base, {}, tmp_path / "merged" / "bf16", lambda _: {})
    assert list((tmp_path / "merged").iterdir()) == []


def test_a_weight_of_many_pieces_is_folded_like_one_of_a_single_piece(tmp_path, monkeypatch):
    run = make_run(tmp_path / "run", shared_model(), dtype="bfloat16", update=0.05)
    whole = merge_to(run, tmp_path / "whole")
    monkeypatch.setattr("kit.weights.frozen_base.PIECE", (1 << 10, 1 << 10))
    monkeypatch.setattr("kit.weights.nf4.PIECE", (1 << 10, 1 << 10))
    pieces = merge_to(run, tmp_path / "pieces")
    assert sorted(whole) == sorted(pieces)
    for name, value in whole.items():  # a matrix product of fewer rows may round its last bit otherwise
        torch.testing.assert_close(pieces[name], value, rtol=2**-7, atol=1e-6)
        assert (pieces[name] != value).float().mean() < 1e-3


def test_checkpoint_is_loadable_plain_bf16_with_the_source_sharding(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for tied in (True, False):
        source, out = shared_model(tied), tmp_path / f"out-{tied}"
        merge_to(shared_run(tied), out)
        shards = {p.name for p in source.glob("*.safetensors")}
        assert {p.name for p in out.glob("*.safetensors")} == shards
        assert len(shards) == 2
        ours, theirs = (json.loads((d / "model.safetensors.index.json").read_text()) for d in (out, source))
        assert ours["weight_map"] == theirs["weight_map"]
        config = json.loads((out / "config.json").read_text())
        assert config["dtype"] == "bfloat16"
        assert "quantization_config" not in config
        model = AutoModelForCausalLM.from_pretrained(out)
        assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
        assert model.dtype == torch.bfloat16
        assert AutoTokenizer.from_pretrained(out).chat_template == AutoTokenizer.from_pretrained(source).chat_template
        assert (out / "generation_config.json").read_bytes() == (source / "generation_config.json").read_bytes()
        assert read_manifest(out, "checkpoint", deep=True)["format"] == "bf16"


def test_leftovers_of_quantization_in_the_source_config_do_not_reach_the_merged_one(tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    out.mkdir()
    leftover = {"torch_dtype": "float32", "dtype": "float32", "quantization_config": None, "model_type": "qwen3"}
    (source / "config.json").write_text(json.dumps(leftover))
    write_config(source, out, None)
    assert json.loads((out / "config.json").read_text()) == {"dtype": "bfloat16", "model_type": "qwen3"}


def test_adapter_on_the_untied_output_embedding_is_folded(tmp_path):
    run = make_run(tmp_path / "run", shared_model(False), target_modules=["lm_head"])
    merged = merge_to(run, tmp_path / "out")
    factors = load_file(run.newest_adapter() / "adapter_model.safetensors")
    a, b = (factors[f"base_model.model.lm_head.lora_{x}.weight"].double() for x in "AB")
    base = load_nf4(shared_model(False), "float32", device="cpu").lm_head.weight.detach().double()
    assert_rounded_once(merged["lm_head.weight"], (base + 2 * b @ a).numpy(), "lm_head")
    checkpoint = base_checkpoint(run)  # NF4 leaves the output embedding as it is
    updates = read_adapter(run.newest_adapter(), checkpoint)
    assert retained_share(tmp_path / "out", "nf4", checkpoint, updates) == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "lora_only"}, "biases"),
        ({"lora_bias": True}, "biases"),
        ({"init_lora_weights": "pissa_niter_4"}, "rewrites the base"),
        ({"init_lora_weights": "loftq"}, "rewrites the base"),
        ({"peft_type": "LOHA"}, "peft_type"),
        ({"fan_in_fan_out": True}, "transposed"),
        ({"target_parameters": ["mlp.experts"]}, "target_parameters"),
        ({"target_modules": ["q_proj", "lm_head"]}, "shares its weight"),
        ({"r": 4}, r"rank 4 on a weight of \(\d+, \d+\)"),
    ],
)
def test_adapter_that_the_fold_cannot_carry_is_refused(tmp_path, config, message):
    run = shared_run()
    adapter = alter_adapter(run, tmp_path / "adapter", config)
    with pytest.raises(BadInput, match=message):
        read_adapter(adapter, base_checkpoint(run))


@pytest.mark.parametrize(
    ("rename", "message"),
    [
        (lambda n: n.replace("layers.1", "layers.7"), r"names model\.layers\.7.*does not have"),
        (lambda n: n.replace("q_proj", "w_pack"), "w_pack"),
        (lambda n: n.replace("q_proj.lora_B", "q_proj.lora_magnitude_vector"), "not a LoRA factor"),
        (lambda n: n.replace("q_proj.lora_A", "embed.lora_embedding_A"), "not a LoRA factor"),
        (lambda n: n.replace("q_proj.lora_A", "k_projx.lora_A"), "does not have|without lora_"),
        (lambda n: n.replace("k_", "zz").replace("q_", "k_").replace("zz", "q_"), "needs A"),
    ],
)
def test_adapter_tensors_that_fit_no_module_are_refused(tmp_path, rename, message):
    run = shared_run()
    adapter = alter_adapter(run, tmp_path / "adapter", rename=rename)
    with pytest.raises(BadInput, match=message):
        read_adapter(adapter, base_checkpoint(run))


@pytest.mark.filterwarnings("ignore:.*eva_config")
@pytest.mark.parametrize("began", ["orthogonal", "eva", "gaussian", False])
def test_how_the_factors_began_does_not_matter_to_the_policy_that_is_compared(tmp_path, began):
    run = shared_run()
    adapter = alter_adapter(run, tmp_path / "adapter", {"init_lora_weights": began})
    ids = torch.arange(3, 15)[None]
    with torch.no_grad():
        found, expected = (load_policy(run, one)(ids).logits for one in (adapter, run.newest_adapter()))
    assert found.equal(expected)


def test_an_adapter_whose_weights_are_no_safetensors_is_refused_with_the_fix(tmp_path):
    run = shared_run()
    adapter = Path(shutil.copytree(alter_adapter(run, tmp_path / "whole"), tmp_path / "adapter"))
    known = read_json(run.base_file)
    tensors = load_file(adapter / "adapter_model.safetensors")
    (adapter / "adapter_model.safetensors").unlink()
    torch.save(tensors, adapter / "adapter_model.bin")
    write_manifest(adapter, "adapter", version=11, step=11, base_hash=known["hash"])
    with pytest.raises(BadInput, match=r"its weights as adapter_model\.bin;.*safe_serialization"):
        check_adapter_base(adapter, known)


def test_an_adapter_of_peft_alone_is_refused_with_what_it_lacks_and_what_can_be_done(tmp_path):
    run = shared_run()
    adapter = alter_adapter(run, tmp_path / "adapter")
    (adapter / "manifest.json").unlink()
    with pytest.raises(
        BadInput, match=r"an adapter without manifest\.json, as peft alone.*merge import --adapter.*init_adapter"
    ):
        check_adapter_base(adapter, read_json(run.base_file))


def test_adapter_of_another_base_is_refused(tmp_path):
    run = shared_run()
    adapter = alter_adapter(run, tmp_path / "adapter", base_hash="0" * 64)
    with pytest.raises(BadInput, match="another base"):
        check_adapter_base(adapter, read_json(run.base_file))


def test_a_base_that_differs_leaves_no_checkpoint(tmp_path):
    run = shared_run()
    info = read_json(run.base_file)
    info["tensors"]["model.layers.1.mlp.down_proj.weight"] = "0" * 32
    base = BaseCheckpoint(shared_model(), info)
    with pytest.raises(CheckFailed, match=r"model\.layers\.1\.mlp\.down_proj"):
        write_bf16(base, {}, tmp_path / "merged" / "bf16", lambda _: {})
    assert list((tmp_path / "merged").iterdir()) == []


@pytest.mark.parametrize("fault", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_interrupted_write_leaves_nothing_and_keeps_what_was_there(tmp_path, monkeypatch, fault):
    run, out = shared_run(), tmp_path / "merged" / "bf16"
    write, files = TensorFile.write, []

    def fail_in_the_second_shard(file, *arguments):
        files.append(file.path)
        write(file, *arguments)
        if len(set(files)) == 2:
            raise fault

    monkeypatch.setattr(TensorFile, "write", fail_in_the_second_shard)
    with pytest.raises(type(fault)):
        merge_to(run, out)
    assert list(out.parent.iterdir()) == []
    monkeypatch.undo()
    merge_to(run, out)
    before = read_manifest(out, deep=True)
    files.clear()
    monkeypatch.setattr(TensorFile, "write", fail_in_the_second_shard)
    with pytest.raises(type(fault)):
        write_bf16(base_checkpoint(run), {}, out, lambda _: {}, overwrite=True)
    assert [p.name for p in out.parent.iterdir()] == ["bf16"]
    assert read_manifest(out, deep=True) == before


KILLED = """
import os, signal, sys
from pathlib import Path
from merge.merge import write_bf16
from kit.weights.shards import TensorFile
from merge.verify import base_checkpoint
from kit.core.run_directory import RunDir
written, write = [], TensorFile.write

def write_or_die(*arguments):
    write(*arguments)
    written.append(arguments)
    if len(written) == 20:
        os.kill(os.getpid(), signal.SIGKILL)

TensorFile.write = write_or_die
write_bf16(base_checkpoint(RunDir(sys.argv[1])), {}, Path(sys.argv[2]), lambda _: {})
"""


def test_a_merge_that_is_killed_leaves_nothing_under_the_name_and_can_be_repeated(tmp_path):
    run, out = shared_run(), tmp_path / "merged" / "bf16"
    command = [sys.executable, "-c", KILLED, str(run.path), str(out)]
    done = processes.run(command)
    assert done.returncode == -signal.SIGKILL, done.stderr
    (left,) = out.parent.iterdir()
    assert left.name.startswith(".partial-bf16.") and list(left.glob("*.safetensors"))
    merge_to(run, out)
    assert read_manifest(out, "checkpoint", deep=True)["format"] == "bf16"
    assert list(out.parent.iterdir()) == [out]


@pytest.mark.parametrize("folder", [False, True], ids=["file", "folder"])
def test_a_disk_that_fills_beside_the_weights_is_told_by_its_error_number(tmp_path, monkeypatch, folder):
    source, out = tmp_path / "source", tmp_path / "merged" / "bf16"
    shutil.copytree(shared_model(), source)
    if folder:
        (source / "additional_chat_templates").mkdir()
        (source / "additional_chat_templates" / "tools.jinja").write_text("x")
    name = "tools.jinja" if folder else "tokenizer.json"
    copy = shutil.copy

    def full(file, target):
        if file.name == name:
            raise OSError(errno.ENOSPC, "No space left on device", str(target))
        return copy(file, target)

    monkeypatch.setattr(shutil, "copy", full)
    with pytest.raises(OSError, match="No space left") as caught:
        write_bf16(base_checkpoint(shared_run(), source), {}, out, lambda _: {})
    assert caught.value.errno == errno.ENOSPC
    assert list(out.parent.iterdir()) == []


def test_every_chat_template_is_carried_over(tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    (source / "additional_chat_templates" / "deep").mkdir(parents=True)
    out.mkdir()
    (source / "config.json").write_text("{}")
    for name in ("tools.jinja", "deep/rag.jinja"):
        (source / "additional_chat_templates" / name).write_text(name)
    write_config(source, out, None)
    assert (out / "additional_chat_templates" / "tools.jinja").read_text() == "tools.jinja"
    assert (out / "additional_chat_templates" / "deep" / "rag.jinja").read_text() == "deep/rag.jinja"


def test_full_disk_leaves_nothing(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small tmpfs needs root")
    try:
        with pytest.raises(CheckFailed, match=r"could not write .*Nothing of this checkpoint was kept"):
            merge_to(shared_run(), disk / "bf16")
        assert list(disk.iterdir()) == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)
