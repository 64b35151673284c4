"""Distillation: the chunked divergence against a direct one, the teacher's pass, and that the student comes nearer."""

from typing import Any

import pytest
import torch
from trl.kernels import chunked_divergence

from kit.core.config.distill_rules import faults, settled, without_effect
from kit.core.config.load import load_config
from kit.core.config.recipe import DISTILLATION
from kit.core.config.schema import limit_faults
from kit.core.errors import BadInput, CheckFailed
from kit.policy.load import publish_adapter
from kit.policy.quantized_linear import quantizer_state, quantizers_of
from kit.rollout.policy_view import Report, Rollouts
from kit.train.distill_trainer import Head, divergence, last_states
from kit.train.rows import take_rows
from kit.weights.frozen_base import plain_name

CONFIG = "recipes/configs/grpo-tiny-nf4-cpu.yaml"
PACKED = {"train.per_device_train_batch_size": 4, "train.gradient_accumulation_steps": 4}
PACKED |= {"train.micro_batch_tokens": 88}


def direct(student: torch.Tensor, teacher: torch.Tensor, kind: str, b: float) -> torch.Tensor:
    """The divergence (N,) of logits (N, V), written down as in the docstring of distill_trainer.py."""
    p, q = student.softmax(-1), teacher.softmax(-1)
    if kind == "reverse_kl":
        return (p * (p / q).log()).sum(-1)
    if kind == "forward_kl":
        return (q * (q / p).log()).sum(-1)
    m = (1 - b) * p + b * q
    return b * (q * (q / m).log()).sum(-1) + (1 - b) * (p * (p / m).log()).sum(-1)


@pytest.mark.parametrize(("kind", "b"), [("reverse_kl", 1.0), ("forward_kl", 0.0), ("js", 0.5), ("js", 0.2)])
def test_the_divergence_in_chunks_is_the_direct_one_in_float64_and_so_is_its_gradient(kind, b, monkeypatch):
    monkeypatch.setattr(chunked_divergence, "TOKEN_CHUNK_SIZE", 7)
    monkeypatch.setattr(chunked_divergence, "VOCAB_CHUNK_SIZE", 64)
    torch.manual_seed(0)
    states, target = torch.randn(45, 24, requires_grad=True), torch.randn(45, 40)
    # The teacher's vocabulary ends later: what is behind the student's last entry does not count.
    head, other = Head(torch.randn(150, 24) / 3, None, 0.5, None), Head(torch.randn(170, 40) / 4, None, 1.0, 20.0)
    found, entropy = divergence(states, head, target, other, b, 2.0)
    weights = torch.rand(45)
    (gradient,) = torch.autograd.grad((found * weights).sum(), states)

    exact = states.detach().double().requires_grad_()
    logits = exact @ head.weight.double().T * 0.5 / 2
    others = 20 * torch.tanh(target.double() @ other.weight[:150].double().T / 20) / 2
    wanted = direct(logits, others, kind, b)
    (wanted_gradient,) = torch.autograd.grad((wanted * weights.double()).sum(), exact)
    assert torch.allclose(found.double(), wanted, rtol=1e-5, atol=1e-6)
    assert torch.allclose(gradient.double(), wanted_gradient, rtol=1e-4, atol=1e-6)
    assert wanted_gradient.abs().max() > 1e-3
    p = logits.softmax(-1)
    assert torch.allclose(entropy.double(), -(p * p.log()).sum(-1), rtol=1e-5)


@pytest.fixture(scope="module")
def build(build_trainer, recipe_arguments, tiny_model_dir, tmp_path_factory):
    """`build({key: value})`: the trainer as the recipe builds it, its student's and teacher's adapters not zero."""

    def make(changes: dict | None = None) -> Any:
        folder = tmp_path_factory.mktemp("distill") / "run"
        keys = {"train.max_steps": 4, **(changes or {})}
        return build_trainer(recipe_arguments(tiny_model_dir, folder, keys), file=DISTILLATION)

    return make


