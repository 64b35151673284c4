"""The parts of an update that need no model: flat groups, the limit on the sampler, the rows of micro-batches."""

import contextlib
import math
import random
from collections import defaultdict, deque
from types import SimpleNamespace

import pytest
import torch
from trl import GRPOTrainer

from kit.core.config.load import load_config
from kit.core.errors import CheckFailed
from kit.train.loss import LossSettings
from kit.train.mismatch import importance_ratio, measure
from kit.train.rows import keep_scores, take_rows
from kit.train.step import PolicyStep, StepTally
from tests.conftest import CONFIG

GROUP, NAN = 4, math.nan


class Step(PolicyStep, GRPOTrainer):
    pass


class Accelerator:
    """Process `index` of those whose tensors `others` has too, in their order; what it is handed is process 0's."""

    def __init__(self, index: int = 0, others: list | None = None):
        self.process_index, self.others, self.sync_gradients = index, others or [], True
        self.num_processes = 1 + len(self.others)

    def pad_across_processes(self, tensor, dim):
        longest = max([tensor.shape[dim], *(one.shape[dim] for one in self.others)])
        return pad(tensor, longest)

    def gather(self, tensor):
        return torch.cat([tensor, *(pad(one, len(tensor)) for one in self.others)])


def pad(tensor: torch.Tensor, length: int) -> torch.Tensor:
    return torch.cat([tensor, tensor.new_zeros(length - len(tensor), *tensor.shape[1:])])


def update(*changes: str, **attributes):
    """An update without a trainer."""
    made = PolicyStep.__new__(PolicyStep)
    facts = {
        "config": load_config(CONFIG, list(changes)),
        "accelerator": Accelerator(),
        "num_generations": GROUP,
        "reward_weights": torch.ones(1),
        "_dropouts": [],
        "multi_objective_aggregation": "sum_then_normalize",
        "args": SimpleNamespace(vllm_importance_sampling_clip_min=None, steps_per_generation=1),
        "state": SimpleNamespace(global_step=6),
        "recorder": None,
        "_metrics": {"train": defaultdict(list)},
        "_sampler": {},
        "_tally": StepTally(),
        "loss_settings": LossSettings(),
        "current_gradient_accumulation_steps": 1,
        "_record": lambda logs, step: {"step": step},
    }
    for name, value in (facts | attributes).items():
        setattr(made, name, value)
    return made


# (weights, rewards of a group (4, functions), whether it has a spread in sums, whether in any function)
GROUPS = [
    ([1.0], [[1], [1], [1], [1]], False, False),
    ([1.0], [[0], [0], [0], [1]], True, True),
    ([1.0, 1.0], [[0, 1], [1, 0], [0, 1], [1, 0]], False, True),
    ([1.0, 2.0], [[0, 1], [1, 0], [0, 1], [1, 0]], True, True),
    ([1.0, 0.5], [[0, 1], [0.5, 0], [0, 1], [0.5, 0]], False, True),
    ([1.0, 0.5], [[0, 2], [1, 0], [1, 0], [0, 2]], False, True),
    ([1.0, -1.0], [[1, 1], [0, 0], [1, 1], [0, 0]], False, True),
    ([1.0, 0.0], [[1, 0], [1, 1], [1, 2], [1, 3]], False, False),  # one of weight 0 is only measured
    ([1.0, 1.0], [[1, 3], [1, 3], [1, 3], [1, 2]], True, True),
    ([1.0, 1.0], [[1, 3], [2, 3], [1, 3], [1, 3]], True, True),
    ([1.0, 1.0], [[NAN, NAN], [1, 1], [NAN, NAN], [1, 1]], False, False),
    ([1.0, 1.0], [[NAN, NAN], [1, 1], [1, 2], [1, 1]], True, True),
    ([1.0], [[NAN], [NAN], [NAN], [NAN]], True, True),  # has no reward, so it is not counted; trl's advantages are 0
    ([1.0], [[NAN], [-1], [NAN], [NAN]], False, False),
]


