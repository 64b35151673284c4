"""The update against TRL's own: the same loss, gradients and metrics, from fewer forwards and from micro-batches.

TRL's own is the kit's trainer without its overrides: one padded forward of 16 rows, another one before it for the old
log-probs, and the importance ratio from that.
"""

import contextlib
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from urllib.error import URLError

import pytest
import torch

from kit.core.errors import CheckFailed
from kit.rollout.policy_view import Rollouts
from kit.train.finite import FiniteAdapter, FiniteGradients
from kit.train.rows import padded_logps
from kit.train.trainer import PolicyTrainer, trainer_arguments
from reward.own import called

BATCH = 16
# Four groups of four; of 88 tokens that a row may have, the longest here has about 45.
PACKED = {"train.per_device_train_batch_size": 4, "train.gradient_accumulation_steps": 4}
PACKED |= {"train.micro_batch_tokens": 88}
METRICS = ("kl", "entropy", *(f"clip_ratio/{name}" for name in ("low_mean", "high_mean", "region_mean", "low_min")))


class Replicas:
    """A sampler of completions of 1 to 24 ids, with log-probs around those of an untrained policy."""

    def __init__(self, spread: float = 1.0):
        self.spread = spread

    def generate(self, policy: Any, prompt_ids: list[list[int]], group: int | None = None) -> Rollouts:
        ids = [[random.randint(5, 15) for _ in range(random.randint(1, 24))] for _ in prompt_ids]
        logps = [[-5.8 + self.spread * random.uniform(-1, 1) for _ in one] for one in ids]
        return Rollouts(ids, logps, policy.version)


def by_length(completions: list, **others: Any) -> list[float]:
    """A reward with a spread in every group."""
    return [len(one[0]["content"]) % 7 / 7 for one in completions]


def serve(trainer: Any) -> Any:
    """The trainer with a sampler, and an adapter that changes what the base says."""
    trainer.sampler = Replicas()
    torch.manual_seed(0)
    for name, parameter in trainer.model.named_parameters():
        if "lora_B" in name:
            parameter.data = 0.05 * torch.randn_like(parameter)
    return set_loss(trainer)


def set_loss(trainer: Any, loss: str = "dr_grpo", beta: float = 0.01, correction: str = "token_truncate") -> Any:
    """What the configuration says of the loss, also where TRL has it."""
    trainer.config.train.loss_type = trainer.loss_type = loss
    trainer.config.train.beta = trainer.beta = beta
    trainer.config.rollout.correction = correction
    step = trainer.policy_step
    step.settings = replace(step.settings, loss_type=loss, beta=beta, correction=correction)
    trainer.vllm_importance_sampling_correction = correction != "none"
    trainer.vllm_importance_sampling_mode = correction
    return trainer


@pytest.fixture(scope="module")
def build(build_trainer, recipe_arguments, tiny_model_dir, tmp_path_factory):
    """`build({key: value})`: a trainer of 16 rows a step, mismatch far below its limit."""

    def make(changes: dict | None = None) -> Any:
        keys = {"rollout.max_sampler_k3": 1e6, "rollout.correction_cap": 1.5, "train.max_steps": 4, **(changes or {})}
        folder = tmp_path_factory.mktemp("update") / "run"
        return serve(build_trainer(recipe_arguments(tiny_model_dir, folder, keys), rewards=[by_length]))

    return make


@pytest.fixture(scope="module")
def plain(build):
    return build()


@pytest.fixture(scope="module")
def packed(build):
    return build(PACKED)


@contextlib.contextmanager
def trls_own(trainer: Any) -> Iterator[None]:
    """Take the overrides of a step away; TRL corrects for a sampler that it takes for vLLM."""

    def generate(prompt_ids: list, *others: Any) -> tuple[list, list]:
        made = trainer.sampler.generate(trainer.policy, prompt_ids)
        return made.token_ids, made.logps

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "use_vllm", True)
        patch.setattr(trainer, "_generate_single_turn", generate)
        for name in ("_prepare_inputs", "compute_loss"):
            patch.delattr(PolicyTrainer, name)
        yield


