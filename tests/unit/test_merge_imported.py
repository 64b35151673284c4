"""Adapters that this kit did not train: they become runs, merge exactly, and are refused by name where they cannot."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from kit.core.config.load import config_from_dict, load_config
from kit.core.config.recipe import check_recipe, recipe_of
from kit.core.errors import BadInput
from kit.core.run_directory import RunDir, read_manifest
from kit.core.run_files import read_json
from kit.weights.frozen_base import hash_base, load_frozen
from merge.__main__ import main
from merge.imported import Import
from merge.options import import_parser
from merge.verify import load_policy
from tests.conftest import CONFIG
from tests.unit.merge_fixture import LINEARS, make_model, read_all, shared_model
from tests.unit.test_merge_fold import assert_rounded_once
from tests.unit.wrapped_models import load_whole, make_wrapped

WEIGHTS = "adapter_model.safetensors"
# adapter_config.json as Unsloth 2026.10 writes it with peft 0.18, besides rank, alpha, targets and base.
UNSLOTH = {
    **dict.fromkeys(("alora_invocation_tokens", "arrow_config", "corda_config", "eva_config", "exclude_modules")),
    **dict.fromkeys(("layer_replication", "layers_pattern", "layers_to_transform", "megatron_config")),
    **dict.fromkeys(("modules_to_save", "revision", "target_parameters", "trainable_token_indices")),
    **{"alpha_pattern": {}, "rank_pattern": {}, "loftq_config": {}, "bias": "none", "ensure_weight_tying": False},
    "auto_mapping": {
        "base_model_class": "Qwen3ForCausalLM",
        "parent_library": "transformers.models.qwen3.modeling_qwen3",
        "unsloth_fixed": True,
    },
    **{"fan_in_fan_out": False, "inference_mode": True, "init_lora_weights": True, "lora_bias": False},
    **{"lora_dropout": 0, "megatron_core": "megatron.core", "peft_type": "LORA", "peft_version": "0.18.1"},
    **{"qalora_group_size": 16, "task_type": "CAUSAL_LM", "use_dora": False, "use_qalora": False, "use_rslora": False},
}


def peft_adapter(
    folder: Path, dtype: torch.dtype = torch.bfloat16, model: Path | None = None, update: float = 0.01, **lora: Any
) -> torch.nn.Module:
    """A random adapter of the tiny base, as peft saves it; returns peft's own merge, in float64."""
    base = AutoModelForCausalLM.from_pretrained(model or shared_model(tied=False), dtype=torch.bfloat16)
    settings = {"r": 8, "lora_alpha": 16, "target_modules": LINEARS, "task_type": "CAUSAL_LM"}
    wrapped = get_peft_model(base, LoraConfig(**settings | lora))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.to(dtype)
            if "lora_B" in name:
                parameter.normal_(0.0, update)
    wrapped.save_pretrained(folder)
    return wrapped.double().merge_and_unload()


@pytest.fixture(scope="module")
def theirs(tmp_path_factory) -> Path:
    """Read-only: a plain adapter of rank 8 and alpha 16 on all linear layers."""
    peft_adapter(folder := tmp_path_factory.mktemp("theirs") / "adapter")
    return folder


def altered(source: Path, folder: Path, config: dict | None = None, **tensors: torch.Tensor) -> Path:
    """A copy of an adapter with other entries in its config and further tensors."""
    shutil.copytree(source, folder)
    facts = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(facts | (config or {})))
    if tensors:
        save_file(load_file(folder / WEIGHTS) | tensors, folder / WEIGHTS)
    return folder


def imported(adapter: Path, out: Path, *options: str) -> RunDir:
    assert main(["import", "--adapter", str(adapter), "--out", str(out), *map(str, options)]) == 0
    return RunDir.open(out)


