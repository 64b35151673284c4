"""One base in memory for trainer and server (`server.share_base`): mapped memory, vLLM's layouts, what is refused, and
a server that ends. tests/smoke/test_launch_server.py maps that of a real server."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kit.core.config import share_rules
from kit.core.config.load import load_config
from kit.core.errors import BadInput, CheckFailed
from kit.plan.placement import place
from kit.rollout import server_watch
from kit.rollout.client import ServerRollout
from kit.rollout.replica import ReplicaError
from kit.rollout.server.shard import Linear, Part
from kit.rollout.server.share_base import ShareBase, base_tensors
from kit.rollout.server.versions import SHARE_BASE
from kit.weights import shared_memory
from kit.weights.fp8 import Fp8Linear, dequantize_with, quantize_weight
from kit.weights.frozen_base import hash_base, load_frozen
from kit.weights.shared_base import load_shared
from kit.weights.shared_memory import attach, describe, described_bytes, move_to_file
from launch.checks import run as checks
from launch.checks.children import Outcome
from launch.checks.machine import Machine
from launch.checks.steps import mapped_memory
from launch.vllm_command import Installed, plans
from tests.conftest import ROOT
from tests.unit.fake_engine import Engine, Server, without_vllm, write_base

CPU = torch.device("cpu")
CONFIG = ROOT / "recipes/configs/grpo-qwen3_8b-fp8-shared-1x16gb.yaml"


# Mapped memory ------------------------------------------------------------------------------------------------------


def test_moved_tensors_keep_values_strides_and_shared_storage():
    codes = torch.randn(6, 10).to(torch.float8_e4m3fn)
    held = {"codes": codes.t(), "rows": codes[2:4], "norm": torch.randn(7, dtype=torch.bfloat16)}
    before = {name: (one.clone(), one.stride()) for name, one in held.items()}
    fd = move_to_file(held.values())
    mapped = attach(json.loads(json.dumps(describe(held, fd))), CPU)
    for name, (value, stride) in before.items():
        for one in (held[name], mapped[name]):
            assert one.stride() == stride and torch.equal(one.float(), value.float()), name
    held["codes"].view(torch.uint8)[:, 2] = 0x38  # 1.0
    assert (held["rows"][0].float() == 1).all() and (mapped["rows"][0].float() == 1).all(), "one memory"
    os.close(fd)


def test_what_a_trainer_writes_never_reaches_the_server():
    held = {"norm": torch.ones(5000)}
    fd = move_to_file(held.values())
    mapped = attach(describe(held, fd), CPU)
    mapped["norm"].zero_()
    assert (held["norm"] == 1).all() and (mapped["norm"] == 0).all()
    os.close(fd)


def test_mapped_memory_outlives_its_owner_and_leaves_nothing_behind():
    """A killed server takes nothing away on a CPU, and no file stays in /dev/shm."""
    code = (
        "import json, sys, torch\n"
        "from kit.weights.shared_memory import describe, move_to_file\n"
        "held = {'x': torch.arange(9.0)}\n"
        "print(json.dumps(describe(held, move_to_file(held.values()))), flush=True)\n"
        "sys.stdin.read()"
    )
    before = set(Path("/dev/shm").iterdir())
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    described = json.loads(process.stdout.readline())
    mapped = attach(described, CPU)
    process.kill()
    process.communicate()
    assert torch.equal(mapped["x"], torch.arange(9.0))
    assert not {file for file in set(Path("/dev/shm").iterdir()) - before if "shared-base" in file.name}
    with pytest.raises(BadInput, match=f"memory of the server's process {described['pid']} cannot be mapped"):
        attach(described, CPU)


def test_memory_of_another_device_is_refused_with_both_names(monkeypatch):
    held = {"x": torch.ones(2)}
    described = describe(held, move_to_file(held.values())) | {"gpu": "GPU-1234"}
    with pytest.raises(BadInput, match="holds its base on GPU GPU-1234, the trainer computes on a CPU"):
        attach(described, CPU)


def test_a_gpus_handles_travel_as_json_and_arrive_as_torch_made_them(monkeypatch):
    """torch's own reductions hand the same values over, in this order."""
    made = (0, b"\x00\xffhandle", 512, 64, b"counter", 8, b"event", True)
    storage = SimpleNamespace(_share_cuda_=lambda: made)
    one = json.loads(json.dumps(shared_memory._cuda_handle(storage)))
    opened = []
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    kind = SimpleNamespace(_new_shared_cuda=lambda *values: opened.append(values))
    monkeypatch.setattr(torch, "UntypedStorage", kind)
    shared_memory._open_cuda(one, torch.device("cuda", 0))
    assert opened == [made]


