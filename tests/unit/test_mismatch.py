"""The sampler's distance from the policy, and what the correction does with it, against trl's own formula."""

import inspect
import math
import re

import pytest
import torch
from trl import GRPOTrainer

from kit.train.mismatch import KEYS, importance_ratio, measure

MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def batch(rows: int = 40, width: int = 30, spread: float = 0.5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Policy, sampler and a mask of completions of different lengths, one of them empty."""
    torch.manual_seed(0)
    sampler = -torch.rand(rows, width) * 3
    policy = sampler + spread * torch.randn(rows, width)
    lengths = torch.randint(1, width + 1, (rows, 1))
    lengths[3] = 0
    return policy, sampler, torch.arange(width) < lengths


def ratios_of_trl(policy, sampler, mask, mode: str, clip_max: float, clip_min: float | None) -> torch.Tensor:
    """trl 1.16's own lines, cut out of `_generate_and_score_completions`."""
    source = inspect.getsource(GRPOTrainer._generate_and_score_completions)
    start = source.index("per_token_logps_diff = (old_per_token_logps - sampling_per_token_logps) * mask")
    end = source.index("else:\n                    raise ValueError(", start)
    lines = source[source.rindex("\n", 0, start) + 1 : end].rstrip()
    code = inspect.cleandoc(lines.replace("\n" + " " * 16, "\n"))
    trainer = type("Trainer", (), {})()
    trainer.vllm_importance_sampling_mode = mode
    trainer.vllm_importance_sampling_clip_max, trainer.vllm_importance_sampling_clip_min = clip_max, clip_min
    values = {"old_per_token_logps": policy, "sampling_per_token_logps": sampler, "mask": mask, "self": trainer}
    exec(code, {"torch": torch, "math": math}, values)
    return values["vllm_importance_sampling_ratio"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("floor", [None, 0.5])
@pytest.mark.parametrize("nan", [False, True])
def test_the_corrected_shares_are_those_of_trl(mode, floor, nan):
    policy, sampler, mask = batch()
    policy, sampler = policy.double(), sampler.double()
    if nan:
        sampler[0, 0] = torch.nan
    free = ratios_of_trl(policy, sampler, mask, mode.replace("mask", "truncate"), math.inf, None)
    capped = ratios_of_trl(policy, sampler, mask, mode, 1.5, floor)
    changed = ((free != capped) & mask).float()
    figures = measure(policy, sampler, mask, mode, 1.5, floor)
    assert figures["corrected_token_fraction"] == pytest.approx((changed.sum() / mask.sum()).item())
    expected = changed.any(dim=1).sum() / mask.any(dim=1).sum()
    assert figures["corrected_sequence_fraction"] == pytest.approx(expected.item())
    assert 0 < figures["corrected_token_fraction"] < 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("floor", [None, 0.5])
@pytest.mark.parametrize("value", [0.0, math.nan, math.inf, -math.inf])
def test_the_importance_ratio_is_that_of_trl(mode, floor, value):
    policy, sampler, mask = batch()
    sampler[0, 0] += value
    expected = ratios_of_trl(policy, sampler, mask, mode, 1.5, floor)
    assert torch.equal(importance_ratio(policy, sampler, mask, mode, 1.5, floor), expected)
    assert expected.isfinite().all()


def test_the_figures_are_those_of_the_formulas():
    policy, sampler, mask = batch()
    d = (policy - sampler)[mask].double()
    figures = measure(policy, sampler, mask, "token_truncate", 2.0)
    assert tuple(figures) == KEYS
    assert figures["sampler_k3"] == pytest.approx((d.exp() - 1 - d).mean().item())
    assert figures["effective_sample_size"] == pytest.approx(
        (d.exp().sum() ** 2 / (len(d) * d.exp().square().sum())).item()
    )
    assert figures["sampler_delta_mean"] == pytest.approx(d.abs().mean().item())
    assert figures["sampler_delta_max"] == pytest.approx(d.abs().max().item())
    for name, share in (("sampler_delta_p95", 0.95), ("sampler_delta_p99", 0.99)):
        assert (d.abs() <= figures[name]).double().mean() >= share > (d.abs() < figures[name]).double().mean()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("side", ["cap", "floor"])
def test_a_ratio_on_the_edge_is_not_corrected_as_in_trl(mode, side):
    _, sampler, mask = batch()
    edges = (1.0, 0.5) if side == "cap" else (2.0, 1.0)  # equal sides have the ratio 1 exactly
    expected = ratios_of_trl(sampler, sampler, mask, mode, *edges)
    assert (expected == 1).all() and torch.equal(importance_ratio(sampler, sampler, mask, mode, *edges), expected)
    assert measure(sampler, sampler, mask, mode, *edges)["corrected_token_fraction"] == 0


@pytest.mark.parametrize("size", [1e-2, 1e-3, 1e-4])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_small_mismatch_is_no_rounding(size, sign):
    # In float32 exp(d) - 1 - d of d = 1e-3 is off by a tenth, of 1e-4 it is anything.
    sampler = torch.zeros(4, 50)
    figures = measure(sampler + sign * size, sampler, torch.ones(4, 50), "token_truncate", 2.0)
    exact = math.expm1(sign * size) - sign * size
    assert figures["sampler_k3"] == pytest.approx(exact, rel=1e-3) and exact > 0
    assert figures["sampler_delta_mean"] == pytest.approx(size, rel=1e-4)


def test_what_half_precision_gives_is_compared_in_full():
    policy, sampler, mask = batch()
    half = [one.bfloat16() for one in (policy, sampler)]
    wanted = measure(*(one.double() for one in half), mask, "token_truncate", 2.0)
    assert measure(*half, mask, "token_truncate", 2.0) == pytest.approx(wanted)


def test_k3_estimates_the_divergence_of_the_sampler_from_the_policy():
    torch.manual_seed(0)
    sampler, policy = (torch.randn(50).log_softmax(0) for _ in range(2))
    tokens = torch.multinomial(sampler.exp(), 200_000, replacement=True)[None]
    exact = (sampler.exp() * (sampler - policy)).sum().item()
    figures = measure(policy[tokens], sampler[tokens], torch.ones_like(tokens), "none", 2.0)
    assert figures["sampler_k3"] == pytest.approx(exact, rel=0.03)


def test_equal_sides_have_no_mismatch():
    _, sampler, mask = batch()
    figures = measure(sampler, sampler, mask, "sequence_mask", 2.0)
    assert figures.pop("effective_sample_size") == pytest.approx(1.0)
    assert all(value == 0 for value in figures.values())


def test_without_a_correction_nothing_is_corrected():
    figures = measure(*batch(spread=3.0), "none", 2.0)
    assert figures["corrected_token_fraction"] == figures["corrected_sequence_fraction"] == 0


@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf])
def test_what_is_not_a_number_is_counted_and_left_out(value):
    policy, sampler, mask = batch()
    before = measure(policy, sampler, mask & (torch.arange(30) != 0), "token_truncate", 2.0)
    sampler[:, 0] = value
    figures = measure(policy, sampler, mask, "token_truncate", 2.0)
    assert figures["sampler_nan_count"] == mask[:, 0].sum() == 39
    assert figures["sampler_k3"] == pytest.approx(before["sampler_k3"])
    padding = sampler.clone().masked_fill(mask, -1.0).masked_fill(~mask, value)
    assert measure(policy, padding, mask, "none", 2.0)["sampler_nan_count"] == 0


def test_a_batch_without_a_token_has_no_figures():
    policy, sampler, mask = batch()
    figures = measure(policy, sampler, mask & False, "token_truncate", 2.0)
    assert figures.pop("sampler_nan_count") == 0
    assert set(figures.values()) == {None}


def test_trl_still_gives_a_token_without_a_log_prob_the_ratio_1():
    source = inspect.getsource(GRPOTrainer._generate_and_score_completions)
    assert re.search(r"torch\.nan_to_num\(per_token_logps_diff, nan=0\.0\)", source)
