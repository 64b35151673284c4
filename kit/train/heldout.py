"""Held-out accuracy while a run trains: the policy answers the same problems of the eval split every few steps.

Answers are judged as in `python -m eval`, not by the run's reward: if the reward climbs while this falls, the reward
is being hacked or the problems memorized. A step measures the policy that sampled its rollouts, with the run's own
sampling settings and backend, one completion per problem. In the trainer's process every measurement uses the same
random numbers and restores the generator's state, so a run is the same with and without it.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import cast

import torch
from accelerate.utils import gather_object
from transformers import PreTrainedTokenizerBase

from kit.core.config.schema import Config
from kit.core.errors import BadInput
from kit.data.problems import CODE_FORMATS, TEXT_FORMATS, chat_messages, drop_long, load_problems, to_dataset
from kit.rollout.policy_view import EpisodeSampler, PolicyView, Sampler
from reward import BoundReward, checked_options

Tokenize = Callable[[list[list[dict]]], list[list[int]]]  # messages of prompts -> token ids


class HeldOut:
    """The held-out problems of a run and how they are judged; raises `BadInput` if there are none. Loads no weights.

    At most `watch.eval_problems` problems, the first of the split whose prompt fits. `owns_reward`: an environment
    judges, by its own reward.
    """

    def __init__(self, config: Config, tokenizer: PreTrainedTokenizerBase, owns_reward: bool = False):
        self.config, self.tokenizer = config, tokenizer
        problems = load_problems(config.data, "eval")
        problems, _ = drop_long(problems, tokenizer, config.data, config.rollout.max_prompt_length)
        self.problems = problems[: config.watch.eval_problems]
        if not self.problems:
            raise BadInput("watch.eval_every: the eval split holds no problem. Set data.eval_split, or leave it out.")
        self.judge: Callable | None = None if owns_reward else _judge(config)

    def is_due(self, step: int) -> bool:
        """Whether to measure at a step that generates: the first, and the first at or after every multiple."""
        every, apart = self.config.watch.eval_every, self.config.train.num_iterations
        return step == 1 or step // every != (step - apart) // every

    def measure(self, sampler: Sampler, policy: PolicyView, tokenize: Tokenize) -> float | None:
        """Share of correct answers among those that could be judged, the same in every process; None if none could.

        Called by all processes together; each generates its part. With an environment an episode is run on each
        problem; it is correct if the environment's own reward, if it has one, is at least `eval.reward_threshold`.
        """
        processes, index = policy.processes.num_processes, policy.processes.process_index
        share = -(-len(self.problems) // processes)
        # All processes generate as often: the last part is padded with the first problems, and those results dropped.
        mine = list(itertools.islice(itertools.cycle(self.problems), index * share, (index + 1) * share))
        prompts = [chat_messages(self.config.data, problem) for problem in mine]
        with own_random_numbers(self.config.run.seed, index, policy.processes.device):
            if self.config.environment.is_given:
                rows = [dict(row) for row in to_dataset(mine, self.config.data)]
                return self._share(self._played(cast(EpisodeSampler, sampler), policy, rows))
            made = sampler.generate(policy, tokenize(prompts), group=1)
        texts = self.tokenizer.batch_decode(made.token_ids, skip_special_tokens=True)
        messages = [[{"role": "assistant", "content": text}] for text in texts]
        scores = self.judge(prompts=prompts, completions=messages, gold=[problem.gold for problem in mine])
        return self._share([None if score is None else score == 1.0 for score in scores])

    def _played(self, sampler: EpisodeSampler, policy: PolicyView, rows: list[dict]) -> list[bool | None]:
        """Whether the episode on each row was correct; None if that is not known."""
        episodes, _ = sampler.run_episodes(policy, rows, group=1)
        try:
            if self.judge is None:
                scores, least = [one.reward for one in episodes], self.config.eval.reward_threshold
            else:
                texts = {
                    "prompts": [one.prompt for one in episodes],
                    "completions": [one.messages for one in episodes],
                }
                scores, least = self.judge(**texts, gold=[row["gold"] for row in rows]), 1.0
            known = [None if one.unknown else score for one, score in zip(episodes, scores, strict=True)]
            return [None if score is None else score >= least for score in known]
        finally:
            for one in episodes:
                if one.episode is not None:
                    one.episode.close()

    def _share(self, correct: list[bool | None]) -> float | None:
        """The share of the problems that are correct, over all processes, among those that are known."""
        decided = [one for one in gather_object(correct)[: len(self.problems)] if one is not None]
        return sum(decided) / len(decided) if decided else None


def _judge(config: Config) -> BoundReward:
    """The reward that judges answers, by the format of the references; the default of `python -m eval`."""
    form, reward = config.data.answer_format, config.reward
    if form in TEXT_FORMATS:
        name, fixed = "math", {"form": "boxed", "hash_answers": True}
    elif form in CODE_FORMATS:
        name, fixed = "code", {"partial": False}
    elif form == "countdown":
        name, fixed = "countdown", {}
    else:
        raise BadInput(
            f"watch.eval_every is {config.watch.eval_every} and data.answer_format {form} does not say when an answer "
            "is correct. Set watch.eval_every to 0."
        )
    if name == "code" and not reward.allow_code_execution:
        raise BadInput("watch.eval_every runs code that the model wrote. Set reward.allow_code_execution, or 0.")
    given = {} if name == "math" else {key: value for key, value in reward.options.items() if key == name}
    options = checked_options(given, [name])[name] | fixed
    return BoundReward(name, reward.workers, reward.timeout_s, 1.0, options)


@contextlib.contextmanager
def own_random_numbers(seed: int, process: int, device: torch.device) -> Iterator[None]:
    """Seed torch for the block and restore the state of its generators afterwards."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed * 1000 + process)
        yield