def test_torch_still_returns_what_the_handles_are_made_of():
    source = Path(torch.multiprocessing.reductions.__file__).read_text()
    order = "handle storage_size_bytes storage_offset_bytes ref_counter_handle ref_counter_offset event_handle"
    returned = source[source.index("def reduce_tensor") : source.index("= storage._share_cuda_()")]
    names = [line.split(",")[0].strip() for line in returned[returned.rindex("(\n") :].splitlines() if "," in line]
    assert names == ["device", *order.split(), "event_sync_required"]
    taken = source[source.index("storage_cls._new_shared_cuda(") :].split(")")[0]
    assert [name.strip().removeprefix("storage_") for name in taken.split("(")[1].split(",")[:-1]] == [
        *("device", "handle", "size_bytes", "offset_bytes", "ref_counter_handle", "ref_counter_offset"),
        *("event_handle", "event_sync_required"),
    ]


def test_bytes_of_one_place_count_once():
    weight = torch.zeros(4, 8, dtype=torch.bfloat16)
    assert described_bytes(describe({"embed": weight, "head": weight, "rows": weight[:2]})) == 64 + 32


# vLLM's layouts -----------------------------------------------------------------------------------------------------

WIDTHS = {"q_proj": 24, "k_proj": 8, "v_proj": 8}


def served_layer(weight: torch.Tensor, multiple: int = 1, bias: torch.Tensor | None = None) -> torch.nn.Module:
    """A layer as vLLM 0.31 stores it in fp8_per_channel: codes transposed, (in, out) with strides (1, in), both sizes
    padded to a `multiple` (CUTLASS: 16), and scales padded with ones."""
    codes, scale = quantize_weight(weight)
    rows, columns = (-size % multiple for size in weight.shape)
    padded = torch.nn.functional.pad(codes.view(torch.uint8), (0, columns, 0, rows)).view(torch.float8_e4m3fn)
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(padded.t(), requires_grad=False)
    layer.weight_scale = torch.nn.Parameter(torch.nn.functional.pad(scale, (0, 0, 0, rows), value=1.0), False)
    layer.bias = None if bias is None else torch.nn.Parameter(bias, requires_grad=False)
    return layer


def fused(layer: torch.nn.Module, columns: int) -> Linear:
    parts, row = [], 0
    for name, rows in WIDTHS.items():
        parts.append(Part(f"attn.{name}", row, rows, 0, 0))
        row += rows
    return Linear("attn.qkv_proj", layer, row, columns, parts)


def model_of(layer: torch.nn.Module) -> torch.nn.Module:
    model, model.attn = torch.nn.Module(), torch.nn.Module()
    model.attn.qkv_proj = layer
    model.norm = torch.nn.LayerNorm(4, bias=False, dtype=torch.bfloat16)
    return model