def update(trainer: Any, times: int = 1) -> tuple[float, torch.Tensor, dict[str, float]]:
    """Loss, gradients and TRL's metrics of an optimizer step, called as transformers' loop calls it; of the last step
    where the batch is used several times, with another adapter each time."""
    random.seed(1)
    torch.manual_seed(1)
    trainer._step, trainer._buffered_inputs = 0, None
    rows = next(iter(trainer.get_train_dataloader()))
    torch.manual_seed(1)  # drawing the rows took random numbers; how many depends on the batch
    steps = trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    start = {name: one.detach().clone() for name, one in trainer.model.named_parameters() if one.requires_grad}
    for _ in range(times):
        trainer.model.zero_grad()
        trainer._metrics["train"].clear()
        loss = 0.0
        for number in range(steps):
            trainer.accelerator.gradient_state._set_sync_gradients(number + 1 == steps)
            loss += trainer.training_step(trainer.model, rows, None).item()
        gradients = {name: one.grad.clone() for name, one in trainer.model.named_parameters() if one.requires_grad}
        for name, one in trainer.model.named_parameters():
            if one.requires_grad:
                one.data -= 20 * gradients[name]
    for name, one in trainer.model.named_parameters():
        if one.requires_grad:
            one.data = start[name]
    assert rows_of(trainer) == BATCH
    metrics = {name: sum(values) / len(values) for name, values in trainer._metrics["train"].items()}
    return loss, torch.cat([one.flatten() for one in gradients.values()]), metrics


def rows_of(trainer: Any) -> int:
    return sum(len(one["completion_ids"]) for one in trainer._buffered_inputs)


def assert_same(found: tuple, expected: tuple, metrics: tuple[str, ...] = METRICS) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-5, abs=1e-7)
    assert expected[1].norm() > 1e-4, "a gradient to compare with"
    assert (found[1] - expected[1]).norm() < 1e-5 * expected[1].norm()
    for name in metrics:
        assert found[2][name] == pytest.approx(expected[2][name], rel=1e-5, abs=1e-7), name


CASES = [(loss, beta, "token_truncate") for loss in ("dr_grpo", "dapo", "grpo") for beta in (0.0, 0.01)]
CASES += [
    ("cispo", 0.01, "token_truncate"),
    ("sapo", 0.01, "token_truncate"),
    ("dr_grpo", 0.01, "token_mask"),
    ("grpo", 0.01, "sequence_truncate"),
    ("dapo", 0.01, "sequence_mask"),
    ("dr_grpo", 0.0, "none"),
]


@pytest.mark.parametrize(("loss", "beta", "correction"), CASES)
def test_an_update_is_trls_own_with_and_without_micro_batches(plain, packed, loss, beta, correction):
    for trainer in (plain, packed):
        set_loss(trainer, loss, beta, correction)
    with trls_own(plain):
        expected = update(plain)
    names = tuple(name for name in METRICS if beta or name != "kl")
    if loss in ("cispo", "sapo"):
        names = ("kl", "entropy", *(["cispo_clip_ratio"] if loss == "cispo" else []))
    ratios = tuple(f"sampling/importance_sampling_ratio/{name}" for name in ("min", "mean", "max"))
    names += ratios if correction != "none" else ()
    assert_same(update(plain), expected, names)
    assert_same(update(packed), expected, names)


def test_the_entropy_bonus_is_the_mean_over_the_step_with_and_without_micro_batches(build):
    """One padded micro-batch is TRL's own bonus; others are parts of the same mean."""
    bonus = {"train.entropy_coef": 0.5, "train.beta": 0.0}
    plain, packed = build(bonus), build({**PACKED, **bonus})
    accumulated = build({**bonus, **{key: value for key, value in PACKED.items() if "tokens" not in key}})
    for trainer in (plain, packed, accumulated):
        set_loss(trainer, beta=0.0)
    without = build({"train.beta": 0.0})
    with trls_own(plain):
        expected = update(plain)
    for trainer in (plain, packed, accumulated):
        assert_same(update(trainer), expected, ("entropy", "policy_loss"))
    assert (update(set_loss(without, beta=0.0))[1] - expected[1]).norm() > 1e-3 * expected[1].norm()


