"""Every key that makes a step faster or smaller reaches the trainer: one trainer a value, as a recipe builds it, and
what the value changed in it. What the levers compute is tested with their own parts; this is that they are plugged in.
"""

import functools
from typing import Any

import bitsandbytes
import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_layers import GradientCheckpointingLayer

from kit.policy import fused_norms
from kit.policy.fused_linear import FusedLora
from kit.policy.recompute_offload import HostInputs
from kit.train import step as step_part
from kit.train.rows import PACK, take_rows
from tests.unit.test_liger import liger  # noqa: F401
from tests.unit.test_update import PACKED, build, set_loss, update  # noqa: F401

LAYERS = 2
LINEARS = 7 * LAYERS


@pytest.mark.parametrize(
    ("compute", "fused", "fp8"), [("plain", 0, 0), ("fused", LINEARS, 0), ("fp8", LINEARS, LINEARS)]
)
def test_the_products_with_the_base(build, compute, fused, fp8):  # noqa: F811
    model = build({"policy.compute": compute}).model
    found = [module for module in model.modules() if isinstance(module, FusedLora)]
    assert len(found) == fused and sum(module.product.is_fp8 for module in found) == fp8


@pytest.mark.parametrize("kernels", ["torch", "liger", "fused"])
def test_norms_rotary_embedding_and_swiglu(build, liger, monkeypatch, kernels):  # noqa: F811
    monkeypatch.setattr("kit.policy.layer_kernels.check_gpu", lambda config: None)
    called = []
    for name in ("norm", "rotate"):
        function = getattr(fused_norms, name)
        monkeypatch.setattr(fused_norms, name, lambda *a, f=function, n=name: called.append(n) or f(*a))
    set_loss(trainer := build({"policy.kernels": kernels}))
    update(trainer)
    assert set(liger) == ({"norm", "rotary", "swiglu"} if kernels == "liger" else set())
    assert set(called) == ({"norm", "rotate"} if kernels == "fused" else set())


def context_of(layer: Any) -> str | None:
    """What a layer's checkpoint does with its first run; None for torch's own checkpoint."""
    function = layer._gradient_checkpointing_func
    assert isinstance(function, functools.partial)
    if "context_fn" not in function.keywords:
        return None
    first, _ = function.keywords["context_fn"]()
    return "selective" if isinstance(first, TorchDispatchMode) else "full"


@pytest.mark.parametrize(
    ("recompute", "fraction", "wanted"),
    [
        ("none", 1.0, [False, False]),
        ("full", 1.0, [True, True]),
        ("full", 0.5, [False, True]),
        ("selective", 1.0, [True, True]),
        ("selective", 0.5, [False, True]),
    ],
)
def test_what_the_backward_pass_computes_again(build, recompute, fraction, wanted):  # noqa: F811
    """After a step: transformers turns checkpointing on when training begins, TRL after the reference's pass."""
    trainer = build({"train.recompute": recompute, "train.recompute_fraction": fraction, "train.max_steps": 1})
    trainer.train_run(resume=False)
    layers = [one for one in trainer.model.modules() if isinstance(one, GradientCheckpointingLayer)]
    assert [one.gradient_checkpointing for one in layers] == wanted
    if recompute != "none":
        assert [context_of(one) for one in layers] == [recompute] * LAYERS


@pytest.mark.parametrize("offload", [True, False])
def test_inputs_of_layers_in_host_memory(build, monkeypatch, offload):  # noqa: F811
    waiting, pack = [], HostInputs.pack
    monkeypatch.setattr(HostInputs, "pack", lambda *args: waiting.append(pack(*args)) or waiting[-1])
    keys = {"train.recompute": "full", "train.recompute_offload": offload, "train.max_steps": 1}
    build(keys).train_run(resume=False)
    assert bool(waiting) == offload


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("adamw_torch", (torch.optim.AdamW, False)),
        ("adamw_torch_fused", (torch.optim.AdamW, True)),
        ("adamw_bnb_8bit", (bitsandbytes.optim.AdamW, False)),
        ("adafactor", (transformers.optimization.Adafactor, False)),
    ],
)
def test_the_optimizer(build, name, wanted):  # noqa: F811
    trainer = build({"train.optimizer": name})
    assert trainer.args.optim == name
    made = trainer.create_optimizer()
    assert (type(made), bool(made.defaults.get("fused"))) == wanted


@pytest.mark.parametrize(("attention", "share"), [("flash", True), ("flex", True), ("flex", False)])
def test_packed_rows_of_the_policys_pass_and_of_the_references(build, monkeypatch, attention, share):  # noqa: F811
    passes: dict[bool, list] = {True: [], False: []}
    made: list[tuple[Any, tuple]] = []
    make_pack, pack_logps = step_part.make_pack, step_part.pack_logps

    def making(trainer: Any, model: Any, ids: Any, mask: Any, columns: int, *settings: Any) -> Any:
        assert not passes[False], "all packs are made before the first pass, which a copy to the device would wait for"
        made.append((make_pack(trainer, model, ids, mask, columns, *settings), settings[:2]))
        return made[-1][0]

    def seen(trainer: Any, model: Any, pack: Any, *others: Any) -> Any:
        passes[torch.is_grad_enabled()].append(pack)
        return pack_logps(trainer, model, pack, *others)

    monkeypatch.setattr(step_part, "make_pack", making)
    monkeypatch.setattr(step_part, "pack_logps", seen)
    keys = {**PACKED, "train.packed_attention": attention, "train.share_prompts": share}
    update(set_loss(build(keys), beta=0.01))
    assert len(made) > 1
    for one in passes.values():
        assert all(a is b for a, (b, _) in zip(one, made, strict=True)), "the reference reads what the policy reads"
    assert {settings for _, settings in made} == {(share, attention)}


def test_the_prompt_of_a_group_is_rendered_once(build, monkeypatch):  # noqa: F811
    trainer, rendered = build({}), []
    tokenize = trainer._tokenize_prompts
    monkeypatch.setattr(trainer, "_tokenize_prompts", lambda prompts: rendered.extend(prompts) or tokenize(prompts))
    first, second = ([{"role": "user", "content": text}] for text in ("1 + 2?", "20 + 3?"))
    ids = trainer._token_ids([first, first, second, second, first])
    assert rendered == [first, second, first], "of equal prompts in a row the first"
    assert ids == [tokenize([one])[0][0] for one in (first, first, second, second, first)]
    assert ids[0] is not ids[1]


def test_rows_taken_from_a_batch_do_not_take_its_pack():
    inputs = {
        "completion_ids": torch.arange(6).view(3, 2),
        PACK: "of all three",
        "num_items_in_batch": torch.tensor(6),
    }
    taken = take_rows(inputs, [2])
    assert taken["completion_ids"].tolist() == [[4, 5]] and taken.keys() == inputs.keys() - {PACK}