@pytest.mark.parametrize(("columns", "multiple"), [(32, 16), (40, 16), (32, 1)])
def test_each_layers_codes_and_scales_are_views_of_the_fused_and_transposed_ones(columns, multiple):
    torch.manual_seed(0)
    weights = {name: torch.randn(rows, columns, dtype=torch.bfloat16) for name, rows in WIDTHS.items()}
    bias = torch.randn(sum(WIDTHS.values()), dtype=torch.bfloat16)
    layer = served_layer(torch.cat([*weights.values()]), multiple, bias)
    found = base_tensors(model_of(layer), [fused(layer, columns)])
    first, last = layer.weight.data_ptr(), layer.weight.data_ptr() + layer.weight.numel()
    x, row = torch.randn(3, columns, dtype=torch.bfloat16), 0
    for name, weight in weights.items():
        codes, scale = quantize_weight(weight)
        mine, its = found[f"attn.{name}.weight"], found[f"attn.{name}.weight_scale"]
        assert first <= mine.data_ptr() < last, "no copy"
        assert torch.equal(mine.view(torch.uint8), codes.view(torch.uint8)) and torch.equal(its, scale)
        assert torch.equal(found[f"attn.{name}.bias"], bias[row : row + len(weight)])
        own = torch.nn.Linear(columns, len(weight), bias=False, dtype=torch.bfloat16)
        expected = torch.nn.functional.linear(x, dequantize_with(codes, scale, torch.bfloat16))
        assert torch.equal(Fp8Linear(own, stored=(mine, its))(x), expected)
        row += len(weight)
    assert found.keys() >= {"norm.weight"} and "attn.qkv_proj.weight" not in found


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda one: setattr(one, "weight", torch.nn.Parameter(one.weight.t().contiguous(), False)), "of its own"),
        (lambda one: setattr(one, "weight", torch.nn.Parameter(one.weight.contiguous(), False)), r"strides \(40, 1\)"),
        (lambda one: setattr(one, "weight", torch.nn.Parameter(one.weight.bfloat16(), False)), "bfloat16"),
        (lambda one: setattr(one, "weight", torch.nn.Parameter(torch.empty(0), False)), r"\(0,\)"),
        (lambda one: setattr(one, "weight_scale", None), "of its own"),
        (lambda one: setattr(one, "weight_scale", torch.nn.Parameter(torch.ones(1), False)), "1 scales .* for 40"),
    ],
    ids=["packed", "row-major", "bf16", "prepacked", "no scale", "per tensor"],
)
def test_another_layout_is_refused_and_nothing_is_moved(change, why, monkeypatch):
    layer = served_layer(torch.randn(40, 32, dtype=torch.bfloat16))
    change(layer)
    worker = ShareBase()
    worker.model_runner = SimpleNamespace(model=model_of(layer))
    monkeypatch.setattr("kit.rollout.server.share_base.find_linears", lambda model: [fused(layer, 32)])
    where = layer.weight.data_ptr()
    answer = worker.share_base()
    assert list(answer) == ["error"] and re.search(why, answer["error"]), answer
    assert layer.weight.data_ptr() == where


def test_weights_that_are_partly_offloaded_are_refused():
    layer = served_layer(torch.randn(40, 32, dtype=torch.bfloat16))
    model = model_of(layer)
    model.norm.to("meta")
    with pytest.raises(ValueError, match="its weights are on cpu and meta: start it without offloading"):
        base_tensors(model, [fused(layer, 32)])


def test_a_worker_moves_its_weights_once_and_describes_them_again_for_the_next_trainer(monkeypatch):
    layer = served_layer(torch.randn(40, 32, dtype=torch.bfloat16))
    worker = ShareBase()
    worker.model_runner = SimpleNamespace(model=model_of(layer))
    monkeypatch.setattr("kit.rollout.server.share_base.find_linears", lambda model: [fused(layer, 32)])
    first, again = worker.share_base(), worker.share_base()
    assert first == again
    codes = attach(first, CPU)["attn.q_proj.weight"]
    assert torch.equal(codes.view(torch.uint8), layer.weight.t()[:24].view(torch.uint8))


# The trainer's model ------------------------------------------------------------------------------------------------