# What get_peft_regex of unsloth_zoo 2026.10.9 returns for a Qwen3, with its vision layers left out.
UNSLOTH_PARTS = "self_attn|attention|attn|mixer|mlp|feed_forward|ffn|dense|mixer"
UNSLOTH_REGEX = (
    rf"(?:.*?(?:language|text).*?(?:{UNSLOTH_PARTS}).*?\.(?:{'|'.join(LINEARS)}))"
    rf"|(?:\bmodel\.layers\.[\d]{{1,}}(?!.*\.experts\.\d)\..*?(?:{UNSLOTH_PARTS}).*?\.(?:(?:{'|'.join(LINEARS)})))"
)
PATTERNS = {"rank_pattern": {"q_proj": 4}, "alpha_pattern": {"down_proj": 40, r"layers\.0\.mlp\.up_proj": 3}}


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
@pytest.mark.parametrize(
    "lora",
    [
        {},
        {"use_rslora": True, **PATTERNS},
        {"target_modules": [*LINEARS, "lm_head"]},  # peft saves the output embedding with it
        {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1]},
        {"target_modules": r".*layers\.[01]\.(self_attn\.[qv]_proj|mlp\.down_proj)"},
        {"target_modules": "all-linear", "exclude_modules": ["k_proj"], "dtype": torch.float16},
        {"init_lora_weights": "gaussian", "dtype": torch.float32},
        {"target_modules": UNSLOTH_REGEX},
    ],
    ids=["plain", "rslora-patterns", "lm_head", "some-layers", "regex", "float16", "float32", "unsloth-regex"],
)
def test_a_merge_of_a_peft_adapter_is_pefts_own_to_rounding(tmp_path, lora):
    """peft's merge of a BF16 model rounds the update, and the sum again; in float64 it is exact."""
    expected = peft_adapter(tmp_path / "adapter", **lora).state_dict()
    options = ["--adapter", tmp_path / "adapter", "--out", tmp_path / "run", "--policy", "grpo", "--format", "bf16"]
    assert main([str(one) for one in options]) == 0
    merged = read_all(tmp_path / "run" / "merged" / "grpo" / "bf16")
    base = read_all(shared_model(tied=False))
    assert merged.keys() == expected.keys()
    changed = set()
    for name, found in merged.items():
        assert_rounded_once(found, expected[name].numpy(), name)
        changed |= {name} if not torch.equal(found, base[name]) else set()
    tensors = load_file(tmp_path / "adapter" / WEIGHTS)
    adapted = {name.split("base_model.model.")[1] for name in tensors if ".lora_A." in name}
    assert changed == {name.replace(".lora_A", "") for name in adapted}
    manifest = read_manifest(tmp_path / "run" / "merged" / "grpo" / "bf16")
    assert manifest["verify"]["mean_kl"] < 2e-3 and manifest["verify"]["tokens"] > 100


def test_experts_that_peft_renames_merge_each_by_its_own_scale(tmp_path):
    """peft 0.21 turns `gate_proj`, `up_proj` and `down_proj` of fused experts into bare parameters, the first two with
    twice the rank; a router among them is refused."""
    shape = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    model = make_model(tmp_path / "model", tied=False, family="Qwen3Moe", **shape)
    expected = peft_adapter(tmp_path / "adapter", model=model).state_dict()
    options = ["--out", str(tmp_path / "run"), "--policy", "grpo", "--format", "bf16", "--skip_verify"]
    assert main(["--adapter", str(tmp_path / "adapter"), *options]) == 0
    merged = read_all(tmp_path / "run" / "merged" / "grpo" / "bf16")
    settings = read_json(tmp_path / "adapter" / "adapter_config.json")
    assert sorted(settings["target_parameters"]) == ["down_proj", "gate_up_proj"] and settings["rank_pattern"]
    for layer in ("model.layers.0.mlp", "model.layers.1.mlp"):
        for expert in range(4):
            own = {part: merged[f"{layer}.experts.{expert}.{part}.weight"] for part in ("gate_proj", "up_proj")}
            assert_rounded_once(
                torch.cat([*own.values()]), expected[f"{layer}.experts.gate_up_proj"][expert].numpy(), layer
            )
            down = merged[f"{layer}.experts.{expert}.down_proj.weight"]
            assert_rounded_once(down, expected[f"{layer}.experts.down_proj"][expert].numpy(), layer)
    names = [*settings["target_parameters"], "gate.weight"]
    router = altered(tmp_path / "adapter", tmp_path / "router", {"target_parameters": names})
    with pytest.raises(BadInput, match=r"target_parameters names gate\.weight"):
        imported(router, tmp_path / "other")


