"""The base written tensor by tensor: the loaded model's bytes, in the memory of one tensor, whole or not there."""

import json
import math
import os
import resource
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig

from kit.core.errors import BadInput, CheckFailed
from kit.core.run_directory import read_manifest
from kit.core.run_files import read_json
from kit.weights.frozen_base import dequantize, dequantized_tensors, hash_base, load_nf4
from kit.weights.nf4 import block_maxima, quantize_weight
from kit.weights.write_base import Original, TensorFile, plan_base
from merge import export as merge_export
from merge.export import export
from tests import processes
from tests.unit.merge_fixture import make_model, read_all, shared_folder, shared_model

ROOT = Path(__file__).parents[2]
ORIGIN = {"model": "tiny", "revision": None}


def single_model() -> Path:
    """Read-only: an untied checkpoint in one file, in float32 and with values that BF16 does not have."""
    folder = shared_folder() / "single"
    if not folder.exists():
        shutil.copytree(shared_model(tied=False), folder, ignore=shutil.ignore_patterns("model*"))
        torch.manual_seed(5)
        tensors = {
            name: t.float() * (1 + 1e-3 * torch.rand(t.shape)) for name, t in read_all(shared_model(False)).items()
        }
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def write(source: Path, out: Path, dtype: str = "float32", double_quantization: bool = True) -> dict:
    return export(Original(source, dtype, double_quantization), out, ORIGIN, None)