def shift(model: torch.nn.Module, seed: int, size: float = 0.05) -> None:
    """Give the adapter a B that changes what the base says."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data = size * torch.randn(parameter.shape, generator=generator)


@pytest.fixture(scope="module")
def another(build, tmp_path_factory):
    """An adapter of rank 8 on the same base, alpha 24: neither is the student's."""
    keys = {"policy.lora_rank": 8, "policy.lora_alpha": 24, "distill.teacher": "base", "policy.init_adapter": "none"}
    trainer = build_random(build, keys)
    shift(trainer.model, seed=1, size=0.2)
    folder = tmp_path_factory.mktemp("adapter") / "v000001"
    return publish_adapter(trainer.model, folder, 1, trainer.policy.base_hash)


def build_random(build: Any, keys: dict) -> Any:
    """A trainer whose student would equal its teacher, which only a test may have."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kit.core.config.distill_rules.faults", lambda config: [])
        return build({key: value for key, value in keys.items() if value != "none"})


@pytest.fixture(scope="module")
def taught(build, another):
    trainer = build({"distill.teacher_adapter": another})
    shift(trainer.model, seed=2)
    return trainer


@pytest.fixture(scope="module")
def packed(build, another):
    trainer = build({"distill.teacher_adapter": another, **PACKED})
    shift(trainer.model, seed=2)
    return trainer


def rows(trainer: Any, seed: int = 0) -> dict:
    """16 rows, four to a prompt, as TRL hands them over, padded left and right."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda shape: torch.randint(5, 300, shape, generator=generator)  # noqa: E731
    prompts, completions = draw((4, 12)).repeat_interleave(4, 0), draw((16, 20))
    starts = torch.tensor([0, 3, 5, 1]).repeat_interleave(4)
    ends = torch.randint(1, 21, (16,), generator=generator)
    place = torch.arange(20)
    mask = (place[None] < ends[:, None]).long()
    return {
        "prompt_ids": prompts,
        "prompt_mask": (torch.arange(12)[None] >= starts[:, None]).long(),
        "completion_ids": completions,
        "completion_mask": mask,
        "num_items_in_batch": mask.sum(),
    }


def gradients(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: one.grad.clone() for name, one in trainer.model.named_parameters() if one.grad is not None}


def step(trainer: Any, inputs: dict) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of one step over the rows."""
    trainer.model.train()
    trainer.model.zero_grad()
    trainer.current_gradient_accumulation_steps = 1
    loss = trainer.compute_loss(trainer.model, inputs)
    trainer.accelerator.backward(loss)
    return loss.item(), gradients(trainer)


def divergence_of_logits(trainer: Any, inputs: dict) -> float:
    """The mean reverse KL of the student's logits from the teacher's, over the tokens of completions."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    with torch.no_grad():
        ours = trainer.model(input_ids=ids, attention_mask=mask).logits[:, 11:-1].double()
        with trainer.policy_step.teacher.of(trainer.model) as teacher:
            theirs = teacher(input_ids=ids, attention_mask=mask).logits[:, 11:-1].double()
    return direct(ours, theirs, "reverse_kl", 1.0)[inputs["completion_mask"].bool()].mean().item()


def test_a_step_s_loss_is_the_mean_divergence_of_the_models_own_logits(taught):
    inputs = rows(taught)
    loss, _ = step(taught, inputs)
    assert loss == pytest.approx(divergence_of_logits(taught, inputs), rel=1e-4) and loss > 0.01
    assert taught._metrics["train"]["divergence"][-1] == pytest.approx(loss, rel=1e-5)


def test_padded_rows_have_the_positions_of_packed_ones(taught):
    inputs = rows(taught)
    given = taught.policy_step.batch(taught.model, inputs).inputs
    for positions, real in zip(given["position_ids"], given["attention_mask"].bool(), strict=True):
        assert positions[real].tolist() == list(range(int(real.sum())))


def test_packed_micro_batches_give_the_loss_and_the_gradients_of_padded_rows(taught, packed):
    loss, wanted = step(taught, rows(taught))
    inputs = rows(packed)
    assert len(packed.policy_step.plan(inputs)) > 1
    found, grads = step(packed, inputs)
    assert found == pytest.approx(loss, rel=1e-5)
    assert grads.keys() == wanted.keys() and any(one.abs().max() > 1e-4 for one in wanted.values())
    for name, value in wanted.items():
        assert torch.allclose(grads[name], value, rtol=1e-4, atol=1e-7), name


