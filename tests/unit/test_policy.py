"""The policy: a base whose bytes never change, an adapter that does, a reference that costs no memory."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig

from kit.core.config.load import load_config
from kit.core.errors import BadInput
from kit.core.run_directory import read_manifest, write_manifest
from kit.core.run_files import read_json
from kit.policy.load import check_base, load_policy_base, load_tokenizer
from kit.weights.frozen_base import disable_cpu_repacking, hash_base, hash_pairs, hash_tensor, load_frozen, load_nf4

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "recipes" / "configs" / "grpo-tiny-nf4-cpu.yaml"
LINEARS = 2 * 7  # layers x (q, k, v, o, gate, up, down)


def has_avx512_bf16() -> bool:
    from bitsandbytes.functional import has_avx512bf16

    return has_avx512bf16()


def linears(model) -> list:
    from bitsandbytes.nn import Linear4bit

    return [module for module in model.modules() if isinstance(module, Linear4bit)]


def flip_packed(model) -> None:
    linears(model)[3].weight.data.view(torch.uint8)[17, 0] ^= 1


def test_the_base_hashes_after_a_run_to_what_it_was_before(tiny_run, learning_model_dir):
    facts = read_json(tiny_run.base_file)
    assert f"base unchanged ({facts['hash'][:12]})" in (tiny_run.path / "stdout.txt").read_text()
    assert hash_base(load_nf4(learning_model_dir, dtype="float32", device="cpu"))["hash"] == facts["hash"]
    assert len(facts["quantized"]) == LINEARS and facts["model"] == str(learning_model_dir)


def test_a_base_that_changes_during_training_ends_the_run_with_exit_code_1(
    tmp_path, recipe, recipe_arguments, learning_model_dir, monkeypatch
):
    from kit.train.trainer import PolicyTrainer

    train = PolicyTrainer.train_run

    def touch(self, resume):
        train(self, resume)
        flip_packed(self.model)

    monkeypatch.setattr(PolicyTrainer, "train_run", touch)
    done = recipe(recipe_arguments(learning_model_dir, tmp_path / "run", {"train.max_steps": 1}))
    assert done.code == 1 and "error: the frozen base changed during training: 1 of" in done.err


def lora_gradients(model, tokens: torch.Tensor) -> torch.Tensor:
    model.train()
    model.zero_grad()
    model(input_ids=tokens, labels=tokens).loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def gradients_around_an_evaluation(model_dir: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """LoRA gradients before and after a forward in evaluation mode."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model = load_nf4(model_dir, dtype="bfloat16", device="cpu")
    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    model = get_peft_model(model, lora)
    tokens = torch.randint(3, 300, (2, 20))  # (B, T)
    before = lora_gradients(model, tokens)
    model.eval()
    with torch.no_grad():
        model(input_ids=tokens)
    return before, lora_gradients(model, tokens)


def test_gradients_after_an_evaluation_are_those_before_it(learning_model_dir):
    before, after = gradients_around_an_evaluation(learning_model_dir)
    assert before.norm() > 0.01
    assert torch.equal(before, after)


@pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered")
def test_without_the_guard_this_cpu_repacks_the_base_and_the_gradients_are_wrong(learning_model_dir, monkeypatch):
    if not has_avx512_bf16():
        pytest.skip("bitsandbytes repacks the base only on a CPU with AVX512-BF16, which this one is not")
    monkeypatch.setattr("kit.weights.frozen_base.disable_cpu_repacking", lambda model: None)
    before, after = gradients_around_an_evaluation(learning_model_dir)
    assert torch.cosine_similarity(before, after, dim=0) < 0.9


def test_the_guard_reaches_every_quantized_layer(learning_model_dir):
    model = load_nf4(learning_model_dir, dtype="float32", device="cpu")
    assert len(linears(model)) == LINEARS
    assert not any(module.support_avx512bf16_for_cpu for module in linears(model))
    for module in linears(model):
        module.support_avx512bf16_for_cpu = True
    disable_cpu_repacking(model)
    assert not any(module.support_avx512bf16_for_cpu for module in linears(model))


@pytest.fixture(scope="module")
def trainer(tmp_path_factory, build_trainer, recipe_arguments, learning_model_dir):
    """A trainer as the recipe builds it, never started."""
    return build_trainer(recipe_arguments(learning_model_dir, tmp_path_factory.mktemp("built") / "run"))


