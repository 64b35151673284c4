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
from kit.train.mismatch import importance_ratio, measure
from kit.train.update import PackedUpdate, join_rows, take_rows
from tests.conftest import CONFIG

GROUP, NAN = 4, math.nan


class Update(PackedUpdate, GRPOTrainer):
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
    made = PackedUpdate.__new__(PackedUpdate)
    facts = {
        "config": load_config(CONFIG, list(changes)),
        "accelerator": Accelerator(),
        "num_generations": GROUP,
        "reward_weights": torch.ones(1),
        "_dropouts": [],
        "multi_objective_aggregation": "sum_then_normalize",
        "args": SimpleNamespace(vllm_importance_sampling_clip_min=None),
        "state": SimpleNamespace(global_step=6),
        "recorder": None,
        "_metrics": {"train": defaultdict(list)},
        "_sampler": {},
        "_compared": [],
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
    made._compared.append(off_by(delta))
    if not stops:
        made._judge_sampler()
        assert made._sampler["sampler_k3"] == pytest.approx(share * limit, rel=1e-4) and not kept
        return
    with pytest.raises(CheckFailed, match=r"^step 7\b.* k3 "):
        made._judge_sampler()
    assert kept == [{"step": 7}] and made._sampler["sampler_k3"] == pytest.approx(share * limit, rel=1e-4)


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("value", [NAN, math.inf, -math.inf])
def test_one_log_prob_that_is_not_finite_stops_the_run_unless_it_is_padding(side, value):
    for mask_of, stops in ((1, True), (0, False)):
        made = update("--rollout.max_sampler_k3=1e6")
        tensors = off_by(0.1)
        tensors[2][1, 4] = mask_of
        tensors[side][1, 4] = value
        made._compared.append(tensors)
        if not stops:
            made._judge_sampler()
        else:
            with pytest.raises(CheckFailed, match=r"^step 7\b.* k3 " if side == 0 else "1 log-probs of the sampler"):
                made._judge_sampler()


def test_a_step_is_judged_by_its_own_rows_and_nothing_is_said_of_a_step_without_any():
    made = update("--rollout.max_sampler_k3=1e6")
    made._judge_sampler()
    assert made._sampler == {} and not made._metrics["train"]
    made._compared += [off_by(0.5), off_by(0.25)]  # two accumulation steps
    made._judge_sampler()
    assert made._sampler["sampler_delta_mean"] == pytest.approx(0.375)
    made._compared.append(off_by(0.125))
    made._judge_sampler()
    assert made._sampler["sampler_delta_mean"] == pytest.approx(0.125)


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
    made._compared.append(parts[0])
    made._judge_sampler()
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


def test_what_the_first_forward_gives_stays_with_the_rows_and_is_compared_once():
    policy, sampler, mask = off_by(0.5)
    rows = {"completion_mask": mask, "sampling_per_token_logps": sampler}
    made = update("--rollout.correction=token_truncate", "--rollout.correction_cap=1.2", "--rollout.max_sampler_k3=9")
    made._scored(rows, policy, policy * 2)
    assert torch.equal(rows["old_per_token_logps"], policy) and len(made._compared) == 1
    assert torch.allclose(rows["importance_sampling_ratio"], torch.full((3, 5), 1.2))
    assert torch.equal(made._scores[1], policy * 2)
    made._scored(rows, policy + 1, policy)  # the policy moved
    assert torch.equal(rows["old_per_token_logps"], policy) and len(made._compared) == 1
    assert torch.equal(made._scores[0], policy + 1)
    mask[1, 2], sampler[1, 2] = 0, -50.0  # left out of the loss
    made._judge_sampler()
    assert made._sampler["sampler_delta_max"] == pytest.approx(0.5)
    made._scored(without := {"completion_mask": mask}, policy, policy)
    assert not made._compared and set(without) == {"completion_mask", "old_per_token_logps"}


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_what_trl_reads_is_as_before_after_the_rollouts(monkeypatch, packs, fails):
    seen = []

    def generate(self, inputs):
        seen.append((self.vllm_importance_sampling_correction, self.num_iterations, self.beta))
        if fails:
            raise CheckFailed("no server answers")
        return {"of": inputs}

    monkeypatch.setattr(GRPOTrainer, "_generate_and_score_completions", generate)
    keys = ["--train.micro_batch_tokens=104"] if packs else []
    made = Update.__new__(Update)
    made.config, made._dropouts = load_config(CONFIG, keys), []
    made.vllm_importance_sampling_correction, made.num_iterations, made.beta = True, 3, 0.04
    made._drop_flat_groups = lambda output: seen.append(output)
    with pytest.raises(CheckFailed) if fails else contextlib.nullcontext():
        assert made._generate_and_score_completions("rows") == {"of": "rows"}
    # By these it decides whether it passes over the batch for old log-probs and for the reference's.
    assert seen == [(False, 1, 0.0 if packs else 0.04), {"of": "rows"}][: 2 - fails]
    assert (made.vllm_importance_sampling_correction, made.num_iterations, made.beta) == (True, 3, 0.04)


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


def test_rows_are_taken_and_joined_and_what_is_of_the_whole_batch_stays():
    batch = {
        "completion_ids": torch.arange(12).view(4, 3),
        "advantages": torch.arange(4.0),
        "num_items_in_batch": torch.tensor(12),
        "note": "x",
    }
    part = take_rows(batch, [3, 1])
    assert part["completion_ids"].tolist() == [[9, 10, 11], [3, 4, 5]] and part["advantages"].tolist() == [3, 1]
    assert part["num_items_in_batch"].item() == 12 and part["note"] == "x"
    joined = join_rows([take_rows(batch, [0, 1]), take_rows(batch, [2, 3])])
    assert joined.keys() == batch.keys() and joined["num_items_in_batch"].item() == 12
    assert torch.equal(joined["completion_ids"], batch["completion_ids"])
    assert torch.equal(joined["advantages"], batch["advantages"])


@pytest.mark.parametrize(
    ("changes", "pooled"),
    [
        ({}, True),
        ({"gradient_accumulation_steps": 2}, True),
        ({"gradient_accumulation_steps": 1}, False),
        ({"entropy_coef": 0.01}, False),
        ({"top_entropy_quantile": 0.2}, False),
        ({"aux_loss_enabled": True}, False),
    ],
)
def test_accumulation_steps_are_pooled_unless_their_loss_is_of_more_than_their_own_log_probs(changes, pooled):
    facts = {"gradient_accumulation_steps": 4, "entropy_coef": 0.0, "top_entropy_quantile": 1.0} | changes
    made = update(args=SimpleNamespace(**facts), aux_loss_enabled=changes.get("aux_loss_enabled", False))
    assert made._accumulates == pooled


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_only_the_last_micro_batch_exchanges_gradients_and_its_backward_is_left_to_the_caller(micro_batches):
    seen, silent = [], []
    weight = torch.zeros(1, requires_grad=True)

    @contextlib.contextmanager
    def no_sync(model):
        silent.append(True)
        yield
        silent.pop()

    def loss(model, part):
        made._scores = (torch.zeros(len(part["completion_ids"]), 2), torch.zeros(len(part["completion_ids"]), 2))
        seen.append(("forward", part["completion_ids"][:, 0].tolist(), bool(silent)))
        return (weight * part["advantages"]).mean()

    def backward(loss):
        seen.append(("backward", bool(silent)))
        loss.backward()

    plan = [[2, 5], [0, 1, 4], [3]] if micro_batches == 3 else [[0, 1, 2, 3, 4, 5]]
    made = update(
        "--train.loss_type=grpo",
        accelerator=SimpleNamespace(no_sync=no_sync, backward=backward),
        beta=0.0,
        _plan=lambda inputs: plan,
        _compute_loss=loss,
        _log_metrics=lambda *args: None,
    )
    advantages = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0, 32.0])
    inputs = {"completion_ids": torch.arange(6)[:, None].expand(6, 2), "advantages": advantages}
    made._loss_in_micro_batches(None, inputs).backward()
    wanted = []
    for number, rows in enumerate(plan):
        last = number == len(plan) - 1
        wanted += [("forward", rows, not last)] + [("backward", True)] * (not last)
    assert seen == wanted
    assert weight.grad.item() == pytest.approx(advantages.mean().item())