def test_an_adapter_of_a_vision_language_model_merges_into_its_language_model(tmp_path):
    """Trained on the whole model, its names have `language_model` in them; one of the vision tower is refused."""
    model = make_wrapped(tmp_path / "model", "qwen3_vl")
    for folder, targets in (
        ("adapter", r".*language_model.*(q_proj|down_proj)"),
        ("both", r".*(q_proj|linear_fc1)"),
    ):
        wrapped = get_peft_model(load_whole(model), LoraConfig(r=4, lora_alpha=8, target_modules=targets))
        torch.manual_seed(1)
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter.data, 0.0, 0.01)
        wrapped.save_pretrained(tmp_path / folder)
        if folder == "adapter":
            expected = wrapped.double().merge_and_unload().state_dict()
    options = ["--policy", "grpo", "--format", "bf16", "--out", str(tmp_path / "run")]
    assert main(["--adapter", str(tmp_path / "adapter"), *options]) == 0
    merged, base = read_all(tmp_path / "run" / "merged" / "grpo" / "bf16"), read_all(model)
    changed = [name for name in merged if not torch.equal(merged[name], base[name])]
    assert len(changed) == 8 and all("language_model.layers" in name for name in changed)
    for name in changed:
        assert_rounded_once(merged[name], expected[name].numpy(), name)
    names = load_file(tmp_path / "run" / "adapters" / "v000000" / WEIGHTS)
    assert all(name.startswith("base_model.model.model.layers.") for name in names)
    with pytest.raises(BadInput, match=r"names model\.visual\..*linear_fc1, which the base"):
        imported(tmp_path / "both", tmp_path / "other")
    pattern = altered(tmp_path / "adapter", tmp_path / "named", {"alpha_pattern": {"language_model.layers.0": 3}})
    with pytest.raises(BadInput, match=r"has 'language_model\.layers\.0', a name of a whole vision-language"):
        imported(pattern, tmp_path / "other")


@pytest.mark.parametrize(
    ("storage", "keys"),
    [
        ("none", []),
        ("none", ["--model.dtype", "float32"]),
        ("fp8", []),
        ("nf4", []),
        ("nf4", ["--policy.double_quantization", "false"]),
    ],
)
def test_the_base_of_an_import_is_hashed_as_if_it_were_loaded(tmp_path, theirs, storage, keys):
    run = imported(theirs, tmp_path / "run", "--base_storage", storage, *keys)
    model = run.config()["model"]
    double = run.config()["policy"]["double_quantization"]
    loaded = hash_base(load_frozen(model["path"], storage, model["dtype"], double, device="cpu"))
    found = run.base()
    assert found.pop("model") == str(shared_model(tied=False).resolve()) and loaded.pop("model")
    assert found == json.loads(json.dumps(loaded))
    manifest = read_manifest(run.adapter_dir(0), "adapter", deep=True)
    assert (manifest["version"], manifest["base_hash"]) == (0, loaded["hash"])
    assert (manifest["rank"], manifest["alpha"], manifest["rslora"]) == (8, 16, False)
    tensors = load_file(theirs / WEIGHTS)
    assert all(torch.equal(one, tensors[name]) for name, one in load_file(run.adapter_dir(0) / WEIGHTS).items())


