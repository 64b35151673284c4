"""Language models inside vision-language checkpoints: what is trained, what is written, what is refused."""

import json
import re
import shutil
import warnings
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from kit.core.errors import BadInput, CheckFailed
from kit.core.run_directory import RunDir
from kit.core.run_files import read_json
from kit.weights.frozen_base import load_frozen
from kit.weights.model_files import check_complete, check_names, unquantized_config
from kit.weights.wrapped import LANGUAGE, language_name, loading
from kit.weights.write_base import Original, write_base
from merge.merge import read_adapter, write_bf16
from merge.quantize import check_shapes, quantize_checkpoint
from merge.verify import BF16_KL_BOUND, base_checkpoint, compare, load_for_scoring, load_policy, log_probs
from tests.unit.merge_fixture import make_run, read_all, shared_folder
from tests.unit.wrapped_models import FAMILIES, load_whole, make_wrapped

IDS = torch.randint(3, 250, (2, 40), generator=torch.Generator().manual_seed(0))


@cache
def wrapped(family: str) -> Path:
    """Read-only: the tiny checkpoint of a family."""
    return make_wrapped(shared_folder() / f"wrapped-{family}", family)


@cache
def run_of(family: str) -> RunDir:
    """Read-only: a run on it, with an adapter of random weights on all linear layers."""
    folder = shared_folder() / f"wrapped-run-{family}"
    return make_run(folder, wrapped(family), update=0.02, target_modules="all-linear")


@cache
def merged(family: str) -> Path:
    """Read-only: the BF16 merge of that run."""
    run, folder = run_of(family), shared_folder() / f"wrapped-merged-{family}"
    base = base_checkpoint(run)
    write_bf16(base, read_adapter(run.newest_adapter(), base), folder, lambda _: None, policy="grpo")
    return folder


def test_every_known_wrapper_is_tested():
    assert {kind for kind, *_ in FAMILIES.values()} == set(LANGUAGE)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_language_model_computes_what_the_wrapper_computes_on_text(family):
    config = unquantized_config(wrapped(family))
    with loading(config) as names:
        model, found = AutoModelForCausalLM.from_pretrained(
            wrapped(family), dtype=torch.float32, output_loading_info=True, **names
        )
    whole = load_whole(wrapped(family), dtype=torch.float32)
    assert not found["missing_keys"]
    mask = torch.ones_like(IDS)
    mask[0, :7] = 0  # left padding, as in a batch of prompts
    for options in ({}, {"attention_mask": mask}):
        logits, expected = model.eval()(IDS, **options).logits, whole(IDS, **options).logits
        real = mask.bool() if options else slice(None)
        assert torch.equal(logits[real], expected[real])
    fewer = sum(p.numel() for p in whole.parameters()) - sum(p.numel() for p in model.parameters())
    assert fewer > 0, "the vision part was loaded"


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_merged_checkpoint_is_the_policy_with_the_vision_part_as_it_was(family):
    before, after = read_all(wrapped(family)), read_all(merged(family))
    assert before.keys() == after.keys()
    base = base_checkpoint(run_of(family))
    assert base.carried, "nothing is carried"
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert not changed & base.carried.keys()
    assert {language_name(name) for name in changed} >= {f"{name}.weight" for name in base.info["quantized"]}
    assert (merged(family) / "preprocessor_config.json").read_text() == '{"image_processor_type": "tiny"}\n'
    assert read_json(merged(family) / "config.json")["model_type"] == FAMILIES[family][0]

    whole = load_whole(merged(family), dtype=torch.float32)
    text = load_for_scoring(merged(family))
    assert torch.equal(whole(IDS).logits, text(IDS).logits)
    greedy = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": 319}
    assert torch.equal(whole.generate(IDS, **greedy), text.generate(IDS, **greedy))
    policy = load_policy(run_of(family), run_of(family).newest_adapter())
    batch = list(IDS[:, None])
    scores = log_probs(policy, batch)
    found = compare(scores, log_probs(text, batch), batch).mean_kl
    with policy.disable_adapter():
        update = compare(scores, log_probs(policy, batch), batch).mean_kl
    assert found < min(BF16_KL_BOUND[torch.float32], 0.1 * update)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_fp8_checkpoint_loads_whole_and_leaves_the_vision_part_unquantized(family, tmp_path):
    from transformers import CompressedTensorsConfig

    run = run_of(family)
    base = base_checkpoint(run)
    updates = read_adapter(run.newest_adapter(), base)
    quantize_checkpoint(merged(family), tmp_path / "fp8", "fp8", base, updates, lambda _: None, policy="grpo")
    before, after = read_all(merged(family)), read_all(tmp_path / "fp8")
    assert all(torch.equal(before[name], after[name]) for name in base.carried)
    codes = {name for name, tensor in after.items() if tensor.dtype == torch.float8_e4m3fn}
    assert codes == {base.stored[name] for name in base.quantized}
    options = {"dtype": torch.bfloat16, "quantization_config": CompressedTensorsConfig(dequantize=True)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="You passed `quantization_config`")
        whole = load_whole(tmp_path / "fp8", **options)
    text = load_for_scoring(tmp_path / "fp8", dtype=torch.bfloat16)
    assert torch.equal(whole(IDS).logits, text(IDS).logits)
    exact = load_for_scoring(tmp_path / "fp8")
    assert {one.dtype for one in exact.state_dict().values() if one.is_floating_point()} == {torch.float32}
    name = base.info["quantized"][0]
    product = after[base.stored[f"{name}.weight"]].float() * after[f"{base.stored[f'{name}.weight']}_scale"].float()
    assert torch.equal(exact.get_submodule(name).weight, product)
    ignored = read_json(tmp_path / "fp8" / "config.json")["quantization_config"]["ignore"]
    assert all(one.startswith("re:") for one in ignored)
    unquantized = {name.rpartition(".")[0] for name in base.carried if language_name(name) == name}
    assert unquantized and all(any(re.match(one[3:], name) for one in ignored) for name in unquantized)