def test_the_teacher_with_an_adapter_of_another_rank_is_that_adapter_on_the_base(taught, another, tiny_model_dir):
    from peft import PeftModel

    from kit.weights.frozen_base import load_nf4

    alone = PeftModel.from_pretrained(load_nf4(tiny_model_dir, dtype="float32"), another).eval()
    ids = rows(taught)["completion_ids"]
    with torch.no_grad():
        wanted = alone(input_ids=ids).logits
        with taught.policy_step.teacher.of(taught.model) as teacher:
            found = teacher(input_ids=ids).logits
        student = taught.model(input_ids=ids).logits
    assert torch.allclose(found, wanted, atol=1e-5)
    assert (student - wanted).abs().max() > 0.1


def test_a_teacher_s_pass_leaves_the_student_as_it_was(taught):
    before = {name: (one.data_ptr(), one.requires_grad) for name, one in taught.model.named_parameters()}
    ids = rows(taught)["completion_ids"]
    with torch.no_grad():
        first = taught.model(input_ids=ids).logits
    taught.model.zero_grad()
    with torch.no_grad(), taught.policy_step.teacher.of(taught.model) as teacher:
        teacher(input_ids=ids)
    after = {name: (one.data_ptr(), one.requires_grad) for name, one in taught.model.named_parameters()}
    assert after == before and not gradients(taught)
    with torch.no_grad():
        assert torch.equal(taught.model(input_ids=ids).logits, first)


def test_autocast_mixes_no_weight_of_the_teacher_with_the_student_s(build, tmp_path):
    """It keeps casts by parameter, and student and teacher take turns in the same ones, micro-batch by micro-batch."""
    own = {"distill.teacher": "base", "policy.init_adapter": "none", "model.dtype": "bfloat16"}
    other = build_random(build, own)
    shift(other.model, seed=1, size=0.2)
    adapter = publish_adapter(other.model, tmp_path / "v000001", 1, other.policy.base_hash)
    trainer = build({"distill.teacher_adapter": adapter, "model.dtype": "bfloat16", **PACKED})
    shift(trainer.model, seed=2, size=0.2)
    inputs = rows(trainer)
    assert len(trainer.policy_step.plan(inputs)) > 1
    with trainer.accelerator.autocast():  # one for all micro-batches: casts are released where the outermost ends
        loss, grads = step(trainer, inputs)
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    with trainer.accelerator.autocast(), torch.no_grad(), trainer.policy_step.teacher.of(trainer.model) as teacher:
        theirs = teacher(input_ids=ids, attention_mask=mask).logits[:, 11:-1].double()
    trainer.model.zero_grad()
    with trainer.accelerator.autocast():
        ours = trainer.model(input_ids=ids, attention_mask=mask).logits[:, 11:-1].double()
    wanted = direct(ours, theirs, "reverse_kl", 1.0)[inputs["completion_mask"].bool()].mean()
    wanted.backward()
    assert loss == pytest.approx(wanted.item(), rel=0.02) and loss > 0.01
    for name, value in gradients(trainer).items():
        assert (grads[name] - value).norm() < 0.1 * value.norm(), name


def test_no_gradient_reaches_the_teacher(taught):
    inputs = rows(taught)
    _, grads = step(taught, inputs)
    weights = taught.policy_step.teacher._weights.values()
    assert not any(value.requires_grad or value.grad is not None for value in weights)
    assert all("lora_" in name for name in grads)
    # The same target by hand: the gradient is that of a constant.
    taught.model.zero_grad()
    batch = taught.policy_step.batch(taught.model, inputs)
    with torch.no_grad(), taught.policy_step.teacher.of(taught.model) as teacher:
        target, head = last_states(teacher, batch).clone(), Head.of(teacher)
    base = taught.model.get_base_model()
    each, _ = divergence(last_states(base, batch), Head.of(base), target, head, 1.0, 1.0)
    each.mean().backward()
    for name, value in gradients(taught).items():
        assert torch.allclose(value, grads[name], rtol=1e-4, atol=1e-8), name


