"""The losses against TRL's own code and against formulas written out in float64: value, gradient and every figure."""

import math
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from trl import GRPOTrainer

from kit.train.loss import (
    LOSSES,
    LossInputs,
    LossSettings,
    clipped_loss,
    compute_loss,
    entropy_threshold,
    measure_loss,
    near_policy,
)
from tests.unit.test_mismatch import MODES, ratios_of_trl

ROWS, WIDTH, LONGEST, ACCUMULATED, PROCESSES = 6, 9, 12, 2, 2
CORRECTIONS = ("none", *MODES)
LEVELS = ("token", "sequence")
TOLERANCE = {"rel": 1e-6, "abs": 1e-7}


class Accelerator:
    """One of `PROCESSES` equal processes."""

    sync_gradients, num_processes = True, PROCESSES

    def reduce(self, tensor, reduction):
        return tensor * PROCESSES if reduction == "sum" else tensor

    def gather(self, tensor):
        return torch.cat([tensor.reshape(-1)] * PROCESSES)

    def pad_across_processes(self, tensor, dim, pad_index):
        return tensor


def micro_batch(kind: str = "plain", seed: int = 0, dtype=torch.float32) -> dict:
    """Rows of a policy that moved since they were sampled, in TRL's names and with the log-probs it would compute."""
    draw = torch.Generator().manual_seed(seed)

    def noise(spread: float) -> torch.Tensor:
        return spread * torch.randn(ROWS, WIDTH, generator=draw, dtype=dtype)

    lengths = torch.tensor([9, 1, 4, 7, 2, 9])
    mask = (torch.arange(WIDTH) < lengths[:, None]).long()
    if kind == "truncated":
        mask[[0, 5]] = 0
    if kind == "nothing":
        mask[:] = 0
    old = -3 * torch.rand(ROWS, WIDTH, generator=draw, dtype=dtype)
    advantages = torch.randn(ROWS, generator=draw, dtype=dtype)
    if kind == "flat":
        advantages[:] = 0
    if kind == "nan advantage":
        advantages[2] = math.nan
    sampler = old + noise(0.4)
    if kind == "nan sampler":
        sampler[3, 1] = sampler[0, 0] = math.nan
    return {  # padding has numbers too, which must not count
        "logps": old + noise(0.3),
        "entropies": torch.rand(ROWS, WIDTH, generator=draw, dtype=dtype),
        "old_per_token_logps": old,
        "ref_per_token_logps": old + noise(0.5),
        "sampling_per_token_logps": sampler,
        "advantages": advantages,
        "completion_mask": mask,
        # Counts the rows of both processes and all accumulation steps.
        "num_items_in_batch": mask.sum() * PROCESSES * ACCUMULATED,
    }


def ours(batch: dict, settings: LossSettings) -> tuple[float, torch.Tensor, dict[str, float]]:
    """Loss, gradient with respect to log-probs and entropies, and figures."""
    logps, entropies = (batch[name].clone().requires_grad_() for name in ("logps", "entropies"))
    mask, threshold = batch["completion_mask"], None
    if settings.top_entropy_quantile < 1:
        everywhere = torch.cat([entropies.detach()[mask.bool()]] * PROCESSES)
        threshold = entropy_threshold(everywhere, settings.top_entropy_quantile)
    inputs = LossInputs(
        logps=logps,
        entropies=entropies,
        old_logps=batch["old_per_token_logps"],
        advantages=batch["advantages"],
        mask=mask,
        ref_logps=batch["ref_per_token_logps"] if settings.beta else None,
        sampler_logps=batch["sampling_per_token_logps"] if settings.correction != "none" else None,
        step_rows=len(mask) * ACCUMULATED,
        step_tokens=batch["num_items_in_batch"].clamp(min=1.0) / PROCESSES,
        entropy_threshold=threshold,
    )
    loss, figures = compute_loss(inputs, settings)
    return loss.item(), gradient(loss, logps, entropies), figures.read()


