"""The parts of an update that need no model: flat groups, the limit on the sampler, the rows of micro-batches."""

import contextlib
import math
import random
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from kit.core.config.load import load_config
from kit.core.errors import CheckFailed
from kit.policy.packed.sequence_parallel import SequenceGroup
from kit.train.advantages import group_advantages
from kit.train.figures import StepFigures
from kit.train.loss import LossSettings
from kit.train.mismatch import importance_ratio, measure
from kit.train.rows import keep_scores, shared_rows, take_rows
from kit.train.step import PolicyStep, SamplerIsNotThePolicy, StepTally
from tests.conftest import CONFIG

GROUP, NAN = 4, math.nan


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


def update(*changes: str, accelerator=None, steps: int = 1, settings: LossSettings | None = None) -> PolicyStep:
    """A step without a trainer or a model."""
    config = load_config(CONFIG, list(changes))
    model = torch.nn.Linear(1, 1)
    policy = SimpleNamespace(processes=accelerator or Accelerator(), model=model, unwrapped=model, version=6)
    policy.waits_in_every_pass = policy.is_deepspeed = False
    arguments = SimpleNamespace(steps_per_generation=steps)
    figures = StepFigures(torch.device("cpu"))
    return PolicyStep(config, None, policy, arguments, settings or LossSettings(), None, figures, defaultdict(list))


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
@pytest.mark.parametrize("scale", ["none", "group", "batch"])
@pytest.mark.parametrize(("weights", "rewards", "of_sums", "of_each"), GROUPS)
def test_a_group_is_flat_by_the_weighted_rewards_that_its_advantages_come_from(
    aggregation, scale, weights, rewards, of_sums, of_each
):
    are_summed = aggregation == "sum_then_normalize"
    spread = of_sums if are_summed else of_each
    known = torch.stack([torch.tensor([0.0, 1.0, 2.0, 3.0])] * len(weights), dim=1)  # a group with a spread
    both = torch.cat([known, torch.tensor(rewards, dtype=torch.float32)])
    advantages, flat = group_advantages(both, torch.tensor(weights), GROUP, scale, are_summed)
    first_spread = not are_summed or sum(weights) != 0
    assert flat.tolist() == [not first_spread, not spread]
    for group, teaches in zip(advantages.view(2, GROUP), (first_spread, spread), strict=True):
        assert not group.isnan().any() and (teaches or not group.any())