@pytest.mark.parametrize("double_quantization", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", [shared_model, single_model], ids=["tied in two shards", "untied in one file"])
def test_streaming_writes_what_the_loaded_model_is_bit_for_bit(tmp_path, model, dtype, double_quantization):
    from bitsandbytes.functional import QuantState, dequantize_4bit

    loaded = load_nf4(model(), dtype, double_quantization, device="cpu")
    assert write(model(), tmp_path / "out", dtype, double_quantization) == hash_base(loaded) | ORIGIN
    info = read_json(tmp_path / "out/base.json")
    assert json.dumps(info) == json.dumps(hash_base(loaded) | ORIGIN)  # the order of the keys, too
    stored, index = read_all(tmp_path / "out"), read_json(tmp_path / "out/nf4/index.json")
    copies, streamed = read_all(tmp_path / "out/nf4"), dict(dequantized_tensors(model(), info))
    assert sorted(stored) == sorted(streamed) == sorted(info["tensors"])
    assert sorted(index) == sorted(f"{name}.weight" for name in info["quantized"])
    assert sorted(copies) == sorted(f"{name}.{part}" for name in index for part in ("packed", "absmax"))
    for name, parameter in loaded.named_parameters():
        if name not in index:
            assert torch.equal(stored[name], parameter.to(torch.bfloat16)), name
            assert streamed[name].dtype == parameter.dtype and torch.equal(streamed[name], parameter), name
            continue
        trained = dequantize(loaded.get_submodule(name.removesuffix(".weight")))
        assert trained.dtype == getattr(torch, dtype)
        assert torch.equal(stored[name], trained.to(torch.bfloat16)), name
        assert streamed[name].dtype == trained.dtype and torch.equal(streamed[name], trained), name
        with safe_open(tmp_path / "out/nf4" / index[name], framework="pt") as file:
            assert file.metadata() == {"block_size": "64", "dtype": dtype}
            packed, absmax = file.get_tensor(f"{name}.packed"), file.get_tensor(f"{name}.absmax")
        assert torch.equal(packed, parameter.data.reshape(-1))
        state = QuantState(absmax, shape=trained.shape, dtype=trained.dtype, blocksize=64, quant_type="nf4")
        assert torch.equal(dequantize_4bit(packed.view(-1, 1), state), trained), name


def test_the_manifest_covers_the_nf4_copy(tmp_path):
    write(shared_model(), tmp_path / "out")
    listed = read_manifest(tmp_path / "out", "checkpoint", deep=True)["files"]
    copies = [name for name in listed if name.startswith("nf4/")]
    assert sorted(copies) == [
        "nf4/index.json",
        *(f"nf4/{file.name}" for file in sorted(shared_model().glob("*.safetensors"))),
    ]
    file = tmp_path / "out" / copies[-1]
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(BadInput, match=f"the content of {copies[-1]} is not"):
        read_manifest(tmp_path / "out", "checkpoint", deep=True)


def test_a_file_written_by_tensors_is_byte_for_byte_that_of_safetensors(tmp_path):
    tensors = {
        "b.packed": torch.arange(5, dtype=torch.uint8),
        "b.absmax": torch.randn(3),
        "a.weight": torch.randn(3, 5).bfloat16(),
        "ü.scalar": torch.tensor(1.5),
        "empty": torch.zeros(0, 4),
    }
    save_file(tensors, tmp_path / "expected.safetensors", {"format": "pt"})
    shapes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    with TensorFile(tmp_path / "out.safetensors", shapes, {"format": "pt"}) as file:
        for name in reversed(tensors):
            file.write(name, tensors[name])
    assert (tmp_path / "out.safetensors").read_bytes() == (tmp_path / "expected.safetensors").read_bytes()
    with pytest.raises(ValueError, match=r"lacks a\.weight \(4 tensors\)"):
        with TensorFile(tmp_path / "out.safetensors", shapes, {"format": "pt"}) as file:
            file.write("empty", tensors["empty"])
    with pytest.raises(ValueError, match=r"a\.weight is torch.float32"):
        with TensorFile(tmp_path / "out.safetensors", shapes, {"format": "pt"}) as file:
            file.write("a.weight", tensors["a.weight"].float())


MEMORY_AND_DEATH = """
import os, signal, sys
from pathlib import Path
from kit.weights import write_base
from merge.export import export
folder = Path(sys.argv[1])

def resident(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))

def write(name):
    origin = {"model": name, "revision": None}
    export(write_base.Original(folder / name, "bfloat16", True), folder / f"{name}-base", origin, None)

write("small")  # what libraries take once
open("/proc/self/clear_refs", "w").write("5")  # VmHWM starts again
before = resident("VmRSS:")
write("large")
print(resident("VmHWM:") - before, flush=True)
written, write_tensor = [], write_base._write_tensor

def write_or_die(*arguments):
    written.append(arguments[1])
    if len(written) == 20:
        os.kill(os.getpid(), signal.SIGKILL)
    return write_tensor(*arguments)

write_base._write_tensor = write_or_die
(folder / "small").rename(folder / "killed")
write("killed")
"""


def make_large(folder: Path, small: Path) -> None:
    """A model of many small layers, 136 MiB in two shards of which each holds half."""
    shutil.copytree(small, folder, ignore=shutil.ignore_patterns("model*"))
    shape = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 40, "layer_types": None}
    config = {**read_json(folder / "config.json"), **shape, "max_window_layers": 40}
    (folder / "config.json").write_text(json.dumps(config))
    shapes = plan_base(AutoConfig.from_pretrained(folder)).shapes
    names, values = list(shapes), torch.randn(1 << 20).bfloat16()
    files = {
        "model-00001-of-00002.safetensors": names[: len(names) // 2],
        "model-00002-of-00002.safetensors": names[len(names) // 2 :],
    }
    for file, inside in files.items():
        tensors = {name: values[: math.prod(shapes[name])].view(shapes[name]).clone() for name in inside}
        save_file(tensors, folder / file, {"format": "pt"})
    weight_map = {name: file for file, inside in files.items() for name in inside}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.fixture(scope="module")
def died(tmp_path_factory):
    """(folder, the finished process): bases of a small and a large model written, then killed in a third."""
    folder = tmp_path_factory.mktemp("died")
    make_model(folder / "small")
    make_large(folder / "large", folder / "small")
    command = [sys.executable, "-c", MEMORY_AND_DEATH, str(folder)]
    return folder, processes.run(command, env=os.environ | {"PYTHONPATH": ""})  # without tests/start: memory counts


def test_memory_is_that_of_a_tensor_and_not_of_a_shard(died):
    folder, done = died
    peak = next(int(line) for line in done.stdout.splitlines() if line.isdigit())
    shards = [file.stat().st_size for file in (folder / "large").glob("*.safetensors")]
    assert len(shards) == 2 and min(shards) > 64 << 20
    # The largest tensor is 1 MiB in BF16, and quantizing it on a CPU takes some 20 bytes a weight; the blocks that
    # files are hashed by are 4 MiB. Measured: 23 to 41 MiB.
    assert peak < 56 << 20, f"{peak / 2**20:.0f} MiB"


def test_a_killed_command_leaves_nothing_under_the_name_and_can_be_repeated(died):
    folder, done = died
    assert done.returncode == -signal.SIGKILL, done.stderr
    left, source = sorted(path for path in folder.iterdir() if "killed" in path.name)
    assert left.name.startswith(".partial-killed-base.") and source.name == "killed"
    assert list(left.glob("*.safetensors")), "it was killed before it wrote anything"
    write(folder / "killed", folder / "killed-base")
    read_manifest(folder / "killed-base", "checkpoint", deep=True)
    assert not left.exists()


def test_a_disk_that_fills_leaves_nothing(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))  # the shards have about 400,000 bytes
    try:
        with pytest.raises(CheckFailed, match=r"could not write .*model-00001.*MiB are free there"):
            write(shared_model(), tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1000, 0, 1 << 20))
    with pytest.raises(BadInput, match=r"has 1\.0 MiB free and the base needs 0\.8 MiB in BF16 and 0\.2 MiB of NF4"):
        write(shared_model(), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_changes_while_it_is_read_gives_no_base(tmp_path, monkeypatch):
    source = shutil.copytree(shared_model(), tmp_path / "source")

    def write_and_change(*arguments, **named):
        info = write_base(*arguments, **named)
        (source / "config.json").write_text((source / "config.json").read_text() + "\n")
        return info

    write_base = merge_export.write_base
    monkeypatch.setattr(merge_export, "write_base", write_and_change)
    with pytest.raises(CheckFailed, match=r"changed while it was read: config.json has"):
        write(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def edit_shards(folder: Path, change) -> Path:
    """A copy of the tied model in one file, its tensors passed through `change`."""
    shutil.copytree(shared_model(), folder, ignore=shutil.ignore_patterns("model*"))
    tensors = read_all(shared_model())
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def add_head(tensors: dict, off: float) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + off


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), r"it has no model\.norm\.weight \(1 of 24\)"),
        (lambda t: t.update(bias=torch.zeros(3)), "it has bias, which the base has not"),
        (lambda t: t.update({"model.norm.weight": torch.ones(64)}), r"norm\.weight is \(64,\), it should be \(128,\)"),
        (lambda t: add_head(t, 0.5), "ties lm_head.weight to model.embed_tokens.weight and stores other values"),
    ],
    ids=["missing", "unknown", "shape", "tied but different"],
)  # fmt: skip
def test_a_checkpoint_that_is_not_its_configs_model_is_refused(tmp_path, change, message):
    with pytest.raises(BadInput, match=message):
        Original(edit_shards(tmp_path / "model", change), "float32", True)