def test_unsloths_layout_needs_the_storage_of_its_4_bit_base_and_then_merges(tmp_path, theirs, capsys):
    settings = {"base_model_name_or_path": "unsloth/model-False-unsloth-bnb-4bit", "lora_alpha": 16.0}
    adapter = altered(theirs, tmp_path / "adapter", UNSLOTH | settings)
    facts = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({k: facts[k] for k in (*UNSLOTH, *settings, "r",
                                                                                    "target_modules")}))  # fmt: skip
    with pytest.raises(BadInput, match=r"4-bit base \(unsloth/.*--base_storage nf4.*or --base_storage none"):
        imported(adapter, tmp_path / "run", "--base", shared_model(tied=False))
    run = imported(adapter, tmp_path / "run", "--base", shared_model(tied=False), "--base_storage", "nf4")
    assert "WARNING" not in capsys.readouterr().out  # the name of a 4-bit copy is its model's
    assert run.base()["quantization"]["type"] == "nf4"
    assert main(["--run", str(run.path), "--format", "fp8"]) == 0
    assert read_manifest(run.merged / "grpo" / "fp8")["base_hash"] == run.base()["hash"]


EMBEDDING = "base_model.model.model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        ({"use_dora": True}, {}, "use_dora: DoRA rescales"),
        ({"modules_to_save": ["embed_tokens"]}, {}, r"modules_to_save \['embed_tokens'\]: fully trained"),
        ({"bias": "lora_only"}, {}, "trained biases"),
        ({"fan_in_fan_out": True}, {}, "fan_in_fan_out: the factors are transposed"),
        ({"layer_replication": [[0, 2]]}, {}, "layer_replication: "),
        ({"trainable_token_indices": [3]}, {}, "trainable_token_indices: trained rows"),
        ({"target_parameters": ["self_attn.q_proj.weight"]}, {}, "target_parameters names self_attn.q_proj.weight"),
        ({"init_lora_weights": "pissa"}, {}, "init_lora_weights=pissa rewrites the base"),
        ({"init_lora_weights": "lora-ga"}, {}, "init_lora_weights=lora-ga rewrites the base"),  # ms-swift's spelling
        ({"peft_type": "IA3"}, {}, "peft_type is 'IA3'"),
        ({"new_kind": 3}, {}, r"new_kind \(3\): this version does not know"),
        ({"lora_alpha": 16.5}, {}, "lora_alpha is 16.5"),
        ({"r": 0}, {}, "r is 0, expected an integer from 1"),
        ({"r": 4}, {}, "rank 4 on a weight of"),
        ({}, {EMBEDDING: torch.zeros(320, 128)}, "embed_tokens.weight, which is not a LoRA factor"),
        ({}, {"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(8, 320)}, "lora_embedding_A, which"),
        ({}, {"base_model.model.model.layers.5.mlp.up_proj.lora_A.weight": torch.zeros(8, 128)}, "layers.5.mlp"),
        ({"base_model_name_or_path": None}, {}, "names no base .*Name it with --base"),
        ({"base_model_name_or_path": "/root/outputs/model"}, {}, r"names the base /root/outputs/model, which is not"),
    ],
)
def test_what_cannot_be_merged_is_refused_by_name_before_a_run_is_made(tmp_path, theirs, config, tensors, message):
    adapter = altered(theirs, tmp_path / "adapter", config, **tensors)
    with pytest.raises(BadInput, match=message):
        imported(adapter, tmp_path / "run")
    assert not (tmp_path / "run").exists()


AXOLOTL = {"use_rslora": True, "rank_pattern": {"q_proj": 4}, "lora_dropout": 0.05, "target_parameters": []}


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
@pytest.mark.parametrize(
    ("lora", "beside"),
    [
        # lora_target_linear with rsLoRA and lora_rank_pattern; the base's config.json is saved beside the adapter
        ({**AXOLOTL, "target_modules": [*LINEARS, "lm_head"]}, {"config.json": '{"model_type": "qwen3"}'}),
        # the factors are trained and saved in float32
        ({"modules_to_save": None, "dtype": torch.float32}, {"trainer_state.json": "{}"}),
        ({"lora_alpha": 32, "dtype": torch.float32}, {"additional_config.json": '{"lora_dtype": "float32"}'}),
    ],
    ids=["axolotl-0.19", "llamafactory-0.9.5", "ms-swift-4.6"],
)
def test_what_axolotl_llamafactory_and_swift_write_merges_as_by_peft(tmp_path, lora, beside):
    """The settings and files are those that their own code makes; the adapters were also written by that code once."""
    expected = peft_adapter(tmp_path / "adapter", **lora).state_dict()
    for name, text in beside.items():
        (tmp_path / "adapter" / name).write_text(text)
    options = ["--out", str(tmp_path / "run"), "--policy", "grpo", "--format", "bf16", "--skip_verify"]
    assert main(["--adapter", str(tmp_path / "adapter"), *options]) == 0
    for name, found in read_all(tmp_path / "run" / "merged" / "grpo" / "bf16").items():
        assert_rounded_once(found, expected[name].numpy(), name)


