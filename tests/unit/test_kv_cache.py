"""`server.kv_cache: fastest`: an FP8 KV cache by FlashInfer where it was measured to be faster, and nowhere else."""

import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kit.core.config.load import config_from_dict
from kit.core.config.schema import Config
from kit.core.limits import flashinfer_gib
from kit.core.run_directory import write_manifest
from kit.plan import fitting, memory, report
from kit.plan.fitting import lay_out
from kit.plan.gpus import parse_gpus
from kit.plan.shapes import shape_by_size
from kit.plan.sizes import with_keys
from kit.rollout.server.endpoint import attention_backend
from launch import server
from launch.export.translate import Cluster, translate
from launch.kv_cache import COMPILE_S, Choice, FlashInfer, choose, installed_flashinfer
from launch.vllm_command import Installed, plans

H200, H100, B200, L40S, A100 = (
    [(name, capability)]
    for name, capability in (
        ("NVIDIA H200", (9, 0)),
        ("NVIDIA H100 80GB HBM3", (9, 0)),
        ("NVIDIA B200", (10, 0)),
        ("NVIDIA L40S", (8, 9)),
        ("NVIDIA A100-SXM4-80GB", (8, 0)),
    )
)
# config.json of Qwen3-8B, as far as it is read.
QWEN3_8B = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
QWEN3_8B |= {"sliding_window": None, "use_sliding_window": False, "layer_types": ["full_attention"] * 36}
# Names as FlashInfer 0.6.14 and 0.6.17 build them.
XQA = "xqa_input_bf16_kv_cache_e4m3_output_bf16_page_size_16_head_dim_{}_head_group_ratio_{}_use_sliding_window_{}"
XQA += "_use_spec_dec_False_spec_q_seq_len_1"
FA3 = (
    "batch_prefill_with_kv_cache_dtype_q_e4m3_dtype_kv_e4m3_dtype_o_bf16_dtype_idx_i32_head_dim_qk_128_head_dim_vo_128"
)
FA3 += "_posenc_0_use_swa_False_use_logits_cap_False_f16qk_False_sm90"


def compiled(folder: Path, *names: str) -> Path:
    for name in names or (XQA.format(128, 4, False), FA3):
        (folder / name).mkdir(parents=True)
        (folder / name / f"{name}.so").write_bytes(b"\x7fELF")
    return folder


@pytest.fixture
def installed(tmp_path):
    """FlashInfer with the kernels of Qwen3-8B's heads, and another version of any part."""
    folder = compiled(tmp_path / "kernels")

    def make(packages: dict | None = None, **changes) -> FlashInfer:
        found = {"flashinfer-python": "0.6.14", "flashinfer-cubin": "0.6.14", "flashinfer-jit-cache": "0.6.14+cu130"}
        there = {name: version for name, version in (found | (packages or {})).items() if version}
        return FlashInfer(there, **{"compiled": (folder,)} | changes)

    return make


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in ("VLLM_BATCH_INVARIANT", "VLLM_API_KEY", "CUDA_VISIBLE_DEVICES", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)


def config(**groups) -> Config:
    """The measured point: 16 completions of 4,096 tokens; keyword `server={...}` and the like change its groups."""
    values = {
        "run": {"name": "x"},
        "model": {"id": "org/m"},
        "policy": {},
        "rollout": {"backend": "server", "max_prompt_length": 250, "max_completion_length": 4096},
        "server": {},
        "data": {"path": "d"},
        "train": {"max_steps": 1, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2},
    }
    for group, changes in groups.items():
        values[group] = values[group] | changes
    return config_from_dict(values)


@pytest.mark.parametrize("cards", [H200, H100])
def test_long_completions_on_hopper_get_fp8_by_flashinfer(cards, installed):
    found = choose(config(), False, cards, QWEN3_8B, installed())
    assert found.options == {"kv_cache_dtype": "fp8", "attention_backend": "FLASHINFER"}
    reason = f"completions of 4,096 tokens on {cards[0][0]}, flashinfer-python 0.6.14"
    assert found.text == f"fp8 (FLASHINFER), server.kv_cache fastest: {reason}"


