"""What an environment is to a run: the contract between the runner of episodes and whoever answers the model.

    episode = environment.start(row)            # the prompt, its tools
    while the model's turn says something to answer:
        messages = await episode.respond(reply)  # tool results, the next observation; [] ends the episode
    await episode.reward()

`trl_contract.py` makes one of TRL's `environment_factory` and `tools`, `openenv.py` and `verifiers.py` of those
packages' environments. None of them sees token ids: `kit/rollout/episodes.py` samples, renders and masks.
"""

from collections import Counter
from typing import Any, Protocol

Message = dict[str, Any]  # of a chat template: role, content, and tool_calls or name


class UnknownEpisode(Exception):
    """An episode whose outcome cannot be known, such as one whose server died: no reward is computed, its tokens are
    masked, and it counts against `environment.max_unknown_fraction`. `reason` is one word for the counts."""

    def __init__(self, reason: str, text: str = ""):
        self.reason = reason
        super().__init__(text or reason)


class Episode(Protocol):
    """One run of an environment on one row of the data."""

    prompt: list[Message]  # the row's prompt with the first observation
    tools: list[dict] | None  # JSON schemas for the chat template; None: no tools
    instance: Any  # passed to reward functions in `environments`; None: there is none
    tool_calls: int  # calls so far
    failures: Counter[str]  # calls that failed so far, by reason: raised, timeout, unknown_tool, arguments, …

    async def respond(self, reply: Message) -> list[Message]:
        """The messages after the model's turn, for it to read; [] ends the episode.

        `reply` is the parsed turn, with `tool_calls` if it has any. The messages have the role tool or user. Raises
        `UnknownEpisode`; any other exception ends the run.
        """

    async def cut_off(self, reply: Message) -> None:
        """The model's last turn if a limit of tokens ended it before its stop token. Nothing answers it."""

    async def reward(self) -> float | None:
        """The environment's own reward, asked for once after the last turn; None: could not be computed. Called only
        if the environment owns one."""

    def close(self) -> None:
        """Release what the episode holds. Called once, after the rewards of its step were computed."""


class Environment(Protocol):
    """Starts the episodes of a run; made and checked before any weight is loaded."""

    name: str  # of its reward in metrics.jsonl
    owns_reward: bool  # its episodes' `reward` becomes one more reward, of weight 1
    takes_tools: bool  # whether any episode has tools

    def start(self, row: dict[str, Any]) -> Episode:
        """Start an episode; called in a thread, several at a time.

        `row` has `prompt` (messages) and every column of the data. Raises `UnknownEpisode`.
        """