@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
@pytest.mark.parametrize(("weights", "rewards", "of_sums", "of_each"), GROUPS)
def test_a_group_is_flat_by_the_weighted_rewards_that_its_advantages_come_from(
    aggregation, weights, rewards, of_sums, of_each
):
    spread = of_sums if aggregation == "sum_then_normalize" else of_each
    known = torch.stack([torch.tensor([0.0, 1.0, 2.0, 3.0])] * len(weights), dim=1)  # a group with a spread
    made = update(
        reward_weights=torch.tensor(weights),
        multi_objective_aggregation=aggregation,
        _rewards=torch.cat([known, torch.tensor(rewards, dtype=torch.float32)]),
        _logs={"advantages": deque([0.5] * 8, maxlen=8)},
    )
    made._metrics["train"]["frac_reward_zero_std"].append(0.25)
    first_spread = aggregation != "sum_then_normalize" or sum(weights) != 0
    made._drop_flat_groups(output := {"advantages": torch.full((8,), 0.5)})
    wanted = [0.5 * first_spread] * 4 + [0.5 * spread] * 4
    assert output["advantages"].tolist() == list(made._logs["advantages"]) == wanted
    assert made._metrics["train"]["frac_reward_zero_std"] == [1 - (first_spread + spread) / 2]


@pytest.mark.parametrize("index", [0, 1, 2])
def test_every_process_drops_the_flat_groups_among_its_own_rows(index):
    flat, spread = [1.0] * GROUP, [0.0, 1.0, 0.0, 1.0]
    groups = [flat, spread, spread, flat, spread, spread]  # two a process
    made = update(
        accelerator=Accelerator(index, [None, None]),
        _rewards=torch.tensor(groups).view(-1, 1),
        _logs={"advantages": deque([0.5] * 24, maxlen=24)},
    )
    made._metrics["train"]["frac_reward_zero_std"] += [0.75, 0.0]
    made._drop_flat_groups(output := {"advantages": torch.full((8,), 0.5)})
    wanted = [0.0 if group is flat else 0.5 for group in groups for _ in range(GROUP)]
    assert output["advantages"].tolist() == wanted[8 * index : 8 * index + 8]
    assert list(made._logs["advantages"]) == wanted
    assert made._metrics["train"]["frac_reward_zero_std"] == [0.75, pytest.approx(1 / 3)]


