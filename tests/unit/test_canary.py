"""The canary: which model a replica holds, read off the log-probs of a few tokens."""

import numpy as np
import pytest

from kit.core.errors import BadInput, CheckFailed
from kit.rollout.canary import DECISIVE, compare, read_canary, write_canary
from kit.rollout.canary_scores import CanaryScorer

NOISE, TOKENS = 0.03, 400
RANDOM = np.random.default_rng(0)
BASE = [RANDOM.normal(-2, 1, TOKENS // 2) for _ in range(2)]


def moved(shift: float) -> list[np.ndarray]:
    """The base after an adapter that moves every log-prob by `shift` nats, either way."""
    return [one + shift * RANDOM.choice([-1, 1], one.shape) for one in BASE]


def noisy(scores: list[np.ndarray], noise: float = NOISE) -> list[np.ndarray]:
    return [one + noise * RANDOM.choice([-1, 1], one.shape) for one in scores]


@pytest.mark.parametrize("shift", [2.5 * NOISE, 0.2, 1.0])
def test_what_a_replica_holds_is_told_once_the_adapter_shows_through_the_noise(shift):
    policy = moved(shift)
    assert compare(noisy(policy), policy, BASE).nearest == "policy"
    stale = compare(noisy(BASE), policy, BASE)
    assert stale.nearest == "base"
    assert "serves the base without this adapter" in stale.problem(max_delta=10)


@pytest.mark.parametrize("shift", [0.0, 0.1 * NOISE, 0.9 * NOISE])
def test_below_the_noise_nothing_is_claimed(shift):
    policy = moved(shift)
    for held in (policy, BASE):
        result = compare(noisy(held), policy, BASE)
        assert result.nearest == "undecided" and result.shift < DECISIVE * result.noise
        assert result.problem(max_delta=0.25) is None


def test_an_adapter_that_is_still_zero_is_undecided_even_without_noise():
    assert compare(BASE, BASE, BASE).nearest == "undecided"


def test_other_weights_are_beyond_the_limit_whatever_is_nearer():
    other = [RANDOM.normal(-2, 1, one.shape) for one in BASE]
    result = compare(other, moved(0.1), BASE)
    assert result.nearest == "undecided"
    assert f"{result.mean:.4g} nats a token" in result.problem(0.25) and "max_canary_delta 0.25" in result.problem(
        0.25
    )


def test_the_distances_are_those_of_the_formulas():
    server, policy, base = ([np.array(values)] for values in ([-1.0, -2.0], [-1.5, -1.9], [-1.0, -2.0]))
    result = compare(server, policy, base)
    assert (result.mean, result.max) == pytest.approx((0.3, 0.5))
    assert result.k3 == pytest.approx(np.mean([np.exp(d) - 1 - d for d in (-0.5, 0.1)]))
    assert (result.to_base, result.shift, result.noise, result.tokens) == pytest.approx((0.0, 0.3, 0.0, 2))


@pytest.mark.parametrize("value", [np.nan, -np.inf, np.inf])
def test_one_number_that_is_none_is_enough_to_refuse(value):
    server = [one.copy() for one in BASE]
    server[1][3] = value
    assert "1 of 400 canary tokens" in compare(server, BASE, BASE).problem(10)


@pytest.mark.parametrize("value", [np.nan, -np.inf, np.inf])
def test_a_score_of_the_trainers_own_that_is_no_number_never_passes(value):
    policy = [one.copy() for one in BASE]
    policy[1][3] = value
    assert compare(BASE, policy, BASE).problem(10) is not None


def test_lengths_that_differ_are_an_error():
    with pytest.raises(ValueError, match="2 tokens of the server, 3 of the policy"):
        compare([np.zeros(2)], [np.zeros(3)], None)


def test_a_file_that_is_no_canary_is_named(tmp_path):
    (tmp_path / "canary.json").write_text('{"session": "a", "policy": [[1]], "base": [["x"]]}')
    with pytest.raises(BadInput, match="is not a canary of this kit: version is missing"):
        read_canary(tmp_path / "canary.json")


def test_a_canary_is_read_as_it_was_written(tmp_path):
    scores = [np.array([-1.25, -3e-7], dtype=np.float32)]
    facts = {"session": "ab", "version": 4, "way": "adapter", "sequences": [[5, 6, 7]]}
    write_canary(tmp_path / "canary.json", **facts, policy=scores, base=scores)
    found = read_canary(tmp_path / "canary.json")
    assert {key: found[key] for key in facts} == facts
    np.testing.assert_array_equal(found["policy"][0], scores[0])


def test_the_sequences_are_the_first_prompts_with_what_the_policy_answered():
    scorer = CanaryScorer(prompts=2, longest=512)
    prompts = [[1, 2, 3], [1, 2, 3], [4] * 300, [4] * 300, [5, 6], [5, 6]]
    scorer.choose(prompts)
    assert scorer.sequences == [[1, 2, 3], [4] * 128]
    scorer.choose([[9, 9]] * 6)
    scorer.extend([[10], [11], [12] * 300, [13], [14], [15]])
    assert scorer.sequences == [[1, 2, 3, 10], [4] * 128 + [12] * 128]
    scorer.extend([[0]] * 6)
    assert scorer.sequences == [[1, 2, 3, 10], [4] * 128 + [12] * 128], "the sequences stay the same to the end"


def test_a_sequence_is_the_end_of_a_long_prompt_and_the_beginning_of_its_completion():
    """The completion is then what the policy answered to the text before it."""
    scorer = CanaryScorer(prompts=2, longest=512)
    scorer.choose([[1], [*range(1000, 1300)], [7, 8]])
    assert scorer.sequences == [[*range(1172, 1300)], [7, 8]], "a prompt of one token has no log-prob"
    scorer.extend([[2], [*range(2000, 2300)], [9]])
    assert scorer.sequences == [[*range(1172, 1300), *range(2000, 2128)], [7, 8, 9]]


def test_a_sequence_leaves_room_for_the_token_that_scoring_generates():
    scorer = CanaryScorer(prompts=1, longest=20)
    scorer.choose([[1] * 15])
    scorer.extend([[2] * 30])
    assert len(scorer.sequences[0]) == 19


def test_no_canary_prompts_is_no_canary():
    scorer = CanaryScorer(prompts=0, longest=20)
    scorer.choose([[1, 2]])
    scorer.extend([[3]])
    assert scorer.sequences == []


def test_the_trainers_scores_are_its_log_probs_with_the_adapter_on_and_off(
    build_trainer, recipe_arguments, tiny_model_dir, tmp_path
):
    import torch

    # At another temperature too: the canary is scored at 1, as vLLM scores a prompt.
    trainer = build_trainer(recipe_arguments(tiny_model_dir, tmp_path / "run", {"rollout.temperature": 0.7}))
    for name, parameter in trainer.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    scorer = CanaryScorer(prompts=2, longest=64)
    scorer.sequences = [[5, 6, 7, 8, 9, 10, 11], [12, 13, 14]]
    sequences, policy, base = scorer.scores(trainer.policy)
    for ids, on, off in zip(sequences, policy, base, strict=True):
        row = torch.tensor([ids])
        for scores, context in ((on, None), (off, trainer.model.disable_adapter())):
            with torch.no_grad(), context or torch.no_grad():
                logits = trainer.model(input_ids=row).logits.float()
            expected = logits[0, :-1].log_softmax(dim=-1).gather(1, row[0, 1:, None]).squeeze(1)
            np.testing.assert_allclose(scores, expected.numpy(), atol=2e-2)
    assert np.abs(np.concatenate(policy) - np.concatenate(base)).mean() > 0.1
    assert all(p.requires_grad for name, p in trainer.model.named_parameters() if "lora_" in name)
    next(p for name, p in trainer.model.named_parameters() if "down_proj.lora_B" in name).data.fill_(torch.nan)
    with pytest.raises(CheckFailed, match="the trainer's own log-probs of 8 canary tokens are not finite"):
        scorer.scores(trainer.policy)


class Scored:
    """A policy whose scores are given."""

    def __init__(self, scores: dict[bool, np.ndarray]):
        self.given, self.asked = scores, []

    def score(self, sequences, is_adapted=True):
        self.asked.append(is_adapted)
        return [self.given[is_adapted]]


def test_the_base_is_scored_again_once_the_completions_are_there_and_then_no_more():
    scorer, policy = CanaryScorer(prompts=1, longest=64), Scored({True: np.zeros(1), False: np.ones(1)})
    assert scorer.scores(policy) is None and policy.asked == []
    scorer.choose([[5, 6]])
    assert scorer.scores(policy) == ([[5, 6]], [np.zeros(1)], [np.ones(1)])
    scorer.extend([[7, 8]])
    for _ in range(2):
        scorer.scores(policy)
    assert policy.asked == [True, False, True, False, True]


@pytest.mark.parametrize("which", [True, False])
@pytest.mark.parametrize("value", [np.nan, -np.inf, np.inf])
def test_a_trainer_whose_own_score_is_no_number_ends_the_run(which, value):
    scorer = CanaryScorer(prompts=1, longest=64)
    scorer.choose([[5, 6]])
    with pytest.raises(CheckFailed, match="the trainer's own log-probs of 1 canary tokens are not finite"):
        scorer.scores(Scored({which: np.array([-1.0, value]), not which: np.array([-1.0, -2.0])}))
