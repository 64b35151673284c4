"""policy.embeddings: host: the same numbers bit for bit, a base whose hash covers the table, refusals, the plan."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from kit.core.config.checks import check_config
from kit.core.config.load import load_config
from kit.core.errors import BadInput, CheckFailed
from kit.plan import memory
from kit.plan.fitting import changed, changes, lay_out
from kit.plan.gpus import CARDS, parse_gpus
from kit.plan.shapes import shape_by_size
from kit.policy.host_embedding import HostEmbedding, keep_embedding_on_host
from kit.policy.load import check_base_unchanged
from kit.weights.frozen_base import hash_base
from tests.conftest import CONFIG
from tests.unit.test_plan_activations import (
    as_peft_on_a_gpu,  # noqa: F401
    nf4_policy,
    shape,
)
from tests.unit.test_plan_activations import config as layer_config
from tests.unit.test_plan_memory import config as plan_config

GIB = 2**30


def policy(recompute: str = "none") -> Any:
    torch.manual_seed(0)
    return nf4_policy(shape(2), layer_config("all-linear", recompute))


def losses_and_gradients(model: Any) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 200, (2, 64), generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = model(input_ids=ids, labels=ids, fused_lm_head=True).log_probs
    losses.sum().backward()
    return {"losses": losses} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.usefixtures("as_peft_on_a_gpu")
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_losses_and_gradients_are_the_same_bit_for_bit(recompute):
    plain = losses_and_gradients(policy(recompute))
    model = policy(recompute)
    keep_embedding_on_host(model.get_base_model())
    assert isinstance(model.get_base_model().model.embed_tokens, HostEmbedding)
    found = losses_and_gradients(model)
    assert len(plain) > 20 and plain.keys() == found.keys()
    assert all(torch.equal(found[name], value) for name, value in plain.items())


def test_a_forward_answers_in_the_shape_of_its_ids_and_with_no_graph():
    table = torch.randn(10, 4)
    module = HostEmbedding(torch.nn.Parameter(table))
    ids = torch.tensor([[3, 3, 0], [9, 1, 2]])
    found = module(ids)
    assert torch.equal(found, table[ids]) and found.is_leaf and not found.requires_grad
    with pytest.raises(IndexError):
        module(torch.tensor([10]))


def test_nothing_that_handles_parameters_sees_the_table():
    module = HostEmbedding(torch.randn(10, 4)).to(device="meta", dtype=torch.float16)
    assert module.host_weight.device.type == "cpu" and module.host_weight.dtype == torch.float32
    assert [*module.parameters()] == [*module.buffers()] == [] and not module.state_dict()


def test_the_hash_of_the_base_stays_and_covers_the_table():
    model = policy()
    facts = hash_base(model)
    keep_embedding_on_host(model.get_base_model())
    found = hash_base(model)
    assert found["hash"] == facts["hash"] and "model.embed_tokens.weight" in found["tensors"]
    check_base_unchanged(model, facts)
    model.get_base_model().model.embed_tokens.host_weight[7, 3] += 1
    with pytest.raises(CheckFailed, match=r"1 of \d+ tensors, first \['model\.embed_tokens\.weight'\]"):
        check_base_unchanged(model, facts)


def test_an_embedding_that_is_more_than_a_lookup_is_refused():
    class Scaled(torch.nn.Embedding):
        pass

    model = policy().get_base_model()
    plain = model.get_input_embeddings()
    model.set_input_embeddings(Scaled(200, 128))
    with pytest.raises(BadInput, match="Scaled, does more than look up"):
        keep_embedding_on_host(model)
    model.set_input_embeddings(plain)
    model.lm_head.weight = plain.weight
    with pytest.raises(BadInput, match="output layer has the same weight"):
        keep_embedding_on_host(model)


def test_a_tied_model_is_refused_before_weights_load(recipe, recipe_arguments, tiny_model_dir, tmp_path):
    folder = tmp_path / "no-weights"
    shutil.copytree(tiny_model_dir, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    found = recipe(recipe_arguments(folder, tmp_path / "run", {"policy.embeddings": "host"}))
    assert found.code == 2 and "has tied word embeddings" in found.err, found.err
    assert "Set policy.embeddings to gpu" in found.err and not (tmp_path / "run").exists()


def test_a_base_that_is_split_over_processes_is_refused(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(BadInput, match=r"policy\.embeddings is host under FSDP2"):
        check_config(load_config(str(CONFIG), ["--policy.embeddings=host"]), 2)


@pytest.fixture(scope="module")
def untied_model_dir(learning_model_dir, tmp_path_factory) -> Path:
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("untied") / "model"
    shutil.copytree(learning_model_dir, folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.model.embed_tokens.weight.detach().clone())
    model.save_pretrained(folder)
    return folder


def test_two_steps_of_the_recipe_end_with_the_same_adapter(recipe, recipe_arguments, untied_model_dir, tmp_path):
    made = {}
    for where in ("gpu", "host"):
        keys = {"policy.embeddings": where, "train.max_steps": 2}
        found = recipe(recipe_arguments(untied_model_dir, tmp_path / where, keys))
        assert found.code in (None, 0), f"{found.out}\n{found.err}"
        manifest = json.loads((tmp_path / where / "adapters/v000002/manifest.json").read_text())
        made[where] = manifest["base_hash"], manifest["tensor_hash"]
        rows = [json.loads(line) for line in (tmp_path / where / "metrics.jsonl").read_text().splitlines()]
        assert any(row["grad_norm"] > 0 for row in rows)
    assert made["gpu"] == made["host"]


def test_the_plan_takes_the_table_off_the_card_and_not_off_a_cpu():
    sizes = shape_by_size("8b")
    for card, gib in ((CARDS["h200"], 151936 * 4096 * 2 / GIB), (parse_gpus("cpu")[0], 0.0)):
        one, other = (
            memory.allocated(memory.update_parts(sizes, plan_config(policy__embeddings=where), card))
            for where in ("gpu", "host")
        )
        assert one - other == pytest.approx(gib)


def test_the_plan_offers_it_for_untied_models():
    keys = {"rollout__max_completion_length": 2048, "train__per_device_train_batch_size": 8}
    layout = lay_out(shape_by_size("8b"), plan_config(**keys), CARDS["rtx4090"], 1)
    offered = [change for change in changes(layout) if "policy.embeddings" in change.keys]
    assert [round(change.saves_gib, 2) for change in offered] == [1.16]
    assert not any("policy.embeddings" in one.keys for one in changes(changed(layout, offered[0].keys)))
    tied = lay_out(shape_by_size("4b"), plan_config(**keys), CARDS["rtx4090"], 1)
    assert not any("policy.embeddings" in one.keys for one in changes(tied))
    tied = changed(tied, {"policy.embeddings": "host"})
    assert not tied.fits and "policy.embeddings is host" in tied.faults[0]