def off_by(delta: float, rows: int = 3, width: int = 5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Policy, sampler and mask (rows, width); the policy differs by `delta` at every token."""
    sampler = -torch.rand(rows, width, generator=torch.Generator().manual_seed(0))
    return sampler + delta, sampler, torch.ones(rows, width)


@pytest.mark.parametrize("limit", [0.01, 0.5, 2.0])
@pytest.mark.parametrize(("share", "stops"), [(0.5, False), (0.98, False), (1.02, True), (2.0, True), (9.0, True)])
def test_the_limit_on_k3_is_the_configured_one(limit, share, stops):
    # k3 of a difference that is the same everywhere, solved for it.
    delta = 1.0
    for _ in range(60):
        delta -= (math.exp(delta) - 1 - delta - share * limit) / (math.exp(delta) - 1)
    kept = []
    made = update(f"--rollout.max_sampler_k3={limit}", recorder=SimpleNamespace(step=kept.append))
    if not stops:
        made._judge_sampler([off_by(delta)])
        assert made._sampler["sampler_k3"] == pytest.approx(share * limit, rel=1e-4) and not kept
        return
    with pytest.raises(CheckFailed, match=r"^step 7\b.* k3 "):
        made._judge_sampler([off_by(delta)])
    assert kept == [{"step": 7}] and made._sampler["sampler_k3"] == pytest.approx(share * limit, rel=1e-4)


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("value", [NAN, math.inf, -math.inf])
def test_one_log_prob_that_is_not_finite_stops_the_run_unless_it_is_padding(side, value):
    for mask_of, stops in ((1, True), (0, False)):
        made = update("--rollout.max_sampler_k3=1e6")
        tensors = off_by(0.1)
        tensors[2][1, 4] = mask_of
        tensors[side][1, 4] = value
        if not stops:
            made._judge_sampler([tensors])
        else:
            with pytest.raises(CheckFailed, match=r"^step 7\b.* k3 " if side == 0 else "1 log-probs of the sampler"):
                made._judge_sampler([tensors])


def test_nothing_is_said_of_a_step_without_a_sampler_and_accumulation_steps_are_judged_together():
    made = update("--rollout.max_sampler_k3=1e6")
    made._judge_sampler([])
    assert made._sampler == {} and not made._metrics["train"]
    made._judge_sampler([off_by(0.5), off_by(0.25)])
    assert made._sampler["sampler_delta_mean"] == pytest.approx(0.375)


@pytest.mark.parametrize("correction", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "none"])
@pytest.mark.parametrize("floor", [None, 0.8])
def test_the_figures_are_those_of_the_rows_of_all_processes_whatever_their_lengths(correction, floor):
    torch.manual_seed(0)
    parts = []
    for rows, width in ((3, 5), (3, 9), (3, 2)):
        sampler = -torch.rand(rows, width)
        mask = torch.rand(rows, width) < 0.8
        mask[:, 0] = True
        parts.append((sampler + 0.5 * torch.randn(rows, width), sampler, mask.float()))
    made = update(
        *("--rollout.max_sampler_k3=1e6", "--rollout.correction_cap=1.3", f"--rollout.correction={correction}"),
        accelerator=Accelerator(0, [torch.stack(one).transpose(0, 2).contiguous() for one in parts[1:]]),
        args=SimpleNamespace(vllm_importance_sampling_clip_min=floor),
    )
    made._judge_sampler([parts[0]])
    whole = [torch.cat([pad(one.T, 9).T for one in each]) for each in zip(*parts, strict=True)]
    assert made._sampler == pytest.approx(measure(*whole, correction, 1.3, floor))
    logged = {name: value for name, (value,) in made._metrics["train"].items()}
    assert logged["sampler/k3"] == made._sampler["sampler_k3"]
    assert logged["sampler/delta_p99"] == made._sampler["sampler_delta_p99"]
    name = "sampling/importance_sampling_ratio/"
    if correction == "none":
        assert not any(key.startswith(name) for key in logged)
        return
    ratio = importance_ratio(*whole, correction, 1.3, floor)
    ratio = ratio.flatten() if correction.startswith("sequence") else ratio[whole[2].bool()]
    wanted = {f"{name}min": ratio.min(), f"{name}mean": ratio.mean(), f"{name}max": ratio.max()}
    assert {key: value for key, value in logged.items() if key.startswith(name)} == pytest.approx(
        {key: value.item() for key, value in wanted.items()}
    )


def one_step(made, rows: dict, logps: torch.Tensor, entropies: torch.Tensor | None = None) -> torch.Tensor:
    """The loss of rows whose forward gives these log-probs."""
    made._score = lambda model, rows: (logps, torch.zeros_like(logps) if entropies is None else entropies)
    return made._loss_of_rows(None, rows, len(logps))


def rows_of(mask: torch.Tensor, **others: torch.Tensor) -> dict:
    return {"completion_mask": mask, "advantages": torch.ones(len(mask)), "num_items_in_batch": mask.sum(), **others}


def test_what_the_first_forward_gives_stays_with_the_rows_and_is_compared_once():
    policy, sampler, mask = off_by(0.5)
    settings = LossSettings(loss_type="dapo", correction="token_truncate", correction_cap=1.2)
    made = update("--rollout.max_sampler_k3=9", loss_settings=settings)
    rows = rows_of(mask, sampling_per_token_logps=sampler)
    assert one_step(made, rows, policy).item() == pytest.approx(-1.2), "the capped ratio of the sampler"
    assert torch.equal(rows["old_per_token_logps"], policy) and len(made._tally.compared) == 1
    # The policy moved: its ratio is clipped at 1.2, and the sampler is not compared with it.
    assert one_step(made, rows, policy + 1).item() == pytest.approx(-1.2 * 1.2)
    assert torch.equal(rows["old_per_token_logps"], policy) and len(made._tally.compared) == 1
    assert made._tally.figures.read()["clip_ratio/high_mean"] == pytest.approx(0.5), "of both"
    mask[1, 2], sampler[1, 2] = 0, -50.0  # left out of the loss
    made._judge_sampler(made._tally.compared)
    assert made._sampler["sampler_delta_max"] == pytest.approx(0.5)
    made._tally = StepTally()
    one_step(made, without := rows_of(mask), policy)
    assert not made._tally.compared and set(without) == {*rows_of(mask), "old_per_token_logps"}


@pytest.mark.parametrize(("processes", "steps", "accumulated"), [(1, 1, 1), (4, 1, 1), (1, 4, 4), (2, 4, 2)])
def test_a_token_of_dapo_weighs_by_those_of_a_whole_step(processes, steps, accumulated):
    policy, _, mask = off_by(0.5)
    made = update(
        accelerator=SimpleNamespace(num_processes=processes),
        args=SimpleNamespace(steps_per_generation=steps),
        current_gradient_accumulation_steps=accumulated,
        loss_settings=LossSettings(loss_type="dapo"),
    )
    rows = rows_of(mask, num_items_in_batch=torch.tensor(100))
    # The tokens of all processes' rows of one generation; a step has `accumulated` of its `steps` parts.
    tokens = 100 * accumulated / steps / processes
    assert one_step(made, rows, policy).item() == pytest.approx(-mask.sum().item() / tokens)
    empty = rows_of(torch.zeros_like(mask))
    assert one_step(made, empty, policy).item() == 0


def test_the_tokens_of_highest_entropy_are_those_of_all_processes():
    entropies, others = torch.tensor([[0.1, 0.2], [0.3, 9.0]]), torch.tensor([0.4, 0.5, 0.6, 0.7, 0.8])
    mask = torch.tensor([[1, 1], [1, 0]])

    class Processes:
        num_processes = 2

        def pad_across_processes(self, tensor, dim, pad_index):
            return torch.cat([tensor, tensor.new_full((5 - len(tensor),), pad_index)])

        def gather(self, tensor):
            return torch.cat([tensor, others])

    made = update(accelerator=Processes(), loss_settings=LossSettings(top_entropy_quantile=0.25))
    known = torch.cat([torch.tensor([0.1, 0.2, 0.3]), others])
    assert made._entropy_threshold(entropies, mask) == torch.quantile(known, 0.75)
    made.loss_settings = LossSettings()
    assert made._entropy_threshold(entropies, mask) is None


def test_a_step_s_figures_are_of_the_rows_of_all_processes_and_reported_once():
    policy, _, mask = off_by(0.0)

    class Processes:
        num_processes = 2

        def reduce(self, tensor, how):
            assert how == "sum"
            return tensor + other.totals

        def gather(self, tensor):
            return torch.cat([tensor, other.extremes[None]])

    made = update(accelerator=Processes(), args=SimpleNamespace(steps_per_generation=1))
    moved = policy.clone()
    moved[0] += 1
    # In the other process all three rows are clipped.
    one_step(made, rows_of(mask, old_per_token_logps=policy), policy + 1, torch.full_like(policy, 2.0))
    other, made._tally = made._tally.figures, StepTally()
    one_step(made, rows_of(mask, old_per_token_logps=policy), moved, torch.full_like(policy, 1.0))
    made._finish_step(made._tally)
    found = {name: value for name, (value,) in made._metrics["train"].items()}
    assert found["entropy"] == pytest.approx(1.5) and found["clip_ratio/region_mean"] == pytest.approx(4 / 6)
    assert found["clip_ratio/high_max"] == 1.0 and found["clip_ratio/low_min"] == 0.0
    assert "kl" not in found and "entropy_coef" not in found


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_what_trl_reads_is_as_before_after_the_rollouts(monkeypatch, packs, fails):
    seen = []

    def generate(self, inputs):
        seen.append((self.num_iterations, self.beta))
        if fails:
            raise CheckFailed("no server answers")
        return {"of": inputs}

    monkeypatch.setattr(GRPOTrainer, "_generate_and_score_completions", generate)
    keys = ["--train.micro_batch_tokens=104"] if packs else []
    made = Step.__new__(Step)
    made.config, made._dropouts = load_config(CONFIG, keys), []
    made.num_iterations, made.beta = 3, 0.04
    made._drop_flat_groups = lambda output: seen.append(output)
    with pytest.raises(CheckFailed) if fails else contextlib.nullcontext():
        assert made._generate_and_score_completions("rows") == {"of": "rows"}
    # By these it decides whether it passes over the batch for old log-probs and for the reference's.
    assert seen == [(1, 0.0 if packs else 0.04), {"of": "rows"}][: 2 - fails]
    assert (made.num_iterations, made.beta) == (3, 0.04)


def padded(prompts: list[list[int]], lengths: list[int]) -> dict:
    """A batch as TRL pads it: prompts on the left, completions on the right."""
    width, longest = max(map(len, prompts)), max(lengths)
    return {
        "prompt_ids": torch.tensor([[0] * (width - len(one)) + one for one in prompts]),
        "prompt_mask": torch.tensor([[0] * (width - len(one)) + [1] * len(one) for one in prompts]),
        "completion_ids": torch.full((len(lengths), longest), 7),
        "completion_mask": torch.tensor([[1] * one + [0] * (longest - one) for one in lengths]),
    }


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("share", ["true", "false"])
def test_a_plan_keeps_the_budget_by_the_real_tokens_of_the_padded_rows(seed, share):
    draw = random.Random(seed)
    made = update("--train.micro_batch_tokens=128", f"--train.share_prompts={share}")
    # Short prompts beside a long one: the first columns of all short ones are padding.
    contents = [[draw.randint(1, 3) for _ in range(draw.choice([1, 2, 3, 40]))] for _ in range(5)]
    prompts = [one for one in contents for _ in range(4)]
    lengths = [draw.randint(1, 24) for _ in prompts]
    plan = made._plan(padded(prompts, lengths))
    assert sorted(row for rows in plan for row in rows) == list(range(20))
    for rows in plan:
        seen = [tuple(prompts[row]) for row in rows]
        copies = set(seen) if share == "true" else seen
        assert sum(len(one) - 1 for one in copies) + sum(lengths[row] for row in rows) <= 128
    total = len(set(map(tuple, prompts))) if share == "true" else 20
    assert len(plan) <= math.ceil(2 * (sum(lengths) + total * 39) / 128)


def test_rows_are_taken_and_what_is_of_the_whole_batch_stays():
    batch = {
        "completion_ids": torch.arange(12).view(4, 3),
        "advantages": torch.arange(4.0),
        "num_items_in_batch": torch.tensor(12),
        "note": "x",
    }
    part = take_rows(batch, [3, 1])
    assert part["completion_ids"].tolist() == [[9, 10, 11], [3, 4, 5]] and part["advantages"].tolist() == [3, 1]
    assert part["num_items_in_batch"].item() == 12 and part["note"] == "x"


def test_scores_of_micro_batches_are_kept_in_the_order_of_the_batch():
    plan = [[3, 1], [0, 2]]
    parts = [{"old_per_token_logps": torch.tensor(rows)[:, None], "advantages": torch.ones(2)} for rows in plan]
    keep_scores(batch := {}, parts, plan)
    assert batch.keys() == {"old_per_token_logps"} and batch["old_per_token_logps"].flatten().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_only_the_last_micro_batch_exchanges_gradients_and_its_backward_is_left_to_the_caller(micro_batches):
    seen, silent = [], []
    weight = torch.zeros(1, requires_grad=True)

    @contextlib.contextmanager
    def no_sync(model):
        silent.append(True)
        yield
        silent.pop()

    def loss(model, part, step_rows):
        assert step_rows == 6
        seen.append(("forward", part["completion_ids"][:, 0].tolist(), bool(silent)))
        return (weight * part["advantages"]).sum() / step_rows

    def backward(loss):
        seen.append(("backward", bool(silent)))
        loss.backward()

    plan = [[2, 5], [0, 1, 4], [3]] if micro_batches == 3 else [[0, 1, 2, 3, 4, 5]]
    made = update(
        "--train.micro_batch_tokens=104",
        accelerator=SimpleNamespace(no_sync=no_sync, backward=backward, sync_gradients=False),
        _plan=lambda inputs: plan,
        _add_reference=lambda parts: None,
        _loss_of_rows=loss,
    )
    advantages = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0, 32.0])
    inputs = {"completion_ids": torch.arange(6)[:, None].expand(6, 2), "advantages": advantages}
    with torch.no_grad():
        weight += 1
    found = made.compute_loss(None, inputs)
    assert found.item() == pytest.approx(advantages.mean().item()), "the value is that of all rows"
    found.backward()
    wanted = []
    for number, rows in enumerate(plan):
        last = number == len(plan) - 1
        wanted += [("forward", rows, not last)] + [("backward", True)] * (not last)
    assert seen == wanted
    assert weight.grad.item() == pytest.approx(advantages.mean().item())