def test_a_kl_in_the_reward_is_subtracted_before_the_advantages_and_is_none_in_the_loss(build):
    """Reward minus beta times the sum of log π - log π_ref over a completion's tokens, by TRL's own log-probs."""
    beta, found = 0.3, []
    keys = {"train.beta": beta, "train.kl_in_reward": True, "train.mask_truncated": True}
    for trainer in (build(keys), build({**PACKED, **keys})):
        set_loss(trainer, beta=0.0).config.train.beta = beta
        trainer.eos_token_ids = [5, 6, 7]
        rows = [*next(iter(trainer.get_train_dataloader()))]
        random.seed(3)
        trainer._metrics["train"].clear()
        batch = trainer.sample(rows)
        assert "ref_per_token_logps" not in batch and trainer.args.beta == 0
        model, mask, scores = trainer.model, batch["completion_mask"], []
        ids, seen = (
            torch.cat([batch[f"{of}_{what}"] for of in ("prompt", "completion")], 1) for what in ("ids", "mask")
        )
        for adapter in (contextlib.nullcontext(), trainer.policy.unwrapped.disable_adapter()):
            with torch.no_grad(), adapter:
                scores.append(padded_logps(trainer.accelerator, model, ids, seen, mask.shape[1], False)[0])
        kl = (scores[0] - scores[1]) * mask  # (B, C)
        paid = torch.tensor([row["by_length"] for row in trainer._sampled.rewards]) - beta * kl.sum(dim=1)
        wanted = paid - paid.view(-1, 4).mean(dim=1).repeat_interleave(4)
        assert kl.abs().max() > 1e-2 and 0 < mask.any(dim=1).sum() < BATCH
        torch.testing.assert_close(batch["advantages"], wanted, rtol=1e-4, atol=1e-5)
        k3 = (((-kl).exp() - 1 + kl).sum() / mask.sum()).item()
        assert trainer._metrics["train"]["kl"] == [pytest.approx(k3, rel=1e-4)]
        reward = sum(row["by_length"] for row in trainer._sampled.rewards) / BATCH
        assert trainer._metrics["train"]["reward"] == [pytest.approx(reward)], "what is logged is without the KL"
        found.append(batch["advantages"])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


LOGGED = (
    "reward",
    "reward_std",
    "frac_reward_zero_std",
    "num_tokens",
    "rewards/by_length/mean",
    "rewards/by_length/std",
)
LOGGED += (*(f"completions/{how}{kind}_length" for how in ("mean", "min", "max") for kind in ("", "_terminated")),)