def off_by(delta: float, rows: int = 3, width: int = 5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Policy, sampler and mask (rows, width); the policy differs by `delta` at every token."""
    sampler = -torch.rand(rows, width, generator=torch.Generator().manual_seed(0))
    return sampler + delta, sampler, torch.ones(rows, width)


@pytest.mark.parametrize("limit", [0.01, 0.5, 2.0])
@pytest.mark.parametrize(("share", "stops"), [(0.5, False), (0.98, False), (1.02, True), (9.0, True)])
def test_the_limit_on_k3_is_the_configured_one(limit, share, stops):
    # k3 of a difference that is the same everywhere, solved for it.
    delta = 1.0
    for _ in range(60):
        delta -= (math.exp(delta) - 1 - delta - share * limit) / (math.exp(delta) - 1)
    made = update(f"--rollout.max_sampler_k3={limit}")
    with pytest.raises(SamplerIsNotThePolicy, match=r"^step 7\b.* k3 ") if stops else contextlib.nullcontext():
        made.judge_sampler([off_by(delta)])
    assert made.figures.values["sampler_k3"] == pytest.approx(share * limit, rel=1e-4)


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("value", [NAN, math.inf, -math.inf])
def test_one_log_prob_that_is_not_finite_stops_the_run_unless_it_is_padding(side, value):
    for mask_of, stops in ((1, True), (0, False)):
        made = update("--rollout.max_sampler_k3=1e6")
        tensors = off_by(0.1)
        tensors[2][1, 4] = mask_of
        tensors[side][1, 4] = value
        if not stops:
            made.judge_sampler([tensors])
        else:
            with pytest.raises(CheckFailed, match=r"^step 7\b.* k3 " if side == 0 else "1 log-probs of the sampler"):
                made.judge_sampler([tensors])


def test_nothing_is_said_of_a_step_without_a_sampler_and_accumulation_steps_are_judged_together():
    made = update("--rollout.max_sampler_k3=1e6")
    made.judge_sampler([])
    assert made.figures.values == {} and not made.metrics
    made.judge_sampler([off_by(0.5), off_by(0.25)])
    assert made.figures.values["sampler_delta_mean"] == pytest.approx(0.375)


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
        "--rollout.max_sampler_k3=1e6",
        accelerator=Accelerator(0, [torch.stack(one).transpose(0, 2).contiguous() for one in parts[1:]]),
        settings=LossSettings(correction=correction, correction_cap=1.3, correction_floor=floor),
    )
    made.judge_sampler([parts[0]])
    whole = [torch.cat([pad(one.T, 9).T for one in each]) for each in zip(*parts, strict=True)]
    assert made.figures.values == pytest.approx(measure(*whole, correction, 1.3, floor))
    logged = {name: value for name, (value,) in made.metrics.items()}
    assert logged["sampler/k3"] == made.figures.values["sampler_k3"]
    assert logged["sampler/delta_p99"] == made.figures.values["sampler_delta_p99"]
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
    made.score = lambda model, rows: (logps, torch.zeros_like(logps) if entropies is None else entropies)
    return made.loss_of_rows(None, rows, len(logps), rows["num_items_in_batch"])


def rows_of(mask: torch.Tensor, **others: torch.Tensor) -> dict:
    return {"completion_mask": mask, "advantages": torch.ones(len(mask)), "num_items_in_batch": mask.sum(), **others}


def test_what_the_first_forward_gives_stays_with_the_rows_and_is_compared_once():
    policy, sampler, mask = off_by(0.5)
    settings = LossSettings(loss_type="dapo", correction="token_truncate", correction_cap=1.2)
    made = update("--rollout.max_sampler_k3=9", settings=settings)
    rows = rows_of(mask, sampling_per_token_logps=sampler)
    assert one_step(made, rows, policy).item() == pytest.approx(-1.2), "the capped ratio of the sampler"
    assert torch.equal(rows["old_per_token_logps"], policy) and len(made.tally.compared) == 1
    # The policy moved: its ratio is clipped at 1.2, and the sampler is not compared with it.
    assert one_step(made, rows, policy + 1).item() == pytest.approx(-1.2 * 1.2)
    assert torch.equal(rows["old_per_token_logps"], policy) and len(made.tally.compared) == 1
    assert made.tally.figures.read()["clip_ratio/high_mean"] == pytest.approx(0.5), "of both"
    mask[1, 2], sampler[1, 2] = 0, -50.0  # left out of the loss
    made.judge_sampler(made.tally.compared)
    assert made.figures.values["sampler_delta_max"] == pytest.approx(0.5)
    made.tally = StepTally()
    one_step(made, without := rows_of(mask), policy)
    assert not made.tally.compared and set(without) == {*rows_of(mask), "old_per_token_logps"}


@pytest.mark.parametrize(("processes", "steps", "accumulated"), [(1, 1, 1), (4, 1, 1), (1, 4, 4), (2, 4, 2)])
def test_a_token_of_dapo_weighs_by_those_of_a_whole_step(processes, steps, accumulated):
    policy, _, mask = off_by(0.5)
    accelerator = SimpleNamespace(num_processes=processes, sync_gradients=False)
    made = update(accelerator=accelerator, steps=steps, settings=LossSettings(loss_type="dapo"))
    made.score = lambda model, rows: (policy, torch.zeros_like(policy))
    # The tokens of all processes' rows of one generation; a step has `accumulated` of its `steps` parts.
    tokens = 100 * accumulated / steps / processes
    for one, share in ((mask, mask.sum().item() / tokens), (torch.zeros_like(mask), 0.0)):
        rows = rows_of(one, completion_ids=one, num_items_in_batch=torch.tensor(100))
        assert made.loss(None, rows, accumulated).item() == pytest.approx(-share)
    rows = rows_of(torch.zeros_like(mask), completion_ids=mask, num_items_in_batch=torch.tensor(0))
    assert made.loss(None, rows, accumulated).item() == 0, "a step without a token"


def test_the_tokens_of_highest_entropy_are_those_of_all_processes():
    entropies, others = torch.tensor([[0.1, 0.2], [0.3, 9.0]]), torch.tensor([0.4, 0.5, 0.6, 0.7, 0.8])
    mask = torch.tensor([[1, 1], [1, 0]])

    class Processes:
        num_processes = 2

        def pad_across_processes(self, tensor, dim, pad_index):
            return torch.cat([tensor, tensor.new_full((5 - len(tensor),), pad_index)])

        def gather(self, tensor):
            return torch.cat([tensor, others])

    made = update(accelerator=Processes(), settings=LossSettings(top_entropy_quantile=0.25))
    known = torch.cat([torch.tensor([0.1, 0.2, 0.3]), others])
    assert made._entropy_threshold(entropies, mask) == torch.quantile(known, 0.75)
    made.settings = LossSettings()
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

    made = update(accelerator=Processes())
    # In the other process all three rows are clipped, in this one none.
    one_step(made, rows_of(mask, old_per_token_logps=policy), policy + 1, torch.full_like(policy, 2.0))
    other, made.tally = made.tally.figures, StepTally()
    one_step(made, rows_of(mask, old_per_token_logps=policy), policy, torch.full_like(policy, 1.0))
    made.finish(made.tally)
    found = {name: value for name, (value,) in made.metrics.items()}
    assert found["entropy"] == pytest.approx(1.5) and found["clip_ratio/region_mean"] == pytest.approx(3 / 6)
    assert found["clip_ratio/high_max"] == 1.0 and found["clip_ratio/low_min"] == 0.0
    assert "kl" not in found and "entropy_coef" not in found


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
    plan = made.plan(padded(prompts, lengths))
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

    def loss(model, part, step_rows, step_tokens):
        assert step_rows == 6
        seen.append(("forward", part["completion_ids"][:, 0].tolist(), bool(silent)))
        return (weight * part["advantages"]).sum() / step_rows

    def backward(loss):
        seen.append(("backward", bool(silent)))
        loss.backward()

    plan = [[2, 5], [0, 1, 4], [3]] if micro_batches == 3 else [[0, 1, 2, 3, 4, 5]]
    made = update(
        "--train.micro_batch_tokens=104",
        accelerator=SimpleNamespace(no_sync=no_sync, backward=backward, sync_gradients=False, num_processes=1),
    )
    made.plan, made.loss_of_rows, made.pack = lambda inputs: plan, loss, lambda rows: None
    advantages = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0, 32.0])
    inputs = {"completion_ids": torch.arange(6)[:, None].expand(6, 2), "advantages": advantages}
    inputs["num_items_in_batch"] = torch.tensor(12)
    with torch.no_grad():
        weight += 1
    found = made.loss(None, inputs, 1)
    assert found.item() == pytest.approx(advantages.mean().item()), "the value is that of all rows"
    found.backward()
    wanted = []
    for number, rows in enumerate(plan):
        last = number == len(plan) - 1
        wanted += [("forward", rows, not last)] + [("backward", True)] * (not last)
    assert seen == wanted
    assert weight.grad.item() == pytest.approx(advantages.mean().item())


@pytest.mark.parametrize("most", [2, 4])
def test_a_process_with_fewer_micro_batches_makes_idle_ones_and_deepspeed_updates_in_the_last(most):
    """They are its shortest row, change no gradient and no kept score, and their number is that of the other."""
    seen, weight = [], torch.ones(1, requires_grad=True)
    engine = SimpleNamespace(backward=lambda loss, **settings: (seen.append(settings), loss.backward()))
    accelerator = SimpleNamespace(no_sync=contextlib.nullcontext, sync_gradients=False, num_processes=2)
    accelerator.device, accelerator.deepspeed_engine_wrapped = torch.device("cpu"), engine
    accelerator.gather = lambda mine: torch.cat([mine, torch.tensor([most])])
    made = update("--train.micro_batch_tokens=104", accelerator=accelerator)
    made.policy.waits_in_every_pass = made.policy.is_deepspeed = True

    def score(model, part):
        seen.append(part["completion_ids"][:, 0].tolist())
        return (weight * part["completion_ids"],) * 2

    def loss(model, part, step_rows, step_tokens):
        part["old_per_token_logps"] = score(model, part)[0].detach()
        return (weight * part["completion_ids"]).sum() / step_rows

    made.plan, made.score, made.loss_of_rows = lambda inputs: [[2], [0, 1]], score, loss
    made.pack = lambda rows: None
    inputs = {"completion_ids": torch.tensor([[0], [1], [2]]), "num_items_in_batch": torch.tensor(3)}
    inputs |= {"prompt_mask": torch.tensor([[0, 1], [0, 1], [1, 1]]), "completion_mask": torch.tensor([[1], [0], [1]])}
    found = made.loss(None, inputs, 1)
    assert found.item() == 1.0
    found.backward()
    settings = {"sync_gradients": False, "scale_wrt_gas": False}
    assert seen == [[2], settings, [0, 1], *([settings, [1]] * (most - 2))]
    assert weight.grad.item() == 1.0 and inputs["old_per_token_logps"].tolist() == [[0], [1], [2]]


def test_a_group_computes_the_rows_of_all_its_processes_and_each_keeps_its_own_scores(monkeypatch):
    """Process 1 of 2: twice the rows, twice the tokens of a process, and only the first compares with the sampler."""
    seen = {}

    def loss(model, part, step_rows, step_tokens):
        seen.update(rows=step_rows, tokens=step_tokens.item())
        part["old_per_token_logps"] = part["completion_ids"] * 10
        return torch.tensor(0.0)

    accelerator = SimpleNamespace(no_sync=contextlib.nullcontext, sync_gradients=False, num_processes=4)
    made = update("--train.micro_batch_tokens=104", accelerator=accelerator)
    made.group = SequenceGroup(None, size=2, rank=1)
    made.plan, made.loss_of_rows, made.pack = lambda inputs: [[0, 1, 2, 3]], loss, lambda rows: None
    other = {"prompt_ids": torch.tensor([[7, 8], [9, 8]]), "completion_ids": torch.tensor([[1, 2, 3], [4, 5, 6]])}
    monkeypatch.setattr("kit.train.rows.all_gathered", lambda tensor, group: others(tensor))

    def others(tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensor that process 0 holds in place of this process's one."""
        if tensor.shape == (1,):
            return [torch.tensor([{1: 2, 2: 3}[tensor.item()]]), tensor]
        return [next((one for one in other.values() if one.shape == tensor.shape), tensor), tensor]

    inputs = {"prompt_ids": torch.tensor([[5], [6]]), "completion_ids": torch.tensor([[1, 2], [3, 4]])}
    inputs["num_items_in_batch"] = torch.tensor(40)
    made.loss(None, inputs, 1)
    assert seen == {"rows": 4, "tokens": 20.0}
    assert inputs["prompt_ids"].shape == (2, 1) and inputs["old_per_token_logps"].tolist() == [[10, 20], [30, 40]]
    shared = shared_rows(inputs, made.group)
    assert shared["prompt_ids"].tolist() == [[7, 8], [9, 8], [0, 5], [0, 6]]
    assert shared["completion_ids"].tolist() == [[1, 2, 3], [4, 5, 6], [1, 2, 0], [3, 4, 0]]


@pytest.mark.parametrize(("rank", "counted"), [(0, 2), (1, 0)])
def test_only_the_first_process_of_a_group_compares_its_rows_with_the_sampler(rank, counted):
    made = update("--train.micro_batch_tokens=104")
    made.group = SequenceGroup(None, size=2, rank=rank)
    made.score = lambda model, rows: (torch.zeros(1, 2), torch.zeros(1, 2))
    rows = {"completion_mask": torch.ones(1, 2), "sampling_per_token_logps": torch.zeros(1, 2)}
    made.loss_of_rows(None, rows | {"advantages": torch.ones(1)}, 1, torch.tensor(2.0))
    assert made.tally.compared[0][2].sum() == counted