def test_the_sampler_s_log_probs_are_compared_with_the_student_s_own(taught, packed):
    for trainer in (taught, packed):
        inputs = rows(trainer)
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        with torch.no_grad():
            logits = trainer.model(input_ids=ids, attention_mask=mask).logits[:, 11:-1]
        own = logits.log_softmax(-1).gather(2, inputs["completion_ids"][..., None]).squeeze(2)
        inputs["sampling_per_token_logps"] = own * inputs["completion_mask"]
        step(trainer, inputs)
        assert trainer.figures.values["sampler_delta_max"] < 1e-4 and trainer.figures.values["sampler_k3"] < 1e-8
        inputs["sampling_per_token_logps"] = own + 0.1
        step(trainer, inputs)
        assert trainer.figures.values["sampler_delta_mean"] == pytest.approx(0.1, rel=1e-3)
        assert "sampling_per_token_logps" not in inputs
    trainer.figures.values.clear()


def part(trainer: Any, inputs: dict, rows: list[int]) -> torch.Tensor:
    """The part of some rows in the loss of a step of all."""
    tokens = inputs["num_items_in_batch"]
    return trainer.policy_step.loss_of_rows(trainer.model, take_rows(inputs, rows), 16, tokens)


def test_the_parts_of_a_step_add_up_and_rows_without_a_token_count_nothing(taught):
    inputs = rows(taught)
    whole, _ = step(taught, inputs)
    found = [part(taught, inputs, some) for some in ([3, 9], [0, 1, 2, *range(4, 9)], [*range(10, 16)])]
    empty = inputs | {"completion_mask": inputs["completion_mask"] * 0}
    found.append(nothing := part(taught, empty, [5, 6]))
    taught.policy_step._report()
    assert nothing.item() == 0.0 and sum(found).item() == pytest.approx(whole, rel=1e-5)
    taught.model.zero_grad()
    nothing.backward()  # every process takes part in the exchange of gradients
    assert not any(one.abs().max() for one in gradients(taught).values())


@pytest.fixture(scope="module")
def quantized(build, another):
    """Weights and inputs in NVFP4, with input ranges."""
    from kit.policy.quantized_linear import load_quantizer_state, quantized_layers

    trainer = build({"distill.teacher_adapter": another, "policy.quant_cfg": "nvfp4", "policy.quant_calib_size": 8})
    shift(trainer.model, seed=2)
    names = [plain_name(name) for name in quantized_layers(trainer.model)]
    load_quantizer_state(trainer.model, {f"{name}.input_amax": torch.tensor(3.0 + n) for n, name in enumerate(names)})
    return trainer


def test_the_teacher_of_a_quantized_student_is_not_quantized_and_leaves_its_quantizers_alone(quantized, taught):
    before, watched = quantizer_state(quantized.model), quantizers_of(quantized.model)
    ids = rows(quantized)["completion_ids"]
    with torch.no_grad():
        student = quantized.model(input_ids=ids).logits
        with quantized.policy_step.teacher.of(quantized.model) as teacher:
            assert not watched.is_on
            found = teacher(input_ids=ids).logits
        with taught.policy_step.teacher.of(taught.model) as teacher:
            wanted = teacher(input_ids=ids).logits
        assert torch.equal(found, wanted)
        assert watched.is_on and torch.equal(quantized.model(input_ids=ids).logits, student)
        assert (student - taught.model(input_ids=ids).logits).abs().max() > 0.05  # the quantizers do something
    after = quantizer_state(quantized.model)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_a_quantized_student_learns_from_the_divergence_of_its_quantized_logits(quantized):
    inputs = rows(quantized)
    loss, grads = step(quantized, inputs)
    assert loss == pytest.approx(divergence_of_logits(quantized, inputs), rel=1e-4)
    assert any(one.abs().max() > 1e-5 for one in grads.values())