@pytest.mark.parametrize("family", FAMILIES)
def test_base_on_disk_has_the_trainers_hashes_and_the_files_names(family, tmp_path):
    source = Original(wrapped(family), "float32", True)
    info = write_base(source, tmp_path, "tiny", None)
    trained = run_of(family).base()
    assert {key: info[key] for key in ("hash", "tensors", "quantized", "offsets", "carried")} == {
        key: trained[key] for key in ("hash", "tensors", "quantized", "offsets", "carried")
    }
    original, written = read_all(wrapped(family)), read_all(tmp_path)
    assert original.keys() == written.keys()
    assert all(torch.equal(original[name], written[name]) for name in info["carried"])
    copies = read_json(tmp_path / "nf4" / "index.json")
    assert set(copies) == {f"{name}.weight" for name in info["quantized"]}
    assert all(name.startswith("model.layers.") for name in copies)


@pytest.fixture
def copied(tmp_path):
    """A copy of a tiny checkpoint in one file, to be altered: (folder, its tensors)."""
    folder = tmp_path / "model"
    shutil.copytree(wrapped("gemma3"), folder)
    tensors = read_all(folder)
    for file in folder.glob("model*"):
        file.unlink()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder, tensors


def save(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_another_vision_tower_is_noticed_before_anything_is_published(copied, tmp_path):
    folder, tensors = copied
    save(folder, tensors | {"vision_tower.post_layernorm.weight": tensors["vision_tower.post_layernorm.weight"] + 1})
    base = base_checkpoint(run_of("gemma3"), folder)
    with pytest.raises(CheckFailed, match=r"vision_tower\.post_layernorm\.weight hashes to"):
        write_bf16(base, {}, tmp_path / "out", lambda _: None, policy="base")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("vision_tower.head.probe"), r"it has no vision_tower\.head\.probe"),
        (lambda tensors: tensors.update({"audio.x": torch.ones(1)}), r"it has audio\.x"),
    ],
    ids=["missing", "added"],
)
def test_other_carried_tensors_than_those_of_the_run_are_refused(copied, change, message):
    folder, tensors = copied
    change(tensors)
    save(folder, tensors)
    with pytest.raises(BadInput, match=message):
        base_checkpoint(run_of("gemma3"), folder)


@pytest.mark.parametrize("name", ["language_model.model.layers.9.mlp.up_proj.weight", "model.layers.9.x", "lm_head.y"])
def test_unknown_tensor_inside_the_language_model_is_refused_before_training(copied, name):
    folder, tensors = copied
    save(folder, tensors | {name: torch.ones(2, 2)})
    with pytest.raises(BadInput, match="which the base has not"):
        check_names(folder, unquantized_config(folder))