def test_there_is_one_base_in_memory(trainer, learning_model_dir):
    assert trainer.ref_model is None
    assert list(trainer.model.peft_config) == ["default"]
    assert len(linears(trainer.model)) == LINEARS
    base = load_nf4(learning_model_dir, dtype="float32", device="cpu")
    expected = sum(p.numel() for p in base.parameters())
    held = {p.data_ptr(): p.numel() for name, p in trainer.model.named_parameters() if "lora_" not in name}
    assert sum(held.values()) == expected
    # Nothing else that the trainer holds has quantized layers of its own.
    others = [value for value in vars(trainer).values() if isinstance(value, torch.nn.Module)]
    mine = {id(module) for module in linears(trainer.model)}
    assert all({id(module) for module in linears(other)} <= mine for other in others)


def test_what_is_sampled_takes_nothing_from_the_bases_generation_config(tmp_path, learning_model_dir):
    """`generate` fills what a caller leaves open from the model's own file."""
    own = shutil.copytree(learning_model_dir, tmp_path / "own")
    given = json.loads((own / "generation_config.json").read_text())
    odd = {"min_p": 0.9, "typical_p": 0.1, "num_beams": 2, "no_repeat_ngram_size": 1, "min_new_tokens": 11}
    odd |= {"epsilon_cutoff": 0.3, "guidance_scale": 3.0, "repetition_penalty": 5.0, "top_k": 2}
    (own / "generation_config.json").write_text(json.dumps(given | odd))
    asked = GenerationConfig(do_sample=True, max_new_tokens=12, disable_compile=True)
    sampled = []
    for model_dir in (learning_model_dir, own):
        model = load_policy_base(load_config(CONFIG, [f"--model.path={model_dir}"]))
        torch.manual_seed(0)
        ids = torch.arange(5, 13).repeat(8, 1)
        sampled.append(model.generate(input_ids=ids, attention_mask=ids > 0, generation_config=asked))
        assert model.generation_config.eos_token_id == given["eos_token_id"]
    assert torch.equal(*sampled)


def test_only_the_adapter_is_trained_and_it_is_float32(trainer):
    trained = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * LINEARS and all("lora_" in name for name in trained)
    assert {p.dtype for p in trained.values()} == {torch.float32}
    assert not any("lm_head" in name or "embed" in name for name in trained)


def test_the_adapter_can_be_bfloat16_when_asked(tmp_path, build_trainer, recipe_arguments, learning_model_dir):
    changes = {"policy.adapter_dtype": "bfloat16"}
    built = build_trainer(recipe_arguments(learning_model_dir, tmp_path / "run", changes))
    assert {p.dtype for p in built.model.parameters() if p.requires_grad} == {torch.bfloat16}


def test_the_reference_is_the_base_with_the_adapter_off(
    tmp_path, build_trainer, recipe_arguments, learning_model_dir, read_jsonl
):
    built = build_trainer(recipe_arguments(learning_model_dir, tmp_path / "run", {"train.max_steps": 1}))
    with torch.no_grad():
        for name, parameter in built.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.05)
    seen = []
    sample = built.sample

    def keep(rows):
        seen.append(sample(rows))
        return seen[-1]

    built.sample = keep
    built.train_run(resume=False)
    output = seen[0]
    ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)  # (B, P + C)
    mask = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
    plain = load_nf4(learning_model_dir, dtype="float32", device="cpu").eval()
    kept = output["completion_ids"].size(1)
    with torch.no_grad():
        logits = plain(input_ids=ids, attention_mask=mask).logits[:, -kept - 1 : -1]
    expected = logits.log_softmax(-1).gather(-1, output["completion_ids"].unsqueeze(-1)).squeeze(-1)  # (B, C)
    difference = (output["ref_per_token_logps"].cpu() - expected)[output["completion_mask"].bool().cpu()]
    assert difference.abs().max() < 1e-4
    assert read_jsonl(built.run.metrics_file)[0]["kl"] > 1e-4


