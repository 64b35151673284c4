"""The policy's files: what an adapter to start from must be, what a run records of its base, what it publishes."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from kit.core.config.load import load_config
from kit.core.config.schema import Config, PolicyConfig
from kit.core.errors import BadInput, CheckFailed
from kit.core.file_kinds import BASE as BASE_FACTS
from kit.core.run_directory import RunDir, read_manifest, write_json, write_manifest
from kit.core.run_files import read_json
from kit.policy import load as policy
from kit.weights.frozen_base import hash_pairs, hash_tensor, load_frozen
from tests.conftest import CONFIG
from tests.unit.filled import filled

BASE, OTHER = "ab" * 32, "ab" * 31 + "cd"
SHAPE = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
SHAPE |= {"head_dim": 8, "vocab_size": 40, "num_hidden_layers": 1}


def configuration(**keys: Any) -> Config:
    return load_config(CONFIG, [f"--{key}={value}" for key, value in keys.items()])


def small_model(rank: int = 4, alpha: int = 8, **options: Any) -> Any:
    """A policy of one layer with an adapter that is not zero."""
    torch.manual_seed(0)
    model = get_peft_model(
        Qwen3ForCausalLM(Qwen3Config(**SHAPE)),
        LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear", task_type="CAUSAL_LM", **options),
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter.data)
    return model


# An adapter to start from.


@pytest.fixture
def adapter(tmp_path):
    """`adapter(**facts)`: a directory whose manifest says these."""

    def make(**facts: Any) -> Path:
        (folder := tmp_path / "adapter").mkdir()
        (folder / "adapter_model.safetensors").write_bytes(b"weights")
        shape = {"rank": 16, "alpha": 32, "rslora": False, "base_hash": BASE}
        write_manifest(folder, "adapter", **shape | facts)
        return folder

    return make


@pytest.mark.parametrize(
    ("facts", "keys", "complaint"),
    [
        ({"rank": 8}, {}, "policy.lora_rank is 16, .* has 8"),
        ({"alpha": 16}, {}, "policy.lora_alpha is 32, .* has 16"),
        ({"rslora": True}, {}, "policy.use_rslora is False, .* has True"),
        ({}, {"policy.use_rslora": True}, "policy.use_rslora is True, .* has False"),
        ({"rank": None}, {}, "policy.lora_rank is 16, .* has None"),
        ({"base_hash": OTHER}, {}, "was trained on another base"),
        ({"quant_cfg": "nvfp4"}, {}, "was trained for nvfp4, policy.quant_cfg says nothing"),
        ({"quant_cfg": "nvfp4"}, {"policy.quant_cfg": "fp8"}, "was trained for nvfp4, policy.quant_cfg says fp8"),
    ],
)
def test_an_adapter_of_another_shape_scale_base_or_format_is_refused(adapter, facts, keys, complaint):
    """With another scale it would be another policy at step 0, in silence."""
    config = configuration(**{"policy.init_adapter": adapter(**facts), **keys})
    with pytest.raises(BadInput, match=complaint):
        policy.check_init_adapter(config, BASE)


@pytest.mark.parametrize(
    ("facts", "keys"),
    [
        ({}, {}),
        ({"rslora": True}, {"policy.use_rslora": True}),
        ({"quant_cfg": None}, {"policy.quant_cfg": "nvfp4"}),  # plain GRPO first, then the format
        ({"quant_cfg": "nvfp4"}, {"policy.quant_cfg": "nvfp4"}),
        ({"quant_cfg": "fp8_static"}, {"policy.quant_cfg": "FP8_DEFAULT_CFG"}),
    ],
)
def test_an_adapter_that_fits_is_accepted(adapter, facts, keys):
    config = configuration(**{"policy.init_adapter": (folder := adapter(**facts)), **keys})
    policy.check_init_adapter(config, BASE)
    policy.check_init_adapter(config)
    (folder / "adapter_model.safetensors").write_bytes(b"weighty")  # as long as before
    with pytest.raises(BadInput, match="is damaged"):
        policy.check_init_adapter(config)


@pytest.mark.parametrize("change", ["missing", "unexpected", "shape"])
def test_weights_that_do_not_fit_the_adapter_are_refused(tmp_path, change):
    model = small_model()
    folder = policy.publish_adapter(model, tmp_path / "v", 1, BASE)
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    wanted = {name: tensor + 1 for name, tensor in tensors.items()}
    save_file(wanted, path)
    policy.load_adapter_weights(model, folder)
    held = {name.replace(".default", ""): one for name, one in model.named_parameters() if "lora_" in name}
    assert all(torch.equal(held[name], tensor) for name, tensor in wanted.items()) and held.keys() == wanted.keys()
    first = next(iter(tensors))
    if change == "missing":
        tensors.pop(first)
    else:
        tensors[first.replace("layers.0", "layers.7") if change == "unexpected" else first] = torch.zeros(4, 3)
    save_file(tensors, path)
    # peft itself raises for a shape.
    with pytest.raises((BadInput, RuntimeError), match=r"1 tensors missing|1 unexpected|size mismatch"):
        policy.load_adapter_weights(model, folder)


# The base of a run.

COMMIT = "c0ffee" * 6 + "beef"


@pytest.fixture(scope="module")
def base(tiny_model_dir):
    return load_frozen(tiny_model_dir, "nf4", "float32", device="cpu")


@pytest.mark.parametrize(("asked", "recorded"), [(None, COMMIT), ("v1", "v1")])
def test_of_a_base_from_the_hub_the_commit_that_was_loaded_is_recorded(base, tmp_path, monkeypatch, asked, recorded):
    """Without it merge and eval would take whatever the branch holds by then."""
    monkeypatch.setattr(base.config, "_commit_hash", COMMIT)
    config = configuration(**{"model.id": "org/tiny", "run.output_dir": tmp_path})
    config.model.path, config.model.revision = None, asked
    facts = policy.record_base(base, run := RunDir(tmp_path), config)
    assert (facts["model"], facts["revision"]) == ("org/tiny", recorded)
    assert read_json(run.base_file) == json.loads(json.dumps(facts))
    policy.record_base(base, run, config)  # a resume on the same base


def test_a_local_base_is_recorded_by_its_whole_path(base, tiny_model_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tiny_model_dir.parent)
    config = configuration(**{"model.path": tiny_model_dir.name})
    facts = policy.record_base(base, run := RunDir(tmp_path), config, write=False)
    assert facts["model"] == str(tiny_model_dir.resolve()) and not run.base_file.exists()


@pytest.mark.parametrize("which", ["the run's", "the adapter's"])
def test_another_base_than_the_runs_or_the_adapters_is_refused_and_nothing_is_written(
    base, tmp_path, adapter, monkeypatch, which
):
    config, run = configuration(**{"model.path": "."}), RunDir(tmp_path / "run")
    run.path.mkdir()
    if which == "the run's":
        write_json(run.base_file, filled(BASE_FACTS, {"hash": OTHER}))
    else:
        config.policy.init_adapter = str(adapter(base_hash=OTHER))
    before = run.base_file.read_bytes() if run.base_file.exists() else None
    with pytest.raises(BadInput, match="another base"):
        policy.record_base(base, run, config)
    assert (run.base_file.read_bytes() if run.base_file.exists() else None) == before


def test_one_changed_bit_of_any_tensor_of_the_base_is_found_after_training(base):
    facts = policy.hash_base(base)
    policy.check_base_unchanged(base, facts)
    tensors = {name: one.data for name, one in base.named_parameters()}
    tensors |= {f"{name}.absmax": one.quant_state.absmax for name, one in base.named_parameters() if "_proj" in name}
    for name, tensor in tensors.items():
        content = tensor.view(torch.uint8).flatten()
        content[-1] ^= 1
        with pytest.raises(
            CheckFailed, match=rf"1 of {len(facts['tensors'])} tensors.*{name.removesuffix('.absmax')}"
        ):
            policy.check_base_unchanged(base, facts)
        content[-1] ^= 1
    policy.check_base_unchanged(base, facts)


# The policy as the configuration says.


@pytest.mark.parametrize("rslora", [True, False])
def test_the_adapter_has_the_rank_and_scale_of_the_configuration(rslora):
    keys = {"lora_rank": 6, "lora_alpha": 9, "lora_dropout": 0.25, "use_rslora": rslora}
    made = policy.lora_config(PolicyConfig(target_modules=["q_proj"], **keys))
    module = get_peft_model(Qwen3ForCausalLM(Qwen3Config(**SHAPE)), made).base_model.model.model.layers[0].self_attn
    assert module.q_proj.scaling["default"] == pytest.approx(9 / (6**0.5 if rslora else 6))
    assert module.q_proj.lora_A["default"].weight.shape == (6, 16)
    assert module.q_proj.lora_dropout["default"].p == 0.25 and not hasattr(module.k_proj, "lora_A")
    assert (made.bias, made.use_dora, made.modules_to_save) == ("none", False, None)


@pytest.mark.parametrize(("dtype", "other"), [("float32", torch.bfloat16), ("bfloat16", torch.float32)])
def test_only_what_is_trained_is_cast(dtype, other):
    model = torch.nn.ModuleDict(
        {"base": torch.nn.Linear(2, 2, dtype=other), "adapter": torch.nn.Linear(2, 2, dtype=other)}
    )
    model["base"].requires_grad_(False)
    policy.set_adapter_dtype(model, dtype)
    assert {one.dtype for one in model["adapter"].parameters()} == {getattr(torch, dtype)}
    assert {one.dtype for one in model["base"].parameters()} == {other}


def linears(layers: range, *names: str) -> list[str]:
    return [f"model.layers.{layer}.{name}" for layer in layers for name in names]


ALL = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
ALL += ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings")
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        ("all-linear", linears(range(11), *ALL)),
        (["up_proj", "v_proj"], linears(range(11), "self_attn.v_proj", "mlp.up_proj")),
        (["mlp.up_proj"], linears(range(11), "mlp.up_proj")),
        # Not the layers 0 and 10.
        (["0.mlp.up_proj"], linears(range(1), "mlp.up_proj")),
        (["model.layers.1.mlp.up_proj"], linears(range(1, 2), "mlp.up_proj")),
        (["lm_head"], ["lm_head"]),
    ],
)
def test_the_layers_that_get_an_adapter_are_those_that_peft_would_adapt(targets, expected, tied):
    shape = Qwen3Config(**SHAPE | {"num_hidden_layers": 11, "tie_word_embeddings": tied})
    config = configuration(**{"model.path": "."})
    config.policy.target_modules = targets
    assert policy.adapted_layers(config, shape) == expected
    with torch.device("meta"):
        model = get_peft_model(Qwen3ForCausalLM(shape), policy.lora_config(config.policy))
    theirs = [name.removeprefix("base_model.model.") for name, one in model.named_modules() if hasattr(one, "lora_A")]
    assert theirs == expected


@pytest.mark.parametrize("target", ["proj", "_proj", "self_attn", "norm", "Q_proj", "layers.0"])
def test_a_target_that_is_no_linear_layer_is_refused(target):
    config = configuration(**{"model.path": "."})
    config.policy.target_modules = ["q_proj", target]
    with pytest.raises(BadInput, match=f"policy.target_modules names '{target}'; linear layers here are .*q_proj"):
        policy.adapted_layers(config, Qwen3Config(**SHAPE))


def test_the_base_is_loaded_as_the_configuration_says(monkeypatch):
    loaded, model = [], SimpleNamespace(generation_config=GenerationConfig(eos_token_id=[3, 4], min_p=0.5))
    monkeypatch.setattr(policy, "load_frozen", lambda *names, **options: loaded.append((names, options)) or model)
    monkeypatch.setattr("kit.policy.host_embedding.keep_embedding_on_host", lambda model: loaded.append(model))
    config = configuration(
        **{"policy.quantization": "fp8", "policy.double_quantization": False, "model.revision": "v1"}
    )
    config.model.path, config.model.id, config.model.dtype = None, "org/m", "bfloat16"
    assert policy.load_policy_base(config) is model
    assert (model.generation_config.eos_token_id, model.generation_config.min_p) == ([3, 4], None)
    ((names, options),) = loaded
    assert names == ("org/m", "fp8")
    wanted = {"dtype": "bfloat16", "double_quantization": False, "revision": "v1", "quant_storage": torch.uint8}
    assert {key: options[key] for key in wanted} == wanted
    assert options["attn_implementation"] == config.model.attn_implementation
    config.policy.embeddings = "host"
    policy.load_policy_base(config)
    assert loaded[2:] == [model]


def test_prompts_of_a_batch_are_padded_before_them(tiny_model_dir):
    """A completion follows its prompt."""
    tokenizer = policy.load_tokenizer(configuration(**{"model.path": tiny_model_dir}))
    ids, mask = tokenizer(["1 + 2 =", "3"], padding=True).values()
    assert mask[1] == [0] * (len(mask[0]) - 1) + [1] and mask[0] == [1] * len(mask[0]) and len(ids[1]) == len(ids[0])


# What is published.


@pytest.mark.parametrize("is_gathered", [True, False])
@pytest.mark.parametrize("rslora", [True, False])
def test_a_published_adapter_holds_and_names_what_was_trained(tmp_path, rslora, is_gathered):
    model, gathered = small_model(rank=2, alpha=6, use_rslora=rslora), None
    expected = {name.replace(".default", ""): one for name, one in model.named_parameters() if "lora_" in name}
    if is_gathered:  # the model holds parts
        gathered = {name: one + 1 for name, one in model.named_parameters() if "lora_" in name}
        expected = {name.replace(".default", ""): one for name, one in gathered.items()}
    folder = policy.publish_adapter(model, tmp_path / "v000007", 7, BASE, gathered)
    manifest, tensors = read_manifest(folder, "adapter", deep=True), load_file(folder / "adapter_model.safetensors")
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], one.detach()) for name, one in expected.items())
    facts = {"version": 7, "step": 7, "base_hash": BASE, "rank": 2, "alpha": 6, "rslora": rslora}
    assert {key: manifest[key] for key in facts} == facts
    assert manifest["tensor_hash"] == hash_pairs({name: hash_tensor(one) for name, one in tensors.items()})
    assert "quant_cfg" not in manifest
    config = configuration(**{"policy.init_adapter": folder, "policy.lora_rank": 2, "policy.lora_alpha": 6})
    config.policy.use_rslora = rslora
    policy.check_init_adapter(config, BASE)


def test_an_adapter_of_a_format_is_published_with_its_ranges(tmp_path, monkeypatch):
    state = {"quant_cfg": "nvfp4", "quantizer_hash": "12"}
    monkeypatch.setattr("kit.policy.quantized_linear.write_quantizer_state", lambda model, folder: state)
    manifest = read_manifest(policy.publish_adapter(small_model(), tmp_path / "v", 1, BASE))
    assert {key: manifest[key] for key in state} == state


# The teacher's adapter and model: see kit/policy/teacher.py.


class Names:
    """A tokenizer of so many entries."""

    def __init__(self, size: int = 40, shift: int = 0):
        self.size, self.shift = size, shift

    def __len__(self) -> int:
        return self.size

    def get_vocab(self) -> dict[str, int]:
        return {f"t{number}": number for number in range(self.size)}

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [len(text) + self.shift]


@pytest.fixture
def check(tmp_path, monkeypatch):
    """`check(teacher's config, tokenizer)`: what a teacher by id is refused for, None when it is taken."""
    from kit.policy import teacher

    def run(facts: Any, tokenizer: Names) -> str | None:
        monkeypatch.setattr(teacher, "unquantized_config", lambda name, revision: facts)
        monkeypatch.setattr(teacher, "check_complete", lambda name, facts: None)
        monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda name, **options: tokenizer)
        monkeypatch.setattr("kit.policy.packed.packing.check_packing", lambda config, facts: None)
        config = configuration(**{"distill.teacher": "org/big", "model.path": "."})
        config.rollout.max_prompt_length, config.rollout.max_completion_length = 30, 20
        try:
            teacher.check_teacher(config, RunDir(tmp_path), Names(), Qwen3Config(**SHAPE))
        except BadInput as refused:
            return str(refused)

    return run


@pytest.mark.parametrize(
    ("facts", "tokenizer", "complaint"),
    [
        ({}, Names(), None),
        ({"max_position_embeddings": 50}, Names(), None),
        ({"max_position_embeddings": 49}, Names(), "a context of 49 tokens, .* need 50"),
        ({"vocab_size": 39}, Names(), "scores 39 ids, the tokenizer has 40"),
        ({"vocab_size": 64}, Names(), None),
        ({}, Names(41), "another tokenizer"),
        ({}, Names(40, shift=1), "another tokenizer"),  # as many entries, another text
    ],
)
def test_a_teacher_of_another_tokenizer_or_too_short_a_context_is_refused(check, facts, tokenizer, complaint):
    found = check(Qwen3Config(**SHAPE | facts), tokenizer)
    assert (found is None) == (complaint is None) and (complaint is None or re.search(complaint, found)), found


@pytest.mark.parametrize("change", ["same", "fewer layers", "more layers", "another base", "known base"])
def test_a_teachers_adapter_of_other_layers_or_another_base_is_refused(tmp_path, change):
    from kit.policy.teacher import check_teacher

    options = {"fewer layers": ["q_proj"], "more layers": "all-linear"}
    model = get_peft_model(
        Qwen3ForCausalLM(Qwen3Config(**SHAPE)),
        LoraConfig(r=2, target_modules=options.get(change, ["q_proj", "v_proj"]), task_type="CAUSAL_LM"),
    )
    folder = policy.publish_adapter(model, tmp_path / "v", 1, OTHER if change == "another base" else BASE)
    config = configuration(**{"distill.teacher_adapter": folder, "model.path": ".", "server.base": tmp_path / "none"})
    config.policy.target_modules, run = ["q_proj", "v_proj"], RunDir(tmp_path)
    if change in ("another base", "known base"):
        write_json(run.base_file, {"hash": BASE})
    if change in ("same", "known base"):
        return check_teacher(config, run, Names(), Qwen3Config(**SHAPE))
    with pytest.raises(BadInput, match="another base" if "base" in change else "only one of them adapts"):
        check_teacher(config, run, Names(), Qwen3Config(**SHAPE))


NOT_SPLIT = SimpleNamespace(deepspeed_plugin=None)  # of transformers' arguments


@pytest.mark.parametrize("kind", ["FSDP2", "ZeRO-3"])
def test_a_teachers_adapter_of_another_rank_is_refused_where_the_students_is_split(tmp_path, monkeypatch, kind):
    from kit.policy.teacher import check_teacher

    folder = policy.publish_adapter(small_model(rank=2), tmp_path / "v", 1, BASE)
    config = configuration(**{"distill.teacher_adapter": folder, "model.path": ".", "server.base": tmp_path / "none"})
    config.policy.lora_rank = 4
    check_teacher(config, RunDir(tmp_path), Names(), Qwen3Config(**SHAPE))
    monkeypatch.setattr("kit.policy.teacher.announced", lambda: kind)
    with pytest.raises(BadInput, match=rf"has rank 2, policy\.lora_rank is 4: under {kind} .* of the same rank, or"):
        check_teacher(config, RunDir(tmp_path), Names(), Qwen3Config(**SHAPE))
    config.policy.lora_rank = 2
    check_teacher(config, RunDir(tmp_path), Names(), Qwen3Config(**SHAPE))


def test_another_models_weights_are_frozen_and_its_dropout_is_off(monkeypatch):
    from kit.policy import teacher

    loaded = {}
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5)).train()
    monkeypatch.setattr(policy, "load_frozen", lambda *names, **options: loaded.update(options, names=names) or module)
    config = configuration(**{"distill.teacher": "org/big", "distill.teacher_revision": "v2", "model.revision": "v1"})
    config.policy.quantization = "fp8"
    found = teacher.load_teacher(config, NOT_SPLIT)
    assert found is module and not any(one.training for one in module.modules())
    assert not any(one.requires_grad for one in module.parameters())
    assert loaded["names"] == ("org/big", "fp8") and loaded["revision"] == "v2"
    assert teacher.load_teacher(configuration(**{"distill.teacher": "base"}), NOT_SPLIT) is None


@pytest.mark.parametrize("rslora", [True, False])
def test_a_teachers_adapter_of_another_scale_is_that_adapter_on_the_base_and_then_the_students_own_again(
    tmp_path, rslora
):
    from kit.policy.teacher import Teacher

    theirs = small_model(rank=2, alpha=12, use_rslora=rslora).eval()
    folder = policy.publish_adapter(theirs, tmp_path / "v", 1, BASE)
    student = small_model(rank=4, alpha=4).eval()
    teacher = Teacher(SimpleNamespace(policy=SimpleNamespace(quant_cfg=None),
                                      distill=SimpleNamespace(teacher_adapter=folder)), student)  # fmt: skip
    ids = torch.arange(12)[None]
    before = {name: (one.data_ptr(), one.detach().clone()) for name, one in student.named_parameters()}
    with torch.no_grad():
        wanted, own = theirs(input_ids=ids).logits, student(input_ids=ids).logits
        with pytest.raises(ZeroDivisionError), teacher.of(student) as model:
            torch.testing.assert_close(model(input_ids=ids).logits, wanted, rtol=1e-4, atol=1e-5)
            raise ZeroDivisionError
        assert torch.equal(student(input_ids=ids).logits, own) and not torch.allclose(own, wanted, atol=1e-2)
    for name, one in student.named_parameters():
        assert one.data_ptr() == before[name][0] and torch.equal(one, before[name][1]), name
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file(
        tensors | {"base_model.model.lm_head.lora_A.weight": torch.zeros(2, 16)}, folder / "adapter_model.safetensors"
    )
    with pytest.raises(BadInput, match=r"has weights that the student lacks: base_model\.model\.lm_head"):
        Teacher(SimpleNamespace(policy=SimpleNamespace(quant_cfg=None),
                                distill=SimpleNamespace(teacher_adapter=folder)), student)  # fmt: skip