SHAPE = {
    "vocab_size": 80,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
SHAPE |= {"num_key_value_heads": 1, "max_position_embeddings": 64}


def small_checkpoint(family: str, folder: Path) -> Path:
    """A random model: qwen3 with tied embeddings, qwen2 with biases, llama with a head of its own."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SHAPE, tie_word_embeddings=family == "qwen3")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            torch.nn.init.normal_(parameter)
    model.generation_config.eos_token_id = [3, 5]
    model.save_pretrained(folder)
    return folder


def as_served(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of an FP8 base as a server shares them: a vocabulary padded to 64, tied weights under one name."""
    found = {}
    for name, parameter in model.named_parameters():
        layer = model.get_submodule(name.rpartition(".")[0])
        if isinstance(layer, Fp8Linear) and name.endswith(".weight"):
            found |= {name: layer.codes, f"{name.removesuffix('weight')}weight_scale": layer.weight_scale}
        elif name in ("model.embed_tokens.weight", "lm_head.weight"):
            found[name] = torch.nn.functional.pad(parameter.data, (0, 0, 0, -len(parameter) % 64))
        else:
            found[name] = parameter.data
    return found


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_a_mapped_base_is_the_one_that_would_have_been_loaded(family, tmp_path):
    path = small_checkpoint(family, tmp_path)
    own = load_frozen(path, "fp8", device="cpu")
    tensors = as_served(own)
    shared = load_shared(path, tensors)
    assert hash_base(shared) == hash_base(own)
    ids = torch.arange(3, 15).view(2, 6)
    with torch.no_grad():
        assert torch.equal(shared(ids).logits, own(ids).logits)
    assert not shared.training and not any(one.requires_grad for one in shared.parameters())
    assert shared.generation_config.to_dict() == own.generation_config.to_dict()
    held = {one.untyped_storage().data_ptr() for one in tensors.values()}
    assert all(one.untyped_storage().data_ptr() in held for one in shared.parameters()), "no memory of its own"


def test_a_tensor_that_is_missing_or_of_another_kind_is_named(tmp_path):
    path = small_checkpoint("qwen3", tmp_path)
    tensors = as_served(load_frozen(path, "fp8", device="cpu"))
    name = "model.layers.0.mlp.down_proj.weight"
    for wrong, why in (
        ({name: tensors[name].bfloat16()}, f"torch.bfloat16 .* as {name}, the trainer needs torch.float8_e4m3fn"),
        ({"model.norm.weight": torch.ones(3, dtype=torch.bfloat16)}, r"\(3,\) as model.norm.weight"),
        ({"model.norm.weight": None}, "no tensor as model.norm.weight"),
    ):
        with pytest.raises(BadInput, match=why):
            load_shared(path, tensors | wrong)


# What is refused ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (["--rollout.sync=remerge"], "rollout.sync is remerge: remerge rewrites .* Set it to adapter"),
        (["--policy.quantization=nf4"], "policy.quantization is nf4: vLLM holds no NF4 .* Set it to fp8"),
        (["--server.weights=fp8_per_tensor"], "server.weights is fp8_per_tensor: .* Set it to fp8_per_channel"),
        (["--model.dtype=float32"], "model.dtype is float32"),
        (["--server.tensor_parallel=2"], "server.tensor_parallel is 2: each worker .* Set it to 1"),
        (["--server.sleep=true"], "server.sleep is true: .* Set it to false"),
        (["--policy.embeddings=host"], "policy.embeddings is host"),
        (["--server.vllm={cpu-offload-gb: 4}"], "names cpu-offload-gb: part of the weights"),
        (["--server.vllm={enable_cumem_allocator: true}"], "names enable_cumem_allocator: CUDA does not export"),
        (["--rollout.backend=in_process"], "rollout.backend is in_process: there is no server"),
        (["--rollout.server_urls=[http://10.0.0.9:8000]"], "within one machine"),
        (["--rollout.server_urls=[http://127.0.0.1:1, http://127.0.0.1:2]"], "names 2 replicas"),
    ],
)
def test_what_a_shared_base_does_not_go_with_is_refused_by_name(changes, why):
    assert share_rules.faults(load_config(CONFIG)) == []
    (fault,) = share_rules.faults(load_config(CONFIG, changes))
    assert re.search(why, fault), fault
    assert share_rules.faults(load_config(CONFIG, [*changes, "--server.share_base=false"])) == []


def test_several_trainer_processes_are_refused():
    (fault,) = share_rules.faults(load_config(CONFIG), processes=2)
    assert "2 trainer processes" in fault


def test_the_server_starts_with_the_extension_that_shares():
    (made,) = plans(load_config(CONFIG), Installed("0.31.0", False), ["0"])
    assert made.options["worker_extension_cls"] == SHARE_BASE and made.options["enable_lora"]
    with pytest.raises(BadInput, match=r"rollout\.sync is remerge"):
        plans(load_config(CONFIG, ["--rollout.sync=remerge"]), Installed("0.31.0", False), ["0"])


def test_the_trainer_takes_the_replicas_own_gpu():
    config = load_config(CONFIG, ["--train.gpus=null", "--server.gpus=[1]"])
    assert place(config, ["0", "1", "2"], True).trainer == ("1",)