@pytest.mark.parametrize(
    ("groups", "cards", "model", "reason"),
    [
        # Cards
        ({}, B200, {}, "compute capability 10.0, measured to be faster on Hopper only"),
        ({}, L40S, {}, "compute capability 8.9"),
        ({"server": {"weights": "fp8_per_tensor"}}, A100, {}, "compute capability 8.0"),
        ({}, [*H200, *L40S], {}, "compute capability 8.9"),
        ({}, [], {}, "the GPU is not known here"),
        # Lengths
        ({"rollout": {"max_completion_length": 4095}}, H200, {}, "completions of 4095 tokens, measured .* from 4,096"),
        ({"server": {"max_num_seqs": 15}}, H200, {}, "15 completions at once"),
        ({"train": {"gradient_accumulation_steps": 1}}, H200, {}, "8 completions at once on a replica"),
        ({"rollout": {"server_urls": ["http://a:1", "http://a:2"]}}, H200, {}, "8 completions at once on a replica"),
        # Weights
        ({"server": {"weights": "bf16"}}, H200, {}, r"server.weights bf16 \(W16A16\)"),
        ({"server": {"weights": "w4a16"}}, H200, {}, r"server.weights w4a16 \(W4A16\)"),
        ({"server": {"weights": "fp8_per_block", "force_w8a16": True}}, H200, {}, r"fp8_per_block \(W8A16\)"),
        ({"policy": {"quant_cfg": "fp8"}}, H200, {}, "policy.quant_cfg fp8 determines"),
        ({"model": {"dtype": "float16"}}, H200, {}, "model.dtype float16"),
        # What was not measured with it, or what the user chose
        ({"server": {"tensor_parallel": 2}}, H200, {}, "server.tensor_parallel 2"),
        ({"server": {"speculation": "ngram"}}, H200, {}, "measured without drafts"),
        ({"server": {"vllm": {"attention-backend": "FLASH_ATTN"}}}, H200, {}, "server.vllm sets attention_backend"),
        ({"server": {"vllm": {"attention_config.backend": "TRITON_ATTN"}}}, H200, {}, "sets attention_config"),
        ({"server": {"vllm": {"block_size": 64}}}, H200, {}, "sets block_size"),
        # Models
        ({}, H200, {"head_dim": 64}, "heads of 64, measured with heads of 128"),
        ({}, H200, {"head_dim": None, "num_attention_heads": 16}, "heads of 256"),
        ({}, H200, {"kv_lora_rank": 512}, "layers other than full attention"),
        ({}, H200, {"attn_logit_softcapping": 50.0}, "layers other than full attention"),
        ({}, H200, {"layer_types": ["full_attention", "linear_attention"]}, "layers other than full attention"),
        ({}, H200, {"sliding_window": 4096, "use_sliding_window": True}, "layers other than full attention"),
        ({}, H200, {"num_attention_heads": None}, "config.json is not there yet"),
    ],
)
def test_elsewhere_the_cache_stays_in_the_models_dtype_with_the_reason(groups, cards, model, reason, installed):
    found = choose(config(**groups), False, cards, QWEN3_8B | model, installed())
    assert found.options == {"kv_cache_dtype": "auto"} and found.extra_gib == 0
    assert re.search(reason, found.reason) and found.reason.startswith("server.kv_cache fastest: ")


@pytest.mark.parametrize(
    ("packages", "reason"),
    [
        ({"packages": {"flashinfer-python": None}}, "flashinfer-python is not installed. Install vLLM's requirements"),
        (
            {"packages": {"flashinfer-cubin": None}},
            "flashinfer-cubin is not installed. Install flashinfer-cubin==0.6.14",
        ),
        ({"packages": {"flashinfer-cubin": "0.6.13"}}, "flashinfer-cubin 0.6.13 is not of flashinfer-python 0.6.14"),
        (
            {"packages": {"flashinfer-jit-cache": "0.6.1+cu130"}},
            "flashinfer-jit-cache 0.6.1+cu130 is not of flashinfer-python 0.6.14",
        ),
        ({"compiled": ()}, "groups of 4 heads of 128 are not compiled here. Install flashinfer-jit-cache==0.6.14 for"),
        (
            {"compiled": (), "has_compiler": True},
            f"or let one start compile them: --rollout.server_wait_s {COMPILE_S}",
        ),
    ],
)
def test_without_flashinfers_kernels_the_server_says_what_to_install(installed, packages, reason):
    found = choose(config(), False, H200, QWEN3_8B, installed(**packages))
    assert found.options == {"kv_cache_dtype": "auto"}
    assert reason in found.text and found.text.endswith("for faster long completions")