def test_missing_tensor_of_the_language_model_is_refused_before_training(copied):
    folder, tensors = copied
    del tensors["language_model.model.layers.0.self_attn.q_proj.weight"]
    save(folder, tensors)
    with pytest.raises(BadInput, match=r"has no model\.layers\.0\.self_attn\.q_proj\.weight"):
        check_complete(folder, unquantized_config(folder))


def test_names_of_older_and_newer_checkpoints_are_read_alike(tmp_path):
    """Qwen2.5-VL was published as `model.layers` and `visual`; transformers 4.52 to 4.57 saved `model.language_model`
    and `model.visual`."""
    folder = tmp_path / "model"
    shutil.copytree(wrapped("qwen2_5_vl"), folder)
    tensors = read_all(folder)
    for file in folder.glob("model*"):
        file.unlink()
    newer = {
        name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: tensor
        for name, tensor in tensors.items()
    }
    newer = {f"model.{name}" if name.startswith("visual.") else name: tensor for name, tensor in newer.items()}
    assert newer.keys() != tensors.keys()
    save(folder, newer)
    one, other = (load_frozen(path, "none", "float32") for path in (folder, wrapped("qwen2_5_vl")))
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))


def test_unknown_wrapper_is_refused_by_name(tmp_path):
    from transformers import AutoConfig

    AutoConfig.for_model("llava").save_pretrained(tmp_path)
    with pytest.raises(BadInput, match=r"\(llava\) wraps a language model .* known for gemma3, gemma4"):
        unquantized_config(tmp_path)


def test_wrapper_decides_whether_the_output_layer_is_tied(tmp_path):
    config = json.loads((wrapped("qwen3_vl") / "config.json").read_text())
    for tied in (True, False):
        (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": tied}))
        assert unquantized_config(tmp_path).tie_word_embeddings is tied


def test_merged_checkpoint_says_that_it_is_bf16(tmp_path):
    folder = make_wrapped(tmp_path / "model", "mistral3", dtype=torch.float32)
    config = read_json(folder / "config.json")
    config["text_config"]["dtype"] = "float32"  # transformers 4 wrote it there, too
    (folder / "config.json").write_text(json.dumps(config))
    run = make_run(tmp_path / "run", folder)
    write_bf16(base_checkpoint(run), {}, tmp_path / "out", lambda _: None, policy="base")
    config = read_json(tmp_path / "out" / "config.json")
    assert config["dtype"] == config["text_config"]["dtype"] == "bfloat16"
    carried = base_checkpoint(run).carried
    stored = {name: tensor.dtype for name, tensor in read_all(tmp_path / "out").items()}
    assert {stored.pop(name) for name in carried} == {torch.float32}
    assert set(stored.values()) == {torch.bfloat16}


def test_merge_checkpoint_in_fp8_dequantizes_to_the_whole_model(tmp_path):
    from merge.dequantize import main

    base = base_checkpoint(run_of("qwen3_vl"))
    quantize_checkpoint(merged("qwen3_vl"), tmp_path / "fp8", "fp8", base, {}, lambda _: None, policy="base")
    assert main(["--model.path", str(tmp_path / "fp8"), "--out", str(tmp_path / "bf16")]) == 0
    before, after = read_all(merged("qwen3_vl")), read_all(tmp_path / "bf16")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in base.carried)
    assert load_frozen(tmp_path / "bf16", "none").config.wrapper == "qwen3_vl"


def test_an_adapter_that_vllm_could_not_name_is_refused_before_training():
    from kit.core.config.load import load_config
    from kit.policy.load import check_base
    from tests.conftest import CONFIG

    changes = {"model.path": wrapped("gemma3"), "rollout.backend": "server", "rollout.sync": "adapter"}
    words = [word for key, value in changes.items() for word in (f"--{key}", str(value))]
    with pytest.raises(BadInput, match=r"wraps its language model \(gemma3\).*Set rollout.sync to remerge"):
        check_base(load_config(CONFIG, words))


def test_awq_of_a_wrapped_model_is_refused_by_name():
    with pytest.raises(BadInput, match=r"awq: llm-compressor was not tried .* gemma3"):
        check_shapes(base_checkpoint(run_of("gemma3")), "awq")