def test_what_was_trained_beside_the_adapter_is_refused_by_name(tmp_path, theirs):
    """ms-swift's lora_llm trains the vision tower in full; ReLoRA of axolotl merges into the base as it trains; FSDP's
    shards hold no whole adapter; names of compiled or wrapped modules are no layers of the base."""
    vision = altered(theirs, tmp_path / "vision")
    save_file({"model.visual.proj.weight": torch.zeros(2)}, vision / "vit.safetensors")
    merging = altered(theirs, tmp_path / "checkpoint-500" / "adapter")
    (merging.parent / "relora").mkdir()
    shards = altered(theirs, tmp_path / "shards")
    (shards / WEIGHTS).unlink()
    (shards / "pytorch_model_fsdp_0").mkdir()
    compiled = altered(theirs, tmp_path / "compiled")
    named = {
        key.replace(".model.model.", ".model._orig_mod.model."): one
        for key, one in load_file(theirs / WEIGHTS).items()
    }
    save_file(named, compiled / WEIGHTS)
    cases = {
        vision: r"vit\.safetensors holds a vision tower",
        merging: "relora holds the base after earlier merges",
        shards: "shards of FSDP have to be merged",
        compiled: r"names _orig_mod\.model\.layers.*, which the base",
    }
    for adapter, message in cases.items():
        with pytest.raises(BadInput, match=message):
            imported(adapter, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_damaged_pickled_and_missing_weights_are_refused_by_name(tmp_path, theirs):
    tensors = load_file(theirs / WEIGHTS)
    pickled = altered(theirs, tmp_path / "pickled")
    (pickled / WEIGHTS).unlink()
    torch.save(tensors, pickled / "adapter_model.bin")
    cut = altered(theirs, tmp_path / "cut")
    (cut / WEIGHTS).write_bytes((theirs / WEIGHTS).read_bytes()[:-7])
    empty = altered(theirs, tmp_path / "empty")
    (empty / WEIGHTS).unlink()
    garbled = altered(theirs, tmp_path / "garbled")
    (garbled / "adapter_config.json").write_text("[]")
    infinite = altered(theirs, tmp_path / "infinite", **{next(iter(tensors)): next(iter(tensors.values())) / 0})
    (tmp_path / "none").mkdir()
    cases = {
        "pickled": r"adapter_model\.bin, a pickle",
        "cut": "is damaged",
        "empty": "no adapter_model.safetensors",
        "garbled": "is not the settings of a LoRA adapter",
        "infinite": "not finite",
        "none": r"holds no adapter: it has no adapter_config\.json",
    }
    assert infinite.name in cases
    for name, message in cases.items():
        with pytest.raises(BadInput, match=message):
            imported(tmp_path / name, tmp_path / "run")
        assert not (tmp_path / "run").exists()
    with pytest.raises(BadInput, match=rf"There is one in {tmp_path}"):
        imported(tmp_path, tmp_path / "run")
    run = imported(theirs, tmp_path / "run")
    with pytest.raises(BadInput, match="was published by a run of this kit"):
        imported(run.adapter_dir(0), tmp_path / "other")
    with pytest.raises(BadInput, match="exists already"):
        imported(theirs, tmp_path / "run")


def test_a_merge_without_a_run_makes_it_once_and_then_only_of_the_same_adapter_and_base(tmp_path, theirs, capsys):
    options = ["--adapter", str(theirs), "--out", str(tmp_path / "run"), "--skip_verify"]
    assert main([*options, "--dry_run", "--format", "bf16"]) == 0 and not (tmp_path / "run").exists()
    assert main([*options, "--format", "bf16"]) == 0
    base = read_json(tmp_path / "run" / "base.json")
    assert main([*options, "--format", "fp8"]) == 0 and "made of this adapter before" in capsys.readouterr().out
    assert {path.parent.name for path in (tmp_path / "run" / "merged").rglob("manifest.json")} == {"bf16", "fp8"}
    assert read_json(tmp_path / "run" / "base.json") == base
    with pytest.raises(BadInput, match="made on another base, or stored otherwise"):
        main([*options, "--format", "w4a16", "--base_storage", "nf4"])
    first, tensor = next(iter(load_file(theirs / WEIGHTS).items()))
    other = altered(theirs, tmp_path / "other", **{first: tensor + 1})
    with pytest.raises(BadInput, match="made of other weights"):
        main(["--adapter", str(other), *options[2:], "--format", "w4a16"])
    with pytest.raises(BadInput, match="--run is missing"):
        main(["--format", "bf16"])
    with pytest.raises(BadInput, match="--base_storage is of an adapter without a run"):
        main(["--run", str(tmp_path / "run"), "--format", "bf16", "--base_storage", "nf4"])


def test_a_checkpoint_that_another_program_merged_is_compared_with_the_policy(tmp_path, capsys):
    """peft's own merge, rounded once, is the policy; the base alone is not; other vocabularies cannot be compared."""
    model = peft_adapter(tmp_path / "adapter", update=0.05)
    merged, base = tmp_path / "merged", shared_model(tied=False)
    model.to(torch.bfloat16).save_pretrained(merged)
    options = ["verify", "--adapter", str(tmp_path / "adapter"), "--out", str(tmp_path / "run"), "--checkpoint"]
    assert main([*options, str(merged)]) == 0
    assert main([*options, str(merged), str(base)]) == 1
    said = capsys.readouterr().out
    assert f"failed: {base}: the merged grpo checkpoint is not the policy" in said and f"failed: {merged}" not in said
    model.resize_token_embeddings(322)
    model.save_pretrained(tmp_path / "resized")
    with pytest.raises(BadInput, match="has 322 tokens and the base 320"):
        main([*options, str(tmp_path / "resized")])
    with pytest.raises(BadInput, match="it is no checkpoint"):
        main([*options, str(tmp_path / "adapter")])
    own = ["verify", "--run", str(tmp_path / "run")]
    with pytest.raises(BadInput, match=r"holds no merged checkpoint.*--format bf16; or name one"):
        main(own)
    assert main(["--run", str(tmp_path / "run"), "--format", "bf16", "fp8", "--skip_verify"]) == 0
    capsys.readouterr()
    assert main(own) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if "│" in line]
    assert [row.split()[1:4:2] for row in rows] == [
        *(["base", "bf16"], ["base", "fp8"], ["grpo", "bf16"], ["grpo", "fp8"])
    ]