def test_a_start_compiles_only_if_the_run_waits_for_it(installed):
    patient = config(rollout={"server_wait_s": COMPILE_S})
    found = choose(patient, False, H200, QWEN3_8B, installed(compiled=(), has_compiler=True))
    assert found.backend == "FLASHINFER" and "compiles its kernels at this start" in found.reason
    assert choose(patient, False, H200, QWEN3_8B, installed(compiled=())).backend is None
    assert "compiles" not in choose(patient, False, H200, QWEN3_8B, installed(has_compiler=True)).reason


@pytest.mark.parametrize(
    "names",
    [
        [XQA.format(128, 4, False)],
        [FA3],
        [XQA.format(128, 8, False), FA3],
        [XQA.format(64, 4, False), FA3],
        [XQA.format(128, 4, True), FA3],
        [XQA.format(128, 4, False).replace("e4m3", "bf16"), FA3],
    ],
)
def test_kernels_of_other_heads_do_not_count(installed, tmp_path, names):
    found = installed(compiled=(compiled(tmp_path / "others", *names),))
    assert choose(config(), False, H200, QWEN3_8B, found).backend is None
    (tmp_path / "empty" / names[0]).mkdir(parents=True)  # a compilation that was killed
    assert choose(config(), False, H200, QWEN3_8B, installed(compiled=(tmp_path / "empty",))).backend is None


@pytest.mark.parametrize("value", ["auto", "fp8"])
def test_a_value_that_was_set_is_passed_on_alone(installed, value):
    assert choose(config(server={"kv_cache": value}), False, H200, QWEN3_8B, installed()) == Choice(value)


def test_cpus_and_batch_invariance_keep_the_models_dtype(installed, monkeypatch):
    assert "vLLM for CPUs" in choose(config(), True, [], QWEN3_8B, installed()).reason
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert "VLLM_BATCH_INVARIANT" in choose(config(), False, H200, QWEN3_8B, installed()).reason


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """Packages of FlashInfer as pip installs them, a home and a PATH of their own; `add` installs another one."""
    site, home, path = tmp_path / "site", tmp_path / "home", tmp_path / "bin"
    for folder in (site, home, path):
        folder.mkdir()
    monkeypatch.setattr(sys, "path", [str(site), *sys.path])
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(home))
    monkeypatch.setenv("PATH", str(path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))

    def add(name: str, version: str, *kernels: str) -> None:
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        package = site / name.replace("-", "_").removesuffix("_python")
        package.mkdir()
        # Importing it would initialize CUDA, or raise for a version that does not fit.
        (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
        if kernels:
            compiled(package / "jit_cache", *kernels)
        files = [file for file in package.rglob("*") if file.is_file()]
        (info / "RECORD").write_text("".join(f"{file.relative_to(site)},,\n" for file in files))

    def tool(name: str, folder: Path = path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)

    return SimpleNamespace(add=add, tool=tool, home=home, cuda=tmp_path / "cuda")


def test_packages_kernels_and_compiler_are_found_without_importing_them(environment):
    assert installed_flashinfer().version is None
    environment.add("flashinfer-python", "0.6.14")
    environment.add("flashinfer-cubin", "0.6.14")
    found = installed_flashinfer()
    assert found.packages == {"flashinfer-python": "0.6.14", "flashinfer-cubin": "0.6.14"}
    assert not found.has_compiler and not found.vouched
    assert choose(config(), False, H200, QWEN3_8B).backend is None
    # In the folder of FlashInfer's own cache: of another version, then of another card, then of this one.
    for place in ("0.6.13/90a", "0.6.14/100a"):
        compiled(environment.home / ".cache/flashinfer" / place / "cached_ops")
        assert choose(config(), False, H200, QWEN3_8B).backend is None, place
    compiled(environment.home / ".cache/flashinfer/0.6.14/90a/cached_ops")
    assert choose(config(), False, H200, QWEN3_8B).backend == "FLASHINFER"


@pytest.mark.parametrize(
    ("version", "package", "is_found"),
    [
        ("0.6.14", "flashinfer-jit-cache", True),
        ("0.7.0.post1", "flashinfer-jit-cache-sm90a", True),
        ("0.7.0.post1", "flashinfer-jit-cache-sm100a", False),
    ],
)
def test_the_package_of_compiled_kernels_is_found(environment, version, package, is_found):
    environment.add("flashinfer-python", version)
    environment.add("flashinfer-cubin", version)
    environment.add(package, f"{version}+cu130", XQA.format(128, 4, False), FA3)
    assert (installed_flashinfer().packages.get(package) == f"{version}+cu130") == is_found
    assert choose(config(), False, H200, QWEN3_8B).backend == ("FLASHINFER" if is_found else None)


def test_cubins_may_be_there_without_their_package(environment, monkeypatch):
    environment.add("flashinfer-python", "0.6.14")
    environment.add("flashinfer-jit-cache", "0.6.14+cu130", XQA.format(128, 4, False), FA3)
    assert "flashinfer-cubin is not installed" in choose(config(), False, H200, QWEN3_8B).reason
    monkeypatch.setenv("VLLM_HAS_FLASHINFER_CUBIN", "1")  # vLLM's own variable
    assert choose(config(), False, H200, QWEN3_8B).backend == "FLASHINFER"


def test_a_compiler_is_nvcc_with_ninja(environment):
    environment.tool("ninja")
    assert not installed_flashinfer().has_compiler
    environment.tool("nvcc", environment.cuda / "bin")
    assert installed_flashinfer().has_compiler
    os.environ["CUDA_HOME"] = ""
    environment.tool("nvcc")
    assert installed_flashinfer().has_compiler


@pytest.fixture
def hopper(environment, tmp_path):
    """A configuration with a base of Qwen3-8B's heads, where FlashInfer has their kernels."""
    for name in ("flashinfer-python", "flashinfer-cubin"):
        environment.add(name, "0.6.14")
    compiled(environment.home / ".cache/flashinfer/0.6.14/90a/cached_ops")
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps(QWEN3_8B | {"model_type": "qwen3"}))
    write_manifest(base, "checkpoint", base_hash="ab")
    return lambda **server_keys: config(server={"base": str(base)} | server_keys)


