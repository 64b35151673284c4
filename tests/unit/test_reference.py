"""`policy.reference: init_adapter`: the KL is to the adapter that the run started from, in every way to compute it."""

import shutil

import pytest
import torch
from safetensors.torch import load_file

from kit.core.config.load import load_config
from kit.core.config.recipe import PLAIN, QUANTIZED
from kit.core.errors import BadInput
from kit.plan import memory
from kit.plan.gpus import parse_gpus
from kit.plan.shapes import find_shape
from kit.policy.load import publish_adapter
from tests.conftest import make_base

FEW = ("--limit", 10, "--problems", 100, "--heldout", 20)

WAYS = {
    "padded": {},
    "packed": {"train.micro_batch_tokens": 128},
    "fused": {"policy.compute": "fused"},
    "packed and fused": {"policy.compute": "fused", "train.micro_batch_tokens": 128},
    "kl in the reward": {"train.kl_in_reward": True},
    "bfloat16": {"policy.adapter_dtype": "bfloat16"},
    "quantized": {"policy.quant_cfg": "nvfp4a16"},
    "kept weights": {"rollout.keep_weights": "always"},
}


@pytest.fixture(scope="module")
def start(build_trainer, recipe_arguments, learning_model_dir, tmp_path_factory):
    """An adapter that changes what the base says, published by a run of its own."""
    folder = tmp_path_factory.mktemp("start")
    trainer = build_trainer(recipe_arguments(learning_model_dir, folder / "run", {"train.max_steps": 1}))
    generator = torch.Generator().manual_seed(3)
    for name, parameter in trainer.model.named_parameters():
        if "lora_B" in name:
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
    return publish_adapter(trainer.model, folder / "v000001", 1, trainer.policy.base_hash)


@pytest.fixture
def build(build_trainer, recipe_arguments, learning_model_dir, tmp_path, start):
    def make(changes: dict, flags: tuple[str, ...] = (), name: str = "run"):
        keys = {"policy.reference": "init_adapter", "policy.init_adapter": start, "train.beta": 0.05}
        arguments = recipe_arguments(learning_model_dir, tmp_path / name, keys | changes, flags)
        return build_trainer(arguments, file=QUANTIZED if "policy.quant_cfg" in changes else PLAIN)

    return make


@pytest.mark.parametrize("way", WAYS)
def test_the_kl_to_the_start_is_exactly_0_in_step_1_and_grows_from_there(build, read_jsonl, way):
    trainer = build({"train.max_steps": 2, "train.save_steps": 2, "train.learning_rate": 1e-2} | WAYS[way])
    trainer.train_run(resume=False)
    first, second = (row["kl"] for row in read_jsonl(trainer.run.metrics_file))
    assert first == 0.0  # to the base it is not: the next test
    assert second > 1e-6


def test_a_mixture_of_experts_has_its_start_as_reference(tmp_path, build_trainer, recipe_arguments, read_jsonl):
    model = make_base(tmp_path / "model", "--experts", 2, "--layers", 1, "--hidden", 64, "--steps", 0, *FEW)
    keys = {"train.learning_rate": 1e-2, "train.max_steps": 2, "policy.target_modules": "all-linear"}
    keys |= {"reward.functions": f"['{__name__}:letters']", "reward.options": "{}"}
    first = build_trainer(recipe_arguments(model, tmp_path / "first", keys | {"train.save_steps": 2}))
    first.train_run(resume=False)
    adapter = first.run.adapter_dir(2)
    assert any(".experts." in name for name in load_file(adapter / "adapter_model.safetensors"))
    keys |= {"policy.reference": "init_adapter", "policy.init_adapter": adapter, "train.beta": 0.05}
    trainer = build_trainer(recipe_arguments(model, tmp_path / "run", keys))
    ids = [[5, 9, 20, 31, 7, 11]]
    start, base = trainer.policy.score(ids)[0], trainer.policy.score(ids, is_adapted=False)[0]
    trainer.train_run(resume=False)
    kl = [row["kl"] for row in read_jsonl(trainer.run.metrics_file)]
    assert kl[0] == 0.0 < kl[1] and abs(base - start).max() > 1e-4
    with trainer.policy.reference():
        assert (trainer.policy.score(ids)[0] == start).all()


def letters(completions, **_):
    """A reward that an untrained model gets a spread of."""
    return [float(sum(map(str.isalpha, one[0]["content"]))) for one in completions]


def test_the_reference_scores_with_the_start_whatever_the_policy_has_become(build, learning_model_dir):
    trainer = build({"train.max_steps": 1})
    policy, ids = trainer.policy, [[5, 9, 20, 31, 7, 11]]
    start = policy.score(ids)[0]
    trained = {name: parameter for name, parameter in trainer.model.named_parameters() if parameter.requires_grad}
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.add_(0.05 if "lora_B" in name else 0.0)
    now = {name: parameter.clone() for name, parameter in trained.items()}
    with policy.reference():
        assert (policy.score(ids)[0] == start).all()
    base = policy.score(ids, is_adapted=False)[0]
    assert abs(base - start).max() > 1e-2 and abs(policy.score(ids)[0] - start).max() > 1e-2
    assert all(torch.equal(parameter, now[name]) for name, parameter in trained.items())


def test_a_resumed_run_has_the_start_as_reference_and_not_the_checkpoint(build, read_jsonl):
    changes = {"train.save_steps": 2, "train.learning_rate": 1e-2}
    whole = build({"train.max_steps": 3} | changes, name="whole")
    whole.train_run(resume=False)
    build({"train.max_steps": 2} | changes, name="parted").train_run(resume=False)
    parted = build({"train.max_steps": 3} | changes, flags=("--resume",), name="parted")
    parted.train_run(resume=True)
    rows = [[(row["kl"], row["loss"]) for row in read_jsonl(one.run.metrics_file)] for one in (whole, parted)]
    assert rows[0] == rows[1] and rows[0][2][0] > 0


def test_a_resume_refuses_another_start_in_its_place(build, start, tmp_path, build_trainer):
    moved = tmp_path / "start"
    shutil.copytree(start, moved)
    changes = {"policy.init_adapter": moved, "train.max_steps": 1, "train.save_steps": 1}
    first = build(changes)
    first.train_run(resume=False)
    shutil.rmtree(moved)
    shutil.copytree(first.run.adapter_dir(1), moved)
    with pytest.raises(BadInput, match=r"is not the adapter that .* started from, and it is the run's reference"):
        build(changes | {"train.max_steps": 2}, flags=("--resume",))


def test_only_the_trained_adapter_is_published(build, start):
    trainer = build({"train.max_steps": 1, "train.save_steps": 1})
    trainer.train_run(resume=False)
    published = trainer.run.adapter_dir(1)
    sizes = [(folder / "adapter_model.safetensors").stat().st_size for folder in (start, published)]
    assert sizes[0] == sizes[1]


def test_the_plan_counts_the_copy_once(learning_model_dir):
    shape = find_shape(str(learning_model_dir), None)
    found = []
    for reference in ("adapter_off", "init_adapter"):
        config = load_config("recipes/configs/grpo-tiny-nf4-cpu.yaml", [f"--policy.reference={reference}"])
        found.append(memory.resident(shape, config, parse_gpus("cpu")[0]))
    assert found[1] == found[0] | {memory.REFERENCE: found[0]["adapter"]}