class Replicas:
    """A sampler of five ids a prompt, each with the same log-prob."""

    def __init__(self, logprob: float):
        self.logprob = logprob

    def generate(self, policy: Any, prompt_ids: list[list[int]], group: int | None = None) -> Rollouts:
        ids = [[5 + (row + place) % 11 for place in range(5)] for row in range(len(prompt_ids))]
        report = Report({"canary_delta": 0.01, "canary_k3": 1e-4}, {})
        return Rollouts(ids, [[self.logprob] * 5 for _ in ids], policy.version, report)


ACCUMULATED = {key: value for key, value in PACKED.items() if key != "train.micro_batch_tokens"}


@pytest.mark.parametrize("changes", [{}, ACCUMULATED, PACKED], ids=["padded", "accumulated", "packed"])
def test_a_run_with_servers_records_how_far_they_are_from_the_student(build, another, changes, read_jsonl):
    keys = {"distill.teacher_adapter": another, "train.max_steps": 2, "rollout.max_sampler_k3": 1e6}
    trainer = build({**keys, **changes})
    trainer.sampler = Replicas(-5.5)
    trainer.train_run(resume=False)
    for row in read_jsonl(trainer.run.metrics_file):
        assert 0 < row["sampler_k3"] < 1 and 0 < row["effective_sample_size"] <= 1 and row["canary_k3"] == 1e-4
        assert row["corrected_token_fraction"] is None and row["divergence"] > 0
        assert row["loss"] == pytest.approx(row["divergence"], rel=1e-4)


def test_a_server_that_is_not_the_student_stops_the_run(build, another, read_jsonl):
    trainer = build({"distill.teacher_adapter": another, "rollout.max_sampler_k3": 1e-6})
    trainer.sampler = Replicas(-5.0)
    with pytest.raises(CheckFailed, match="step 1: the sampler is not the policy"):
        trainer.train_run(resume=False)
    assert read_jsonl(trainer.run.metrics_file)[0]["sampler_k3"] > 1e-6


def config(**keys: Any) -> Any:
    given = {"distill.teacher": "base", "policy.quant_cfg": "nvfp4a16", **keys}
    return load_config(CONFIG, [f"--{key}={value}" for key, value in given.items()])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"distill.teacher": "Qwen/Qwen3-4B", "distill.teacher_adapter": "a"}, "an adapter belongs to the student's"),
        ({"distill.divergence": "js", "distill.js_beta": 1}, "distill.js_beta .1.0. must be between 0 and 1"),
        ({"distill.js_beta": 0.3}, "js_beta needs distill.divergence js, which is reverse_kl"),
        ({"distill.temperature": 0}, "distill.temperature .0.0. must be a number above 0"),
        ({"distill.chunk_tokens": 8192}, "distill.chunk_tokens .8192. must be from 1 to 4096"),
        ({"distill.teacher_revision": "main"}, "teacher_revision is for another model"),
        ({"policy.lora_dropout": 0.1}, "student and teacher would differ by the dropout"),
        ({"policy.quant_cfg": "null"}, "both are the base and policy.quant_cfg is not set"),
        (
            {"policy.quant_cfg": "null", "policy.init_adapter": "runs/a", "distill.teacher_adapter": "./runs/a"},
            "both start from runs/a",
        ),
    ],
)
def test_what_is_no_distillation_is_refused_with_the_reason(keys, message):
    import re

    made = config(**keys)
    found = [*limit_faults(made), *faults(made)]
    assert len(found) == 1 and re.search(message, found[0]), found


def test_an_unknown_divergence_is_refused():
    with pytest.raises(BadInput, match="divergence must be one of reverse_kl, forward_kl, js"):
        config(**{"distill.divergence": "kl"})


def test_keys_of_grpo_s_loss_are_set_aside_and_named():
    given = config(**{"train.beta": 0.02, "train.loss_type": "grpo", "train.epsilon_high": 0.28})
    said = "math, measured and not learned from; without effect: train.loss_type, train.beta, train.epsilon_high"
    assert without_effect(given) == said
    used = settled(given)
    assert (used.train.beta, used.train.loss_type, used.rollout.correction) == (0.0, "dapo", "none")
    assert (given.train.beta, given.rollout.correction) == (0.02, "token_truncate")  # config.json says what was given