CUDA = Installed("0.31.0", False)


def test_the_command_line_has_both_flags_and_leaves_room_for_flashinfers_buffers(hopper):
    (plan,) = plans(hopper(), CUDA, ["0"], 139.8, H200)
    words = " ".join(plan.command)
    assert "--kv-cache-dtype fp8 --attention-backend FLASHINFER" in words
    (plain,) = plans(hopper(kv_cache="auto"), CUDA, ["0"], 139.8, H200)
    assert "--kv-cache-dtype auto" in " ".join(plain.command) and "attention" not in " ".join(plain.command)
    less = plain.options["gpu_memory_utilization"] - plan.options["gpu_memory_utilization"]
    # 394 MiB for decoding, 512 MiB for prompts: 8,192 tokens of 32 heads of 128, 16 bytes each.
    assert flashinfer_gib(32 * 128, 8192) == pytest.approx((394 + 512) / 1024)
    assert less == pytest.approx((394 + 512) / 1024 / 139.8, abs=1e-3)
    (own,) = plans(hopper(vllm={"attention_backend": "FLASH_ATTN"}), CUDA, ["0"], 139.8, H200)
    assert "--kv-cache-dtype auto" in " ".join(own.command) and own.options["attention_backend"] == "FLASH_ATTN"
    (sized,) = plans(hopper(kv_cache_gib=22), CUDA, ["0"], 139.8, H200)
    assert sized.options["kv_cache_memory_bytes"] == 22 << 30 and sized.options["kv_cache_dtype"] == "fp8"


def test_vllms_own_parser_takes_the_flags_and_info_names_the_backend(hopper):
    parse = pytest.importorskip("vllm.entrypoints.launchers.cli_args").make_arg_parser
    from vllm.config import AttentionConfig
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    (plan,) = plans(hopper(), CUDA, ["0"], 139.8, H200)
    parsed = parse(FlexibleArgumentParser()).parse_args(plan.command[3:])
    assert parsed.kv_cache_dtype == "fp8"
    found = AttentionConfig(backend=parsed.attention_backend)
    assert attention_backend(SimpleNamespace(attention_config=found)) == "FLASHINFER"
    assert attention_backend(SimpleNamespace(attention_config=AttentionConfig())) is None