def test_every_published_adapter_names_its_base_its_version_and_its_content(tiny_run):
    base = read_json(tiny_run.base_file)["hash"]
    folders = sorted(entry.name for entry in tiny_run.adapters.iterdir())
    assert folders == ["v000002", "v000004", "v000006"]
    hashes = set()
    for version in (2, 4, 6):
        manifest = read_manifest(tiny_run.adapter_dir(version), "adapter", deep=True)
        assert (manifest["version"], manifest["step"], manifest["base_hash"]) == (version, version, base)
        assert (manifest["rank"], manifest["alpha"]) == (4, 8)
        assert {target.split(".")[-1] for target in manifest["targets"]} == {
            *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
        }
        tensors = load_file(tiny_run.adapter_dir(version) / "adapter_model.safetensors")
        assert manifest["tensor_hash"] == hash_pairs({name: hash_tensor(t) for name, t in tensors.items()})
        assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
        assert all(tensor.abs().max() > 0 for tensor in tensors.values())
        hashes.add(manifest["tensor_hash"])
    assert len(hashes) == 3


def test_an_adapter_to_start_from_is_in_place_before_the_first_step(
    tmp_path, build_trainer, recipe_arguments, learning_model_dir, tiny_run
):
    changes = {"policy.init_adapter": tiny_run.adapter_dir(4)}
    built = build_trainer(recipe_arguments(learning_model_dir, tmp_path / "run", changes))
    saved = load_file(tiny_run.adapter_dir(4) / "adapter_model.safetensors")
    found = {name.replace(".default", ""): p for name, p in built.model.named_parameters() if p.requires_grad}
    assert saved.keys() == found.keys()
    assert all(torch.equal(tensor, found[name].detach().cpu()) for name, tensor in saved.items())
    assert built.ref_model is None and list(built.model.peft_config) == ["default"]


@pytest.fixture
def no_weights(monkeypatch):
    """Loading the base fails the test: the refusal has to come first."""

    def load(config):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("kit.policy.load.load_policy_base", load)


def altered_model(source: Path, folder: Path, **config) -> Path:
    shutil.copytree(source, folder)
    facts = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(facts | config))
    return folder


def test_an_adapter_that_does_not_fit_is_refused_before_weights_are_loaded(
    tmp_path, recipe, recipe_arguments, learning_model_dir, tiny_run, no_weights
):
    adapter = tiny_run.adapter_dir(6)
    damaged = tmp_path / "damaged"
    shutil.copytree(adapter, damaged)
    content = bytearray((damaged / "adapter_model.safetensors").read_bytes())
    content[-1] ^= 1
    (damaged / "adapter_model.safetensors").write_bytes(content)
    cases = [
        ({"policy.init_adapter": tmp_path / "absent"}, "absent does not exist (seen from"),
        ({"policy.init_adapter": damaged}, "is damaged: the content of adapter_model.safetensors"),
        ({"policy.init_adapter": tiny_run.path}, "has no manifest.json"),
        (
            {"policy.init_adapter": adapter, "policy.lora_rank": 8},
            f"policy.lora_rank is 8, {adapter} has 4. An adapter to start from keeps its shape: set the same.",
        ),
    ]
    for changes, message in cases:
        done = recipe(recipe_arguments(learning_model_dir, tmp_path / "run", changes))
        assert done.code == 2 and message in done.err, done.err
        assert not (tmp_path / "run").exists()


def test_an_adapter_of_another_base_is_refused_and_the_directory_stays_free(
    tmp_path, recipe, recipe_arguments, learning_model_dir, tiny_model_dir, tiny_run
):
    changes = {"policy.init_adapter": tiny_run.adapter_dir(6)}
    arguments = recipe_arguments(tiny_model_dir, tmp_path / "run", changes)
    done = recipe(arguments)
    assert done.code == 2 and "was trained on another base (base hash" in done.err, done.err
    assert "policy.quantization to those of its run" in done.err  # the same model in another storage has another hash
    assert sorted(entry.name for entry in (tmp_path / "run").iterdir()) == [".lock", "config.json", "end.json", "logs"]


