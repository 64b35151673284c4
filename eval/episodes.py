"""Episodes of an evaluation: the run's environment on the held-out problems, by the runner that trains with it.

A checkpoint's own tokenizer renders, its model takes the turns in lockstep, and nothing is sampled or cut otherwise
than in training. Common random numbers go on from turn to turn: the noise of a token depends on its position in the
sequence.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from eval.generate import Generation
from kit.core.config.schema import Config
from kit.core.errors import BadInput
from kit.data.problems import Problem, to_dataset
from kit.environments.episode import Environment
from kit.environments.load import load_environment
from kit.rollout.episode_tokens import EpisodeTokens
from kit.rollout.episodes import DONE, EpisodeResult, EpisodeRunner, TurnAsk

# (token ids, (problem, sample), most new tokens, positions) of the turns to take -> their token ids, padding included
Complete = Callable[[list[list[int]], Sequence[tuple[int, int]], int, Sequence[int]], list[list[int]]]


@dataclass(frozen=True)
class Episodes:
    """What is played on every checkpoint: `rows` of the data, one per problem, with the limits of `config`."""

    config: Config
    environment: Environment
    rows: list[dict[str, Any]]


def episodes_of(config: Config, problems: list[Problem], max_new_tokens: int) -> Episodes | None:
    """The episodes of a configuration's environment, None if it has none; `BadInput` for one that cannot be made, and
    for a backend that cannot take turns."""
    environment = load_environment(config)
    if environment is None:
        return None
    if config.eval.backend == "server":
        raise BadInput(
            "eval.backend server asks for one answer per problem, and the run's environment answers turn by turn. Use "
            "eval.backend transformers or vllm on the merged checkpoint."
        )
    longest = dataclasses.replace(config.rollout, max_completion_length=max_new_tokens)
    rows = [dict(row) for row in to_dataset(problems, config.data)]
    return Episodes(dataclasses.replace(config, rollout=longest), environment, rows)


def play(episodes: Episodes, tokenizer: Any, stops: list[int], samples: int, complete: Complete) -> list[Generation]:
    """Play `samples` episodes on every problem, those of one together."""
    tokens = EpisodeTokens(tokenizer, episodes.config.data.chat_template_kwargs, episodes.environment.takes_tools)
    runner = EpisodeRunner(episodes.environment, tokens, episodes.config)

    def turns(asks: list[TurnAsk]) -> list[list[int]]:
        places = [divmod(ask.episode, samples) for ask in asks]
        prompts, most = [ask.prompt_ids for ask in asks], max(ask.max_tokens for ask in asks)
        made = complete(prompts, places, most, [len(ids) for ids in prompts])
        return [
            runner.stop_texts.cut(ask.prompt_ids, _until_stop(ids, stops))[: ask.max_tokens]
            for ids, ask in zip(made, asks, strict=True)
        ]

    rows = [row for row in episodes.rows for _ in range(samples)]
    return [generation_of(result, tokenizer, stops) for result in runner.sample_here(rows, turns, 0, stops)]


def _until_stop(ids: list[int], stops: list[int]) -> list[int]:
    end = next((place for place, token in enumerate(ids) if token in stops), len(ids) - 1)
    return ids[: end + 1]


def generation_of(result: EpisodeResult, tokenizer: Any, stops: list[int]) -> Generation:
    """An episode as a completion: judged by its last turn, or by the environment's own reward."""
    turns = [message for message in result.messages if message["role"] == "assistant"]
    said = [
        tokenizer.decode([token for token, _ in part if token not in stops], skip_special_tokens=False)
        for sampled, part in itertools.groupby(
            zip(result.completion_ids, result.sampled, strict=True), key=lambda pair: pair[1]
        )
        if sampled
    ]
    content = turns[-1].get("content") if turns else ""
    return Generation(
        text=content if isinstance(content, str) else "",
        raw=tokenizer.decode(result.completion_ids, skip_special_tokens=False),
        tokens=sum(result.sampled),
        ended=result.end == DONE,
        hit_max_tokens=result.is_truncated,
        said="\n".join(said),
        episode=result,
    )


def close_all(generations: list[Generation]) -> None:
    """Release the environments of episodes, after they were judged."""
    for made in generations:
        if made.episode is not None and made.episode.episode is not None:
            made.episode.episode.close()