def test_flashinfers_buffers_are_those_of_vllms_source():
    source = pytest.importorskip("vllm").__path__[0]
    text = (Path(source) / "v1/attention/backends/flashinfer.py").read_text()
    assert "FLASHINFER_PREFILL_WORKSPACE_BYTES_PER_ELEM = 16" in text, "kit/core/limits.py FLASHINFER_BYTES"
    variables = (Path(source) / "envs.py").read_text()
    assert "VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE: int = 394 * 1024 * 1024" in variables, "FLASHINFER_GIB"


def test_the_server_prints_what_it_chose_in_a_line(hopper, capsys):
    made = hopper()
    for keys, cards, said in (
        ({}, H200, "KV cache fp8 (FLASHINFER), server.kv_cache fastest: completions of 4,096 tokens on NVIDIA H200"),
        ({}, L40S, "KV cache auto, server.kv_cache fastest: compute capability 8.9, measured to be faster on Hopper"),
        ({"server.kv_cache": "fp8"}, H200, "KV cache fp8; sync by"),
    ):
        changed = with_keys(made, keys)
        server.describe(changed, plans(changed, CUDA, ["0"], 80.0, cards), {"base_hash": "ab"}, CUDA, False)
        assert said in capsys.readouterr().out.splitlines()[0]


SHAPE = shape_by_size("8b")


def test_a_plan_counts_the_larger_cache_and_flashinfers_buffers():
    (card,) = parse_gpus("h200")[:1]
    chosen, plain, small = (config(server={"kv_cache": one}) for one in ("fastest", "auto", "fp8"))
    assert memory.sequence_gib(SHAPE, chosen) == memory.sequence_gib(SHAPE, plain)
    assert memory.sequence_gib(SHAPE, chosen) == 2 * memory.sequence_gib(SHAPE, small)
    parts, before = (memory.server_parts(SHAPE, one, card) for one in (chosen, plain))
    assert parts[memory.FLASHINFER] == pytest.approx((394 + 512) / 1024) and memory.FLASHINFER not in before
    assert before["KV cache"] - parts["KV cache"] == pytest.approx(parts[memory.FLASHINFER])
    kept = memory.asleep_memory(parts).expected - memory.asleep_memory(before).expected
    assert kept == pytest.approx(parts[memory.FLASHINFER])
    short = config(rollout={"max_completion_length": 1024})
    assert memory.FLASHINFER not in memory.server_parts(SHAPE, short, card)
    (other,) = parse_gpus("l40s")[:1]
    assert memory.FLASHINFER not in memory.server_parts(SHAPE, chosen, other)
    said = report.counted(lay_out(SHAPE, chosen, card, 2))
    assert "an FP8 KV cache of twice the sequences (server.kv_cache fastest)" in said and "0.88 GiB" in said
    assert report.counted(lay_out(SHAPE, plain, card, 2)) is None


def test_a_plan_offers_fp8_to_the_default_too():
    (card,) = parse_gpus("rtx4090")[:1]
    layout = lay_out(SHAPE, config(server={"kv_cache_gib": 20}), card, 2)
    keys = [keys for keys, _ in fitting.candidates(layout)]
    assert {"server.kv_cache": "fp8", "server.kv_cache_gib": 10} in keys


def test_an_export_names_what_is_not_resolved_there():
    urls = {"server_urls": [f"http://127.0.0.1:{8000 + number}" for number in range(1)]}
    made = config(rollout=urls, policy={"lora_dropout": 0.0})
    found = translate(made, Cluster(1, 8), None, False, Path("/out"))
    (note,) = [note for note in found.notes if "server.kv_cache" in note and "fastest" in note]
    assert "{attention_backend: FLASHINFER}" in note
    assert not any("kv_cache_dtype" in key for key in found.values)
    short = translate(config(rollout=urls | {"max_completion_length": 512}), Cluster(1, 8), None, False, Path("/out"))
    assert not any("fastest" in note for note in short.notes)