def test_diagnose_takes_an_adapter_without_a_run(tmp_path, theirs):
    out = tmp_path / "run"
    options = ["diagnose", "--adapter", str(theirs), "--out", str(out), "--formats", "bf16", "nf4", "--skip_control"]
    assert main(options) == 0
    found = read_json(out / "diagnostics.json")
    assert found["base_hash"] == RunDir(out).base()["hash"] and len(found["layers"]) == 14


@pytest.mark.parametrize(
    ("row", "prompt", "completion"),
    [
        ({"prompt": "2+2?", "completion": "4"}, "2+2?", "4"),
        ({"question": "2+2?", "answer": "4"}, [{"role": "user", "content": "2+2?"}], ""),
        ({"text": "Two and two is four."}, "Two and two is four.", ""),
        (
            {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]},
            [{"role": "user", "content": "2+2?"}],
            [{"role": "assistant", "content": "4"}],
        ),
    ],
)
def test_prompts_of_every_form_are_what_the_adapter_is_verified_on(tmp_path, theirs, row, prompt, completion):
    (file := tmp_path / "prompts.jsonl").write_text(json.dumps(row) + "\n\n")
    run = imported(theirs, tmp_path / "run", "--prompts", file)
    (logged,) = map(json.loads, (run.completions / "step-000000.jsonl").read_text().splitlines())
    assert (logged["prompt"], logged["completion"]) == (prompt, completion)
    assert main(["--run", str(run.path), "--format", "bf16", "--policy", "grpo"]) == 0
    few = read_manifest(run.merged / "grpo" / "bf16")["verify"]["tokens"]
    assert 5 < few < 80  # not the generic ones
    file.write_text(json.dumps(row) + '\n{"answer": "4"}\n')
    with pytest.raises(BadInput, match="line 2 has no prompt"):
        imported(theirs, tmp_path / "other", "--prompts", file)