def test_a_tied_checkpoint_that_stores_the_output_embedding_too_gives_the_same_base(tmp_path):
    model = edit_shards(tmp_path / "model", lambda tensors: add_head(tensors, 0.0))
    assert write(model, tmp_path / "out") == write(shared_model(), tmp_path / "other")
    assert "lm_head.weight" not in read_all(tmp_path / "out")


def test_of_a_single_file_and_an_index_the_one_that_transformers_loads_is_taken(tmp_path):
    model = shutil.copytree(shared_model(), tmp_path / "model")
    tensors = {name: tensor * 2 for name, tensor in read_all(shared_model()).items()}
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    loaded = hash_base(load_nf4(model, "float32", device="cpu"))
    assert loaded["hash"] != hash_base(load_nf4(shared_model(), "float32", device="cpu"))["hash"]
    assert write(model, tmp_path / "out")["hash"] == loaded["hash"]
    recorded = read_manifest(tmp_path / "out")["source"]["files"]
    assert "model.safetensors" in recorded
    assert not [name for name in recorded if name.startswith("model.safetensors.") or name.startswith("model-")]


SMALL = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
SMALL |= {"num_attention_heads": 4, "dtype": "float32"}


@pytest.mark.parametrize(
    ("family", "text", "shape", "name"),
    [
        ("Llama", "", {}, "model.layers.0.self_attn.rotary_emb.inv_freq"),
        (
            *("Qwen3_5", "Text"),
            {"num_key_value_heads": 2, "head_dim": 16, "layer_types": ["full_attention"]},
            "mtp.fc.weight",
        ),
    ],
)
def test_tensors_that_transformers_passes_over_are_left_out(tmp_path, family, text, shape, name):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}{text}Config")(**SMALL | shape)
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(tmp_path / "model")
    tensors = read_all(tmp_path / "model")
    save_file(tensors | {name: torch.ones(8)}, tmp_path / "model/model.safetensors", {"format": "pt"})
    info = write(tmp_path / "model", tmp_path / "out")
    assert info["hash"] == hash_base(load_nf4(tmp_path / "model", "float32", device="cpu"))["hash"]
    merged = dict(dequantized_tensors(tmp_path / "model", info))
    assert set(merged) == set(read_all(tmp_path / "out")) == set(tensors)


def test_layers_that_transformers_turns_before_quantizing_are_refused():
    from transformers import GPT2Config

    with pytest.raises(BadInput, match="is a Conv1D"):
        plan_base(GPT2Config(n_layer=1, n_embd=64, n_head=2, vocab_size=100))


def test_the_size_of_the_nf4_copy_is_that_of_its_tensors():
    plan = plan_base(AutoConfig.from_pretrained(shared_model()))
    made = [quantize_weight(torch.ones(plan.shapes[name]), True, None) for name in plan.quantized]
    assert plan.copy_bytes() == sum(packed.nbytes + block_maxima(state).nbytes for packed, state in made)
    assert plan_base(AutoConfig.from_pretrained(shared_model()), "fp8").copy_bytes() == 0