def test_an_adapter_of_other_layers_is_refused(tmp_path, recipe, recipe_arguments, learning_model_dir, tiny_run):
    adapter = tmp_path / "adapter"
    shutil.copytree(tiny_run.adapter_dir(6), adapter)
    tensors = load_file(adapter / "adapter_model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if "q_proj" not in name}
    save_file(kept, adapter / "adapter_model.safetensors")
    manifest = json.loads((adapter / "manifest.json").read_text())
    write_manifest(adapter, **{key: value for key, value in manifest.items() if key not in ("files", "created")})
    done = recipe(recipe_arguments(learning_model_dir, tmp_path / "run", {"policy.init_adapter": adapter}))
    assert done.code == 2 and "only the run has" in done.err and "q_proj" in done.err, done.err


NORM = "model.layers.0.input_layernorm.weight"


def without_a_norm(model: Path, folder: Path, **others: torch.Tensor) -> None:
    """Copy a model, without the weight of a norm and with other tensors."""
    shutil.copytree(model, folder)
    tensors = load_file(folder / "model.safetensors") | others
    del tensors[NORM]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("quantization", ["nf4", "fp8", "none"])
def test_random_weights_in_place_of_missing_ones_are_refused(tmp_path, tiny_model_dir, quantization):
    """Where other names may be old ones for what is missing, transformers says what it made up."""
    without_a_norm(tiny_model_dir, tmp_path / "model", another=torch.zeros(2))
    with pytest.raises(BadInput, match=rf"model has no {NORM} \(1 of \d+ parameters"):
        load_frozen(tmp_path / "model", quantization, "float32", device="cpu")


def test_a_base_that_cannot_be_trained_is_refused_before_weights_are_loaded(
    tmp_path, recipe, recipe_arguments, tiny_model_dir, no_weights
):
    quantized = altered_model(
        tiny_model_dir,
        tmp_path / "quantized",
        quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True},
    )
    short = altered_model(tiny_model_dir, tmp_path / "short", max_position_embeddings=80)
    plain = altered_model(tiny_model_dir, tmp_path / "plain")
    (plain / "chat_template.jinja").unlink()
    without_a_norm(tiny_model_dir, lacking := tmp_path / "lacking")
    cases = [
        (lacking, {}, f"{lacking} has no {NORM} (1 of "),
        (quantized, {}, f"{quantized} is quantized already (quantization_config in its config.json, method bitsandb"),
        (plain, {}, f"{plain} has no chat template"),
        (short, {}, f"max_completion_length (88) exceeds the context of {short} (80)"),
        (tmp_path / "absent", {"data.path": tiny_model_dir}, f"model.path {tmp_path / 'absent'} is not a directory"),
        (tiny_model_dir, {"rollout.max_prompt_length": 8}, "prompts are longer than rollout.max_prompt_length"),
        (tiny_model_dir, {"reward.functions": "[maths]"}, "unknown reward 'maths'. Did you mean 'math'?"),
        (tiny_model_dir, {"train.trl": "{beta: 1}"}, "train.trl.beta is set by the kit"),
        (tiny_model_dir, {"train.trl": "{betta: 1}"}, "train.trl.betta is not a field of trl's GRPOConfig"),
        (tiny_model_dir, {"train.trl": "{adam_beta2: x}"}, "train.trl.adam_beta2 must be a number, it is 'x' (str)"),
    ]
    for model, changes, message in cases:
        done = recipe(recipe_arguments(model, tmp_path / "run", changes))
        assert done.code == 2 and message in done.err, (message, done.err)
        assert not (tmp_path / "run").exists()


def test_a_tokenizer_without_a_stop_token_is_refused(tmp_path, tiny_model_dir):
    folder = altered_model(tiny_model_dir, tmp_path / "endless")
    facts = json.loads((folder / "tokenizer_config.json").read_text())
    facts.pop("eos_token")
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))
    with pytest.raises(BadInput, match="has no stop token"):
        load_tokenizer(load_config(CONFIG, ["--model.path", str(folder)]))


def test_a_model_whose_products_are_no_linear_layers_is_refused(tmp_path):
    from transformers import GPT2Config

    GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64).save_pretrained(tmp_path)
    with pytest.raises(BadInput, match=r"\(gpt2\) has no linear layer that could get an adapter"):
        check_base(load_config(CONFIG, ["--model.path", str(tmp_path)]))


def test_a_checkpoint_that_merge_could_not_take_is_refused(tmp_path):
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = size | {"vocab_size": 64, "head_dim": 8, "num_key_value_heads": 2, "sliding_window": 16}
    vision = size | {"image_size": 28, "patch_size": 14}
    shape = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=63)
    Gemma3ForConditionalGeneration(shape).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"lm_head.scale": torch.ones(1)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        BadInput, match=r"\(gemma3_text\) is laid out otherwise than its model, .*: it has lm_head.scale"
    ):
        check_base(load_config(CONFIG, ["--model.path", str(tmp_path)]))