def test_generic_prompts_verify_but_never_calibrate(tmp_path, theirs, capsys):
    run = imported(theirs, tmp_path / "run")
    assert main(["--run", str(run.path), "--format", "bf16", "--policy", "grpo"]) == 0
    assert "verified on generic ones" in capsys.readouterr().out
    with pytest.raises(BadInput, match=r"nothing to calibrate on.*merge import --prompts"):
        main(["--run", str(run.path), "--format", "nvfp4", "--policy", "grpo"])


def test_the_configuration_names_base_storage_and_data_and_the_policy_is_called_imported(tmp_path, theirs):
    keys = ["--config", CONFIG, "--base", shared_model(tied=False), "--eval.gate.format", "bf16"]
    run = imported(theirs, tmp_path / "run", *keys)
    config, yaml = config_from_dict(run.config()), load_config(CONFIG)
    assert (config.data, config.reward) == (yaml.data, yaml.reward) and config.eval.gate.format == "bf16"
    assert config.policy.quantization == yaml.policy.quantization == "nf4"
    assert (config.policy.lora_rank, config.policy.lora_alpha) == (8, 16)
    assert sorted(config.policy.target_modules) == sorted(LINEARS)
    assert config.run.imported_from == str(theirs) and config.model.path == str(shared_model(tied=False).resolve())
    with pytest.raises(BadInput, match=r"run\.imported_from is .*set policy\.init_adapter"):
        check_recipe(config, recipe_of(config))
    from eval.naming import trained_name
    from merge.card import render

    assert trained_name(run.config()) == "imported"
    facts = {"policy": "grpo", "format": "bf16", "base_hash": "", "adapter_version": 0, "adapter_hash": ""}
    card = render(run, {**facts, "created": "now"})
    assert "with an adapter that another program trained" in card and "GRPO" not in card and "train.beta" not in card


def test_a_chat_template_or_base_that_the_adapter_names_otherwise_is_said(tmp_path, theirs):
    adapter = altered(theirs, tmp_path / "adapter", {"base_model_name_or_path": "Qwen/Qwen3-8B"})
    (adapter / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    options = ["--adapter", str(adapter), "--out", str(tmp_path / "run"), "--base", str(shared_model(tied=False))]
    said = Import(import_parser().parse_args(options), []).describe()
    assert "the adapter names Qwen/Qwen3-8B as its base" in said and "has a chat template of its own" in said
    options[1] = str(theirs)
    assert "WARNING" not in Import(import_parser().parse_args(options), []).describe()


def test_the_policy_of_an_imported_run_is_pefts_model(tmp_path, theirs):
    run = imported(theirs, tmp_path / "run", "--model.dtype", "float32")
    from peft import PeftModel

    base = AutoModelForCausalLM.from_pretrained(shared_model(tied=False), dtype=torch.float32)
    model, ids = PeftModel.from_pretrained(base, theirs), torch.arange(3, 40)[None]
    with torch.no_grad():
        expected, found = model(ids).logits, load_policy(run, run.adapter_dir(0), device="cpu")(ids).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