def gradient(loss: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
    found = torch.autograd.grad(loss, tensors, allow_unused=True)
    return torch.stack([torch.zeros_like(tensors[0]) if part is None else part for part in found])


def trls(batch: dict, settings: LossSettings) -> tuple[float, torch.Tensor, dict[str, float]]:
    """The same by `GRPOTrainer._compute_loss`."""
    logps, entropies = (batch[name].clone().requires_grad_() for name in ("logps", "entropies"))
    is_corrected = settings.correction != "none"
    inputs = {key: value for key, value in batch.items() if key not in ("logps", "entropies")}
    inputs |= {
        "prompt_ids": torch.zeros(ROWS, 1),
        "prompt_mask": torch.ones(ROWS, 1),
        "completion_ids": torch.zeros(ROWS, WIDTH),
    }
    if is_corrected:
        inputs["importance_sampling_ratio"] = ratios_of_trl(
            *(batch["old_per_token_logps"], batch["sampling_per_token_logps"], batch["completion_mask"]),
            *(settings.correction, settings.correction_cap, settings.correction_floor),
        )
    else:
        del inputs["sampling_per_token_logps"]
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (logps, entropies, None),
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        accelerator=Accelerator(),
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(
            delta=settings.delta,
            use_bias_correction_kl=settings.bias_corrected_kl,
            steps_per_generation=ACCUMULATED,
            sapo_temperature_pos=settings.sapo_temperature_pos,
            sapo_temperature_neg=settings.sapo_temperature_neg,
        ),
        aux_loss_enabled=False,
        use_adaptive_entropy=False,
        _entropy_bonus_enabled=settings.entropy_coef != 0,
        use_vllm=is_corrected,
        vllm_importance_sampling_correction=is_corrected,
        current_gradient_accumulation_steps=ACCUMULATED,
        epsilon_low=settings.epsilon,
        off_policy_mask_threshold=settings.off_policy_threshold,
        _metrics={"train": defaultdict(list)},
        **{
            name: getattr(settings, name)
            for name in (
                *("loss_type", "beta", "epsilon_high", "importance_sampling_level", "top_entropy_quantile"),
                *("entropy_coef", "max_completion_length"),
            )
        },
    )
    trainer.get_high_entropy_mask = GRPOTrainer.get_high_entropy_mask.__get__(trainer)
    loss = GRPOTrainer._compute_loss(trainer, trainer.model, inputs)
    figures = {name: value for name, (value,) in trainer._metrics["train"].items()}
    figures.pop("entropy_coef", None)  # the step logs it, it is no figure of a batch
    return loss.item(), gradient(loss, logps, entropies), figures


def assert_as_trl(batch: dict, settings: LossSettings) -> None:
    found, wanted = ours(batch, settings), trls(batch, settings)
    if settings.entropy_coef and settings.loss_type in ("dapo", "cispo"):
        wanted[2]["policy_loss"] *= ACCUMULATED  # TRL's mean over accumulation steps is a part of the step's loss
    assert found[0] == pytest.approx(wanted[0], nan_ok=True, **TOLERANCE)
    torch.testing.assert_close(found[1], wanted[1], rtol=1e-6, atol=1e-7, equal_nan=True)
    assert found[2] == pytest.approx(wanted[2], nan_ok=True, **TOLERANCE)


def settings_of(loss_type: str, **changes) -> LossSettings:
    facts = {
        "epsilon_high": 1.1 if loss_type == "cispo" else 0.28,
        "max_completion_length": LONGEST,
        "correction_cap": 1.3,
    }
    return LossSettings(loss_type=loss_type, **(facts | changes))


KINDS = ("plain", "flat", "truncated", "nan advantage", "nan sampler", "nothing")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("loss_type", LOSSES)
def test_loss_gradient_and_figures_are_trls(loss_type, correction, kind):
    for level in LEVELS:
        for beta in (0.0, 0.05):
            settings = settings_of(loss_type, correction=correction, importance_sampling_level=level, beta=beta)
            assert_as_trl(micro_batch(kind), settings)