@pytest.mark.parametrize("scale", ["none", "group", "batch"])
@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
def test_the_rows_of_a_step_and_what_is_logged_of_them_are_trls_own_bit_for_bit(build, scale, aggregation):
    changes = {"train.scale_rewards": scale, "train.trl": f"{{multi_objective_aggregation: {aggregation}}}"}
    trainer = build({"train.mask_truncated": True, **changes})
    trainer.eos_token_ids = [5, 6, 7]  # about a third of the completions end with one of them
    trainer.reward_funcs.append(lambda completions, **others: [0.5, None, 1.0, 0.0] * (len(completions) // 4))
    trainer.reward_func_names.append("some")
    trainer.reward_processing_classes.append(None)
    trainer.reward_weights = torch.tensor([1.0, 0.3])
    rows, found = next(iter(trainer.get_train_dataloader())), []
    for own in (False, True):
        random.seed(3)
        trainer._metrics["train"].clear()
        trainer.state.num_input_tokens_seen = 0
        with trls_own(trainer) if own else contextlib.nullcontext():
            batch = trainer._generate_and_score_completions(rows) if own else trainer.sample(rows)
        found.append((batch, {name: values[:] for name, values in trainer._metrics["train"].items()}))
    (ours, metrics), (theirs, wanted) = found
    assert theirs.keys() - ours.keys() <= {"old_per_token_logps", "importance_sampling_ratio"}
    assert 0 < ours["completion_mask"].any(dim=1).sum() < BATCH and ours["advantages"].any()
    torch.testing.assert_close(ours.pop("ref_per_token_logps"), theirs["ref_per_token_logps"])  # positions differ
    for name, value in ours.items():
        assert value.dtype == theirs[name].dtype and torch.equal(value, theirs[name]), name
    for name in LOGGED:
        assert metrics[name] == wanted[name], name


@pytest.mark.parametrize("correction", ["token_truncate", "sequence_mask"])
def test_a_batch_used_twice_is_compared_with_its_first_forward(build, correction):
    both = [build({"train.num_iterations": 2, **changes}) for changes in ({}, PACKED)]
    for trainer in both:
        set_loss(trainer, "dapo", 0.01, correction)
    with trls_own(both[0]):
        expected = update(both[0], times=2)
    assert expected[2]["clip_ratio/region_mean"] > 0.01, "the policy moved"
    for trainer in both:
        assert_same(update(trainer, times=2), expected)


def test_accumulated_gradients_are_trls_own_and_metrics_those_of_the_whole_batch(build):
    masked = {"train.mask_truncated": True}
    trainer = build({**masked, "train.per_device_train_batch_size": 4, "train.gradient_accumulation_steps": 4})
    whole = build(masked)
    for one in (trainer, whole):
        one.eos_token_ids = [5, 6, 7, 8, 9]  # about half of the completions end with one of them
    with trls_own(trainer):
        loss, gradients, of_slices = update(trainer)
    expected = update(whole)[2]
    found = update(trainer)
    assert_same(found, (loss, gradients, expected))
    assert of_slices["kl"] != pytest.approx(expected["kl"], rel=1e-2), "a mean over slices is another number"
    assert found[2]["sampler/k3"] == pytest.approx(expected["sampler/k3"], rel=1e-5), "of all 16 rows"


@pytest.mark.parametrize("share", [True, False])
def test_a_policy_that_has_not_moved_has_no_gradient_in_packs(build, share):
    trainer = build({**PACKED, "train.share_prompts": share})
    trainer.reward_funcs[0] = lambda completions, **others: [1.0] * len(completions)
    for name, parameter in trainer.model.named_parameters():
        if "lora_B" in name:
            parameter.data.zero_()
    _, gradients, metrics = update(trainer)
    assert metrics["kl"] == 0.0 and not gradients.any(), "Adam would make steps of rounding"


def test_completions_that_are_left_out_of_the_loss_are_left_out_of_micro_batches(build):
    both = [build({"train.mask_truncated": True, **changes}) for changes in ({}, PACKED)]
    for trainer in both:
        trainer.eos_token_ids = [5, 6, 7, 8, 9]  # about half of the completions end with one of them
        set_loss(trainer, "grpo", 0.01)
    with trls_own(both[0]):
        expected = update(both[0])
    for trainer in both:
        assert_same(update(trainer), expected)
        masked = [not mask.any() for one in trainer._buffered_inputs for mask in one["completion_mask"]]
        assert 0 < sum(masked) < BATCH


@pytest.mark.parametrize("value", [0.7, 1.2])
@pytest.mark.parametrize("changes", [{}, PACKED], ids=["plain", "packed"])
def test_equal_rewards_teach_nothing_whatever_their_mean_rounds_to(build, changes, value):
    # The mean of eight times 0.7 is 0.69999993 in float32.
    trainer = build({"rollout.group_size": 8, "train.scale_rewards": "group", "train.beta": 0.0, **changes})
    set_loss(trainer, "grpo", 0.0)
    trainer.reward_funcs[0] = lambda completions, **others: [value] * len(completions)
    _, gradients, metrics = update(trainer)
    assert not gradients.any(), "Adam would make steps of rounding"
    assert metrics["frac_reward_zero_std"] == 1.0 and set(trainer._sampled.advantages) == {0.0}


@pytest.mark.parametrize("scale", ["none", "group", "batch"])
def test_groups_without_spread_are_counted_whatever_divides_the_advantages(build, scale):
    # Four groups: one flat, one with a spread, one with a single reward that could be computed, one with none.
    rewards = [0.7] * 4 + [0.0, 1.0, 1.0, 1.0] + [None, None, 1.0, None] + [None] * 4
    trainer = build({"train.scale_rewards": scale})
    trainer.reward_funcs[0] = lambda completions, **others: rewards
    _, gradients, metrics = update(trainer)
    assert gradients.any() and metrics["frac_reward_zero_std"] == 0.5
    shown = trainer._sampled.advantages
    assert not any(shown[:4] + shown[8:]) and all(shown[4:8])


def test_a_reward_of_weight_0_that_could_not_be_computed_leaves_the_row_in_the_loss(build):
    expected = update(build())
    trainer = build()
    trainer.reward_funcs.append(lambda completions, **others: [None, 1.0] * (len(completions) // 2))
    trainer.reward_func_names.append("watched")
    trainer.reward_processing_classes.append(None)
    trainer.reward_weights = torch.tensor([1.0, 0.0])
    found = update(trainer)
    assert_same(found, expected)
    assert found[2]["reward"] == expected[2]["reward"] and trainer.figures.counts["masked"] == 0
    assert found[2]["frac_reward_zero_std"] == expected[2]["frac_reward_zero_std"]
    trainer.reward_weights = torch.tensor([1.0, 0.5])
    update(trainer)
    assert trainer.figures.counts["masked"] == BATCH // 2


def test_a_reward_that_fails_is_named_with_the_step_and_its_traceback_is_in_the_log(build):
    def ask(completions: list, **others: Any) -> list:
        raise URLError(ConnectionRefusedError(111, "Connection refused"))

    trainer = build()
    trainer.reward_funcs[0] = lambda **given: called("judge:ask", ask, given)
    said = r"^step 1: reward 'judge:ask' raised URLError: <urlopen error .*refused>\. .*--resume.*trainer\.log$"
    with pytest.raises(CheckFailed, match=said):
        update(trainer)
    log = (trainer.run.logs / "trainer.log").read_text()
    assert "Traceback" in log and "in ask" in log and "Connection refused" in log


def forwards(trainer: Any) -> list[int]:
    """Tokens of every forward of an update."""
    seen: list[int] = []
    hook = trainer.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    update(trainer)
    hook.remove()
    return seen


@pytest.mark.parametrize("beta", [0.0, 0.01])
@pytest.mark.parametrize("correction", ["token_truncate", "none"])
def test_no_pass_is_made_twice(plain, beta, correction):
    set_loss(plain, beta=beta, correction=correction)
    assert len(forwards(plain)) == (2 if beta else 1)
    if correction != "none":
        with trls_own(plain):
            assert len(forwards(plain)) == (3 if beta else 2)


@pytest.mark.parametrize("beta", [0.0, 0.01])
def test_micro_batches_hold_at_most_their_tokens(packed, monkeypatch, beta):
    plans = []
    plan = packed.policy_step.plan
    monkeypatch.setattr(packed.policy_step, "plan", lambda rows: plans.append(plan(rows)) or plans[-1])
    set_loss(packed, beta=beta)
    tokens = forwards(packed)
    (found,) = plans
    assert sorted(row for rows in found for row in rows) == list(range(BATCH))
    assert len(found) > 3 and max(tokens) <= 88
    assert len(tokens) == len(found) * (2 if beta else 1), "the reference's pass as well"
    assert len({len(rows) for rows in found}) > 1, "micro-batches of different sizes"


def test_the_seconds_of_the_reference_pass_are_apart(build, read_jsonl):
    for changes in ({"train.beta": 0.01}, {"train.beta": 0.0}, {**PACKED, "train.beta": 0.01}):
        trainer = build({"train.max_steps": 1, **changes})
        set_loss(trainer, beta=changes["train.beta"])
        trainer.train_run(resume=False)
        (row,) = read_jsonl(trainer.run.metrics_file)
        seconds = row["seconds"]
        assert ("reference" in seconds) == (changes["train.beta"] > 0)
        parts = sum(seconds.get(name, 0.0) for name in ("rollout", "reward", "reference", "update"))
        assert parts == pytest.approx(seconds["step"], abs=0.001) and seconds["update"] > 0


def test_a_run_in_micro_batches_is_the_run_without(build, read_jsonl):
    both = [build({"train.learning_rate": 1e-3, **changes}) for changes in ({}, PACKED)]
    found = []
    for trainer in both:
        random.seed(2)
        torch.manual_seed(2)
        trainer.train_run(resume=False)
        found.append(read_jsonl(trainer.run.metrics_file))
    assert [row["step"] for row in found[1]] == [1, 2, 3, 4]
    for one, other in zip(*found, strict=True):
        for key in ("reward", "kl", "entropy", "loss", "grad_norm", "sampler_k3", "corrected_token_fraction"):
            assert one[key] == pytest.approx(other[key], rel=1e-3, abs=1e-7), key
        assert one["completion_tokens"] == other["completion_tokens"]


@pytest.mark.parametrize("changes", [{}, PACKED], ids=["plain", "packed"])
@pytest.mark.parametrize("fault", ["nan", "k3"])
def test_what_damaged_rollouts_taught_is_not_applied(build, read_jsonl, changes, fault):
    trainer = build({**changes, "train.learning_rate": 1e-2})
    trainer.sampler = sampler = Replicas(0.1)
    if fault == "nan":
        generate = sampler.generate
        sampler.generate = lambda *args: first_is_nan(generate(*args))
    else:
        trainer.config.rollout.max_sampler_k3 = 1e-5
    before = {name: one.clone() for name, one in trainer.model.named_parameters() if one.requires_grad}
    message = "1 log-probs of the sampler are not finite" if fault == "nan" else "the sampler is not the policy: k3 KL"
    with pytest.raises(CheckFailed, match=f"step 1: {message}"):
        trainer.train_run(resume=False)
    for name, one in trainer.model.named_parameters():
        assert not one.requires_grad or torch.equal(one, before[name]), name
    (row,) = read_jsonl(trainer.run.metrics_file)
    assert row["step"] == 1 and row["loss"] is None and row["sampler_k3"] > 0
    assert row["sampler_nan_count"] == (fault == "nan")
    assert not trainer.run.adapters.exists()


def first_is_nan(made: Rollouts) -> Rollouts:
    made.logps[0][0] = math.nan
    return made


def test_padded_rows_never_take_cudnns_attention_whose_gradients_may_be_nan(build):
    torch.backends.cuda.enable_cudnn_sdp(True)
    build()
    assert not torch.backends.cuda.cudnn_sdp_enabled() and torch.backends.cuda.flash_sdp_enabled()


def test_every_run_is_stopped_by_what_is_not_finite(plain):
    gradients, adapter = (
        [one for one in plain.callback_handler.callbacks if isinstance(one, kind)]
        for kind in (FiniteGradients, FiniteAdapter)
    )
    assert len(gradients) == len(adapter) == 1 and gradients[0].keep_step == plain.keep_step
    for parameter in plain.model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    last = [one for one in plain.model.parameters() if one.requires_grad][-1]
    last.grad[0, 0] = math.nan
    plain._buffered_inputs = []
    with pytest.raises(CheckFailed, match="gradient is not finite"):
        plain.callback_handler.on_pre_optimizer_step(plain.args, plain.state, plain.control)
    plain.model.zero_grad()
    kept, last.data[0, 0] = last.data[0, 0].clone(), math.inf
    for event in ("on_train_begin", "on_optimizer_step"):
        with pytest.raises(CheckFailed, match="not finite"):
            getattr(plain.callback_handler, event)(plain.args, plain.state, plain.control)
    last.data[0, 0] = kept


def test_all_rows_of_a_step_come_at_once(plain, packed):
    shapes = []
    for trainer in (plain, packed):
        arguments = trainer_arguments(trainer.config, trainer.run)
        shapes.append((arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps))
    assert shapes == [(16, 1), (16, 1)]
    assert packed.args.steps_per_generation == 1


@pytest.fixture(scope="module")
def in_bfloat16(build_trainer, recipe_arguments, learning_model_dir, tmp_path_factory):
    keys = {"model.dtype": "bfloat16", "train.max_steps": 4}
    folder = tmp_path_factory.mktemp("positions") / "run"
    return build_trainer(recipe_arguments(learning_model_dir, folder, keys), rewards=[by_length])


@pytest.mark.parametrize("compute", ["policy", "reference"])
def test_padding_does_not_move_a_token_in_bfloat16(in_bfloat16, compute):
    """A sampler scores a row from position 0; so does the update, however far a longer prompt pushes the row."""
    trainer = in_bfloat16
    torch.manual_seed(0)
    ids, completion = torch.randint(5, 300, (8, 40)), 24
    padding = torch.zeros(8, 150, dtype=torch.long)
    mask = torch.ones_like(ids)
    with torch.no_grad(), trainer.model.disable_adapter() if compute == "reference" else contextlib.nullcontext():
        alone, padded = (
            padded_logps(trainer.accelerator, trainer.model, rows, real, completion, False)[0]
            for rows, real in ((ids, mask), (torch.cat([padding, ids], 1), torch.cat([padding, mask], 1)))
        )
    off = (alone - padded).double()
    # k3; with positions counted from the padding 6e-5. Tiles of the head hold other rows then, which rounds otherwise.
    assert (off.exp() - 1 - off).mean() < 1e-5