def test_the_doctor_tries_it_for_a_run_that_shares_its_base_and_for_no_other(monkeypatch):
    def row(outcome: Outcome, *changes: str):
        monkeypatch.setattr("launch.checks.run.run_step", lambda *_: outcome)
        (found,) = checks.sharing(Machine(config=load_config(CONFIG, changes)))
        return found

    assert row(Outcome(1.0), "--server.share_base=false").status == "skip"
    assert row(Outcome(1.0, {"device": "cuda:0"})).status == "ok"
    failed = row(Outcome(1.0, fault="RuntimeError: CUDA error: operation not supported"))
    assert failed.status == "fail" and "not supported" in failed.found and "server.share_base" in failed.fix
    assert mapped_memory()["device"] in ("cpu", "cuda:0")


@pytest.fixture
def engine(monkeypatch, tmp_path) -> Engine:
    without_vllm(monkeypatch, tmp_path)
    engine = Engine(write_base(tmp_path / "base"), remerge=False, workers=1)
    engine.vllm_config.parallel_config.worker_extension_cls = SHARE_BASE
    return engine


def test_a_server_says_where_its_base_is_in_a_file_for_its_user_alone(engine, tmp_path):
    status, answer = Server(engine, tmp_path).post("share", {})
    assert status == 200 and engine.calls == ["share_base"]
    file = Path(answer["path"])
    assert json.loads(file.read_text()) == {} and file.parent.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda one: setattr(one.parallel_config, "worker_extension_cls", ""), "without --worker-extension-cls"),
        (lambda one: setattr(one.parallel_config, "tensor_parallel_size", 2), "split over 2 GPUs"),
        (lambda one: setattr(one.model_config, "enable_sleep_mode", True), "--enable-sleep-mode"),
        (lambda one: setattr(one.model_config, "enable_cumem_allocator", True), "--enable-cumem-allocator"),
    ],
)
def test_a_server_that_cannot_share_says_why_before_it_moves_anything(engine, tmp_path, change, why):
    change(engine.vllm_config)
    status, answer = Server(engine, tmp_path).post("share", {})
    assert status == 400 and why in answer["error"] and engine.calls == []


def rollout_of(share) -> ServerRollout:
    rollout = ServerRollout.__new__(ServerRollout)
    rollout.replicas = [SimpleNamespace(url="http://127.0.0.1:1", share=share)]
    return rollout


def test_a_replica_that_shares_nothing_ends_the_start_with_its_reason(tmp_path):
    def refuse():
        raise ReplicaError("http://127.0.0.1:1", "share", "it was started with --enable-sleep-mode.", 400)

    with pytest.raises(BadInput, match=r"does not share its base .*--enable-sleep-mode\. Restart it"):
        rollout_of(refuse).share_base()
    with pytest.raises(BadInput, match="must run on one machine"):
        rollout_of(lambda: tmp_path / "none").share_base()


# A server that ends -------------------------------------------------------------------------------------------------


@pytest.fixture
def sleeper():
    process = subprocess.Popen(["sleep", "600"])
    yield process
    server_watch.unwatch()  # first: it would raise in the next test
    process.kill()
    process.wait()


def test_a_training_ends_with_the_cause_as_soon_as_its_server_is_killed(sleeper):
    server_watch.watch(sleeper.pid, "http://127.0.0.1:1")
    with pytest.raises(CheckFailed, match=rf"127.0.0.1:1 has ended \(process {sleeper.pid}\).*continue with --resume"):
        sleeper.kill()
        time.sleep(60)


def test_watching_a_server_leaves_other_signals_alone(sleeper):
    """Slurm's, and the one at which a trainer writes its stacks."""
    before = {one: signal.getsignal(one) for one in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)}
    server_watch.watch(sleeper.pid, "http://127.0.0.1:1")
    assert {one: signal.getsignal(one) for one in before} == before


def test_a_server_may_end_after_its_trainer(sleeper):
    before = signal.getsignal(server_watch.SIGNAL)
    server_watch.watch(sleeper.pid, "http://127.0.0.1:1")
    server_watch.unwatch()
    server_watch.unwatch()
    assert signal.getsignal(server_watch.SIGNAL) == before
    sleeper.kill()
    sleeper.wait()
    with pytest.raises(BadInput, match=f"the process {sleeper.pid} that holds the base"):
        server_watch.watch(sleeper.pid, "http://127.0.0.1:1")
