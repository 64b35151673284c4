"""What a trainer does with the episodes of a step besides learning from them: their rewards, budget and metrics."""

from typing import Any

from accelerate.utils import gather_object

from kit.core.config.schema import Config
from kit.environments.episode import Environment
from kit.rollout.episodes import DONE, UNKNOWN, EpisodeResult, EpisodeRunner
from kit.rollout.policy_view import Report
from reward.pool import UnknownBudget, Verdict

# Entries of a row that reward functions get, beside the columns of the data.
INSTANCES, OWN_REWARD, REASON = "environments", "environment_reward", "unknown_episode"
TOLD = "told_episode"
# Keys of metrics.jsonl, for a run with an environment.
KEYS = ("episode_turns", "tool_calls", "tool_failures", "unfinished_fraction", "environment_tokens", "turn_lag")


class EnvironmentReward:
    """The environment's own reward as one of TRL's reward functions: it was computed when the episode ended."""

    def __init__(self, environment: Environment):
        self.__name__ = environment.name

    def __call__(self, environment_reward: list[float | None], **columns: Any) -> list[float | None]:
        return environment_reward


class EpisodeSteps:
    """The episodes of a run, from step to step; `runner` plays them."""

    def __init__(self, runner: EpisodeRunner, config: Config):
        self.runner, self.name = runner, runner.environment.name
        self.budget = UnknownBudget(
            self.name,
            config.environment.max_unknown_fraction,
            key="environment.max_unknown_fraction",
            what="the outcome of an episode of {} is not known",
        )

    def rewarded_rows(self, rows: list[dict], results: list[EpisodeResult]) -> list[dict]:
        """The rows with what their episodes give to reward functions."""
        found = []
        for row, one in zip(rows, results, strict=True):
            more = {OWN_REWARD: one.reward, REASON: one.unknown, TOLD: one.told}
            if (instance := one.episode and one.episode.instance) is not None or self._has_instances:
                more[INSTANCES] = instance
            found.append({**row, **more})
        return found

    @property
    def _has_instances(self) -> bool:
        return self.runner.limits.factory is not None

    def unknown(self, rows: list[dict]) -> list[bool]:
        """Which episodes of all processes are unknown; counts them, and raises `CheckFailed` above the budget, in
        every process."""
        found = gather_object([(row["problem_id"], row[REASON], row[TOLD]) for row in rows])
        verdicts = [Verdict(None if reason else True, reason or "known") for _, reason, _ in found]
        self.budget.record(verdicts, [f"problem {problem}, {told[:300]}" for problem, _, told in found])
        return [reason is not None for _, reason, _ in found]

    def report(self, results: list[EpisodeResult], step: int) -> Report:
        """The metrics of `KEYS` over all processes, and the most seconds that an episode spent in its environment."""
        mine = [
            (
                one.turns,
                one.tool_calls,
                sum(one.failures.values()),
                one.end not in (DONE, UNKNOWN),
                len(one.sampled) - sum(one.sampled),
                sum(step - 1 - version for version in one.versions),
                one.environment_s,
            )
            for one in results
        ]
        turns, calls, failures, unfinished, tokens, lags, seconds = zip(*gather_object(mine), strict=True)
        count = len(turns)
        means = [sum(turns) / count, sum(calls) / count, sum(failures) / count, sum(unfinished) / count]
        lag = sum(lags) / sum(turns) if sum(turns) else None
        return Report(dict(zip(KEYS, [*means, sum(tokens), lag], strict=True)), {"environment": max(seconds)})

    def close(self, results: list[EpisodeResult]) -> None:
        """Release the episodes of a step, after their rewards were computed."""
        for one in results:
            if one.episode is not None:
                one.episode.close()


def recorded(result: EpisodeResult, tokenizer: Any) -> dict[str, Any]:
    """An episode's entries of completions/step-*.jsonl; `text` is all of it, the rendered prompt first."""
    text = tokenizer.decode(result.prompt_ids + result.completion_ids, skip_special_tokens=False)
    found = {"messages": result.messages, "turn_versions": result.versions, "end": result.end, "text": text}
    return found | ({} if result.unknown is None else {"unknown": result.unknown, "told": result.told})