OPTIONS = [
    {"delta": 1.35},
    {"delta": 1.1},  # below the upper clip
    {"bias_corrected_kl": True, "beta": 0.05},
    {"off_policy_threshold": 0.05},
    {"off_policy_threshold": 0.05, "correction": "token_truncate"},
    {"top_entropy_quantile": 0.3},
    {"top_entropy_quantile": 0.3, "entropy_coef": 0.02},
    {"entropy_coef": 0.02},
    {"correction": "token_truncate", "correction_floor": 0.8},
    {"correction": "sequence_mask", "correction_floor": 0.8},
    {"epsilon": 0.05, "epsilon_high": 0.4},
    {"sapo_temperature_pos": 2.0, "sapo_temperature_neg": 5.0},
    {
        **{"delta": 1.35, "bias_corrected_kl": True, "beta": 0.05, "off_policy_threshold": 0.05},
        **{"top_entropy_quantile": 0.3, "entropy_coef": 0.02, "correction": "token_mask", "correction_floor": 0.5},
    },
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("loss_type", LOSSES)
def test_every_option_of_trl_does_what_it_does_there(loss_type, options):
    if loss_type in ("cispo", "sapo"):  # they have no third bound; test_checks.py: it is refused
        options = {name: value for name, value in options.items() if name != "delta"}
    for kind in ("plain", "truncated", "nan sampler", "nothing"):
        for level in LEVELS:
            settings = settings_of(loss_type, importance_sampling_level=level, **options)
            assert_as_trl(micro_batch(kind), settings)
            if kind == "plain":
                without = replace(settings_of(loss_type), importance_sampling_level=level)
                changed = ours(micro_batch(), settings)[0] != ours(micro_batch(), without)[0]
                is_read = loss_type == "sapo" if "sapo_temperature_pos" in options else settings != without
                is_read &= not (options.keys() <= {"epsilon", "epsilon_high"} and loss_type == "sapo")
                assert changed == is_read or settings.delta, "the option makes a difference where it is read"


def by_hand(batch: dict, settings: LossSettings) -> float:
    """The loss of a step of these rows alone, token by token."""
    lengths = batch["completion_mask"].sum(dim=1).tolist()
    values = {key: value.tolist() for key, value in batch.items()}
    rows = []
    for row, length in enumerate(lengths):
        advantage, each = values["advantages"][row], []
        new, old = values["logps"][row][:length], values["old_per_token_logps"][row][:length]
        mean = sum(a - b for a, b in zip(new, old, strict=True)) / max(length, 1)
        # The log ratios of CISPO's weights, which have no gradient: they stay when a log-prob is pushed.
        held = [a - b for a, b in zip(values["held_logps"][row], old, strict=False)]
        held_mean = sum(held[:length]) / max(length, 1)
        for token in range(length):
            is_token = settings.importance_sampling_level == "token"
            ratio = math.exp(new[token] - old[token] if is_token else mean)
            clipped = min(max(ratio, 1 - settings.epsilon), 1 + settings.epsilon_high)
            correction = math.exp(old[token] - values["sampling_per_token_logps"][row][token])
            loss = -min(ratio * advantage, clipped * advantage)
            if settings.loss_type == "cispo":
                loss = -min(math.exp(held[token] if is_token else held_mean), settings.epsilon_high)
                loss *= advantage * new[token]
            if settings.loss_type == "sapo":
                sharp = settings.sapo_temperature_pos if advantage > 0 else settings.sapo_temperature_neg
                loss = -4 / sharp / (1 + math.exp(-sharp * (ratio - 1))) * advantage
            loss *= min(correction, settings.correction_cap)
            off = values["ref_per_token_logps"][row][token] - new[token]
            each.append(loss + settings.beta * (math.exp(off) - off - 1))
        rows.append(each)
    if settings.loss_type == "dr_grpo":
        return sum(map(sum, rows)) / (len(rows) * settings.max_completion_length)
    if settings.loss_type in ("dapo", "cispo"):
        return sum(map(sum, rows)) / sum(lengths)
    return sum(sum(each) / max(len(each), 1) for each in rows) / len(rows)


@pytest.mark.parametrize("kind", ["plain", "truncated"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSSES)
def test_the_loss_is_the_papers_formula_in_float64(loss_type, level, kind):
    batch = micro_batch(kind, dtype=torch.float64)
    batch["held_logps"] = batch["logps"]
    settings = settings_of(loss_type, importance_sampling_level=level, beta=0.05, correction="token_truncate")
    inputs = to_inputs(batch, settings)
    loss = compute_loss(inputs, settings)[0]
    assert loss.item() == pytest.approx(by_hand(batch, settings), rel=1e-12)
    pushed = {**batch, "logps": batch["logps"].clone()}
    pushed["logps"][3, 2] += 1e-6
    slope = (by_hand(pushed, settings) - by_hand(batch, settings)) / 1e-6
    assert torch.autograd.grad(loss, inputs.logps)[0][3, 2].item() == pytest.approx(slope, rel=1e-4, abs=1e-9)


def to_inputs(batch: dict, settings: LossSettings, rows: slice = slice(None)) -> LossInputs:
    """A micro-batch of some rows of a step that has all of them, in one process."""
    return LossInputs(
        logps=batch["logps"][rows].clone().requires_grad_(),
        entropies=batch["entropies"][rows],
        old_logps=batch["old_per_token_logps"][rows],
        advantages=batch["advantages"][rows],
        mask=batch["completion_mask"][rows],
        ref_logps=batch["ref_per_token_logps"][rows],
        sampler_logps=batch["sampling_per_token_logps"][rows],
        step_rows=ROWS,
        step_tokens=batch["completion_mask"].sum(),
    )


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSSES)
def test_micro_batches_add_up_to_the_step(loss_type, level):
    batch = micro_batch("truncated")
    options = {"beta": 0.05, "correction": "token_mask", "entropy_coef": 0.02}
    settings = settings_of(loss_type, importance_sampling_level=level, **options)
    whole, figures = compute_loss(to_inputs(batch, settings), settings)
    parts = [to_inputs(batch, settings, rows) for rows in (slice(0, 1), slice(1, 2), slice(2, 6))]
    losses, each = zip(*(compute_loss(part, settings) for part in parts), strict=True)
    assert sum(losses).item() == pytest.approx(whole.item(), rel=1e-5)
    assert (each[0] + each[1] + each[2]).read() == pytest.approx(figures.read(), rel=1e-5)
    if loss_type not in ("cispo", "sapo"):
        assert math.isnan(each[0].read()["clip_ratio/low_min"]) == (level == "token"), "a row that is left out"
        assert not math.isnan(figures.read()["clip_ratio/low_min"])


def test_a_policy_that_has_not_moved_has_no_kl_and_no_clipped_token():
    batch = micro_batch()
    batch["ref_per_token_logps"] = batch["old_per_token_logps"] = batch["logps"]
    settings = settings_of("dr_grpo", beta=0.05)
    found = measure_loss(to_inputs(batch, settings), settings).read()
    assert {name for name, value in found.items() if value} == {"entropy"} and found["kl"] == 0.0


@pytest.mark.parametrize(("distance", "is_near"), [(0.04, True), (0.06, False), (-0.5, True)])
def test_a_sequence_is_near_by_the_tokens_that_a_sampler_scored(distance, is_near):
    batch, settings = micro_batch(), settings_of("dr_grpo")
    batch["advantages"] = torch.tensor([-1.0, 1.0, 0.0, -1.0, -1.0, -1.0])
    batch["sampling_per_token_logps"] = batch["logps"] + distance
    batch["sampling_per_token_logps"][3, 1] = math.nan
    found = near_policy(to_inputs(batch, settings), threshold=0.05)
    assert found.flatten().tolist() == [is_near, True, True, is_near, is_near, is_near]


def test_tokens_that_are_left_out_have_no_gradient():
    batch = micro_batch("truncated")
    for loss_type in LOSSES:
        settings = settings_of(loss_type, beta=0.05, correction="sequence_truncate")
        found = ours(batch, settings)[1][0]
        assert not found[batch["completion_mask"] == 0].any() and found.any()


def test_the_sign_of_a_step_raises_what_was_better_than_its_group():
    batch = micro_batch()
    batch["logps"] = batch["old_per_token_logps"]
    settings = settings_of("dr_grpo")
    found = ours(batch, settings)[1][0]
    seen = batch["completion_mask"].bool()
    assert torch.equal((found < 0)[seen], (batch["advantages"] > 0)[:, None].expand_as(seen)[seen])


@pytest.mark.parametrize("loss_type", LOSSES)
def test_no_loss_waits_for_the_device(loss_type):
    # A meta tensor has no numbers to read: `.item()`, a boolean index or `nonzero` raises.
    options = {"delta": 1.35, "bias_corrected_kl": True, "beta": 0.05, "off_policy_threshold": 0.05}
    options |= {"entropy_coef": 0.02, "top_entropy_quantile": 0.3, "correction": "sequence_mask"}
    for level in LEVELS:
        settings = settings_of(loss_type, importance_sampling_level=level, **options)
        inputs = to_inputs({key: value.to("meta") for key, value in micro_batch().items()}, settings)
        inputs = replace(inputs, entropy_threshold=torch.tensor(0.5, device="meta"))
        loss, figures = compute_loss(inputs, settings)
        loss.backward()
        assert loss.is_meta and (figures + figures).totals.is_meta
        with pytest.raises(Exception, match="meta tensor"):
            figures.read()


def test_a_loss_of_ones_own_replaces_the_formula_and_its_figures_are_averaged():
    batch, settings = micro_batch(), settings_of("dr_grpo", beta=0.05)
    inputs = to_inputs(batch, settings)

    def own(inputs: LossInputs, settings: LossSettings) -> tuple:
        each = clipped_loss(inputs, settings)
        return (each * inputs.mask).sum(), {"by_token": each, "by_row": inputs.advantages}

    loss, figures = compute_loss(inputs, settings, own)
    each = clipped_loss(inputs, settings)[inputs.mask.bool()]
    assert loss.item() == pytest.approx(each.sum().item())
    found = figures.read()
    assert found["by_token"] == pytest.approx(each.mean().item(), rel=1e-5)
    assert found["by_row"] == pytest.approx(inputs.advantages.mean().item(), rel=1e-5)
    plain = compute_loss(inputs, settings)[1]
    assert found.keys() - {"by_token", "by_row"} == plain.read().keys()
    with pytest.raises(ValueError, match="different metrics: by_"):
        figures + plain
