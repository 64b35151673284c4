"""Episodes: turns of the model and answers of an environment, token in, token out.

    prompt | turn 1 | answer | turn 2 | answer | turn 3
             1 1 1    0 0 0    1 1 1    0 0 0    1 1 1     sampled

A turn's token ids are appended as they were sampled, with their log-probs and the adapter version that made them. An
answer is rendered and only its ids are appended (`episode_tokens.py`); they are no part of the loss.

All episodes of a step run at once on one event loop, in a thread of its own: a slow tool holds up its own episode. A
`TurnSampler` generates. `Lockstep` is the one for the trainer's process: it generates for all episodes together, when
each of them waits for a turn, so a run repeats itself. On servers every turn is a request of its own.
"""

import asyncio
import concurrent.futures
import queue
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

from kit.core.config.schema import Config
from kit.core.errors import BadInput, CheckFailed
from kit.core.progress import beat
from kit.environments.episode import Environment, Episode, Message, UnknownEpisode
from kit.environments.event_loop import EventLoop
from kit.environments.tools import in_thread
from kit.policy.stop_texts import StopTexts
from kit.rollout.episode_tokens import EpisodeTokens
from kit.rollout.policy_view import Report, Rollouts

DONE, TURNS, LENGTH, UNKNOWN = "done", "turns", "length", "unknown"  # how an episode ended
Result = TypeVar("Result")


class Turn(NamedTuple):
    """A turn of the model, with the token that ended it. `logps` of the sampler; None if the policy itself sampled."""

    token_ids: list[int]  # at least one
    logps: list[float] | None
    version: int  # adapter version that sampled


class TurnSampler(Protocol):
    """Generates the turns of a step's episodes; called on the event loop of the episodes."""

    async def turn(self, episode: int, prompt_ids: list[int], max_tokens: int) -> Turn:
        """The turn that follows `prompt_ids`, of 1 to `max_tokens` tokens. `episode` is the number of the row."""

    def leave(self, episode: int) -> None:
        """The episode takes no more turns; called once for each."""


@dataclass
class EpisodeResult:
    """An episode that has ended. `completion_ids` has all turns and answers, at least one token."""

    prompt: list[Message] = field(default_factory=list)
    prompt_ids: list[int] = field(default_factory=list)
    completion_ids: list[int] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)  # 1 where the model wrote the token
    logps: list[float] | None = None  # of the sampler, 0.0 in answers; None if the policy itself sampled
    versions: list[int] = field(default_factory=list)  # adapter version of each turn
    messages: list[Message] = field(default_factory=list)  # after the prompt
    end: str = UNKNOWN
    unknown: str | None = None  # why the outcome is not known: no reward counts; None: it is known
    told: str = ""  # more about why, for the log
    reward: float | None = None  # the environment's own, if it owns one
    tool_calls: int = 0
    failures: dict[str, int] = field(default_factory=dict)  # failed calls by reason
    environment_s: float = 0.0  # seconds in the environment
    episode: Episode | None = None  # where it ran; closed after the rewards

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"episode": None}  # which stays in its process

    @property
    def turns(self) -> int:
        return len(self.versions)

    @property
    def first_turn(self) -> list[int]:
        """The token ids that the model wrote before the first answer."""
        written = self.sampled.index(0) if 0 in self.sampled else len(self.sampled)
        return self.completion_ids[:written]

    @property
    def is_truncated(self) -> bool:
        """Whether it ended because its tokens did."""
        return self.end == LENGTH

    def add_turn(self, turn: Turn, reply: Message) -> None:
        self._add(turn.token_ids, 1, turn.logps)
        self.versions.append(turn.version)
        self.messages.append(reply)

    def add_answer(self, ids: list[int], messages: list[Message]) -> None:
        self._add(ids, 0, None)
        self.messages += messages

    def _add(self, ids: list[int], sampled: int, logps: list[float] | None) -> None:
        if logps is not None and self.logps is None:
            self.logps = [0.0] * len(self.completion_ids)
        if self.logps is not None:
            self.logps += [0.0] * len(ids) if logps is None else logps
        self.completion_ids += ids
        self.sampled += [sampled] * len(ids)


def rollouts_of(results: list[EpisodeResult], version: int, report: Report, has_logps: bool) -> Rollouts:
    """Episodes as the completions of a step; `version` is the oldest that sampled a turn of any of them. `has_logps`:
    their sampler is not the policy itself."""
    logps = [result.logps or [0.0] * len(result.completion_ids) for result in results] if has_logps else None
    return Rollouts([result.completion_ids for result in results], logps, version, report, episodes=results)


class EpisodeRunner:
    """Runs the episodes of a run, step by step, on one event loop that lives as long as the process: what an async
    tool keeps open stays usable."""

    def __init__(self, environment: Environment, tokens: EpisodeTokens, config: Config):
        self.environment, self.tokens = environment, tokens
        self.limits, self.rollout = config.environment, config.rollout
        self.stop_texts = StopTexts(tokens.tokenizer, config.rollout.stop)
        self._loop: EventLoop | None = None
        # Parsing and rendering hundreds of turns takes seconds; on the loop, their tools would be out of time.
        self._texts = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="episode-texts")

    def submit(
        self, rows: list[dict], sampler: TurnSampler, stop_ids: list[int]
    ) -> "concurrent.futures.Future[list[EpisodeResult]]":
        """Start an episode on each row and return at once; the results come in the order of `rows`. `stop_ids` are
        the tokens that end a turn. The first error ends all episodes."""
        if self._loop is None:
            self._loop = EventLoop("episodes")
        return self._loop.start(self._all(rows, sampler, {*stop_ids}))

    def sample_here(
        self, rows: list[dict], generate: "Generate", version: int, stop_ids: list[int]
    ) -> list[EpisodeResult]:
        """Run an episode on each row with turns that `generate` makes, in this thread, in lockstep."""
        sampler = Lockstep(len(rows), version)
        running = self.submit(rows, sampler, stop_ids)
        sampler.serve(generate, running)
        return running.result()

    async def _all(self, rows: list[dict], sampler: TurnSampler, stops: set[int]) -> list[EpisodeResult]:
        tasks = [asyncio.ensure_future(self._run(number, row, sampler, stops)) for number, row in enumerate(rows)]
        try:
            return await asyncio.gather(*tasks)
        finally:  # a no-op for those that have ended
            for task in tasks:
                task.cancel()

    async def _run(self, number: int, row: dict, sampler: TurnSampler, stops: set[int]) -> EpisodeResult:
        result = EpisodeResult(prompt=row["prompt"])
        try:
            result.episode = episode = await self._timed(result, in_thread(self.environment.start, row))
            result.prompt = episode.prompt
            result.prompt_ids = await self._off_loop(self.tokens.prompt_ids, episode.prompt, episode.tools)
            if len(result.prompt_ids) > self.rollout.max_prompt_length:
                raise UnknownEpisode("prompt_too_long")
            result.end = await self._turns(number, episode, result, sampler, stops)
        except UnknownEpisode as error:
            result.end, result.unknown, result.told = UNKNOWN, error.reason, str(error)
        finally:
            sampler.leave(number)
        if self.environment.owns_reward and result.unknown is None:
            await self._reward(episode, result)
        if result.episode is not None:
            result.tool_calls, result.failures = episode.tool_calls, dict(episode.failures)
        if not result.completion_ids:  # it failed before the first turn
            shown = result.prompt_ids or self.tokens.prompt_ids(row["prompt"], None)
            result.prompt_ids = shown[: self.rollout.max_prompt_length]
            result._add([min(stops)], 0, None)
            result.messages.append({"role": "assistant", "content": ""})
        return result

    async def _turns(
        self, number: int, episode: Episode, result: EpisodeResult, sampler: TurnSampler, stops: set[int]
    ) -> str:
        """Take turns until the episode ends, and return how it ended."""
        longest, limits = self.rollout.max_completion_length, self.limits
        while (room := longest - len(result.completion_ids)) > 0:
            before = result.prompt_ids + result.completion_ids
            most = min(room, limits.max_turn_tokens or room)
            turn = await sampler.turn(number, before, most)
            reply = await self._off_loop(self.tokens.reply, turn.token_ids, before, episode.tools)
            result.add_turn(turn, reply)
            if not self.stop_texts.has_ended(before, turn.token_ids, most, stops):
                await self._timed(result, episode.cut_off(reply))
                return LENGTH
            answer = await self._timed(result, episode.respond(reply))
            if not answer:
                return DONE
            if result.turns == limits.max_turns:
                return TURNS
            answer, ids = await self._off_loop(self._rendered, answer, turn.token_ids[-1] in stops)
            if len(result.completion_ids) + len(ids) > longest:
                return LENGTH
            result.add_answer(ids, answer)
        return LENGTH

    async def _off_loop(self, function: Callable[..., Result], *arguments: Any) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._texts, function, *arguments)

    def _rendered(self, answer: list[Message], is_closed: bool) -> tuple[list[Message], list[int]]:
        """The answer, cut to its limit, and its token ids; `is_closed`: the turn before ended with a stop token."""
        most, longest = self.limits.max_observation_tokens, self.rollout.max_completion_length
        answer = [self.tokens.cut(message, most, longest) for message in answer]
        try:
            return answer, self.tokens.observation_ids(answer, is_closed)
        except ValueError:
            roles = ", ".join(message["role"] for message in answer)
            raise CheckFailed(
                f"the chat template of {self.tokens.name} renders a turn differently when {roles} follow it: "
                f"{answer!r:.300}. Leave such messages out of the environment's answers, or fix the template."
            ) from None

    async def _reward(self, episode: Episode, result: EpisodeResult) -> None:
        try:
            result.reward = await self._timed(result, episode.reward())
        except UnknownEpisode as error:
            result.unknown, result.told = error.reason, str(error)
        else:
            result.unknown = "no_reward" if result.reward is None else None

    async def _timed(self, result: EpisodeResult, work: Awaitable[Result]) -> Result:
        """Wait for the environment; `UnknownEpisode` once the episode has used up `environment.episode_timeout_s`."""
        started = time.monotonic()
        try:
            async with asyncio.timeout(self.limits.episode_timeout_s - result.environment_s) as limit:
                return await work
        except TimeoutError:
            if not limit.expired():
                raise
            raise UnknownEpisode("episode_timeout") from None
        finally:
            beat()
            result.environment_s += time.monotonic() - started


def try_first(runner: EpisodeRunner, row: dict) -> int:
    """Start an episode on a row and end it at once; return the tokens that tools and first observation add to the
    prompt.

    Raises `BadInput` if it cannot start or the prompt is longer than `rollout.max_prompt_length`.
    """
    environment, tokens, most = runner.environment, runner.tokens, runner.rollout.max_prompt_length
    try:
        episode = environment.start(row)
    except UnknownEpisode as error:
        raise BadInput(f"environment: no episode can start on the first problem: {str(error).rstrip('.')}.") from error
    try:
        long = len(tokens.prompt_ids(episode.prompt, episode.tools))
    finally:
        episode.close()
    plain = len(tokens.prompt_ids(row["prompt"], None))
    if long > most:
        raise BadInput(
            f"environment: the prompt of the first problem has {long} tokens, {long - plain} of them from tools and "
            f"first observation; rollout.max_prompt_length is {most}. Raise it."
        )
    return max(0, long - plain)


class TurnAsk(NamedTuple):
    """A turn to take: the number of the episode's row, the ids that it follows, its most tokens."""

    episode: int
    prompt_ids: list[int]
    max_tokens: int
    turn: "asyncio.Future[Turn]"


Generate = Callable[[list[TurnAsk]], list[list[int]]]  # -> token ids of the turns


class Lockstep:
    """A `TurnSampler` that generates in the thread of `serve` once all episodes wait for a turn, in their order."""

    def __init__(self, episodes: int, version: int):
        self.live, self.version = episodes, version
        self._waiting: list[TurnAsk] = []
        self._batches: queue.SimpleQueue[list[TurnAsk] | None] = queue.SimpleQueue()

    async def turn(self, episode: int, prompt_ids: list[int], max_tokens: int) -> Turn:
        ask = TurnAsk(episode, prompt_ids, max_tokens, asyncio.get_running_loop().create_future())
        self._waiting.append(ask)
        self._hand_over()
        return await ask.turn

    def leave(self, episode: int) -> None:
        self.live -= 1
        self._hand_over()

    def _hand_over(self) -> None:
        if self._waiting and len(self._waiting) == self.live:
            self._batches.put(sorted(self._waiting, key=lambda ask: ask.episode))
            self._waiting = []

    def serve(self, generate: Generate, running: "concurrent.futures.Future[Any]") -> None:
        """Generate until the episodes of `running` have ended; an error of `generate` cancels them."""
        running.add_done_callback(lambda _: self._batches.put(None))
        try:
            while (asks := self._batches.get()) is not None:
                made = generate(asks)
                asks[0].turn.get_loop().call_soon_threadsafe(self._answer, asks, made)
        except BaseException:
            running.cancel()
            raise

    def _answer(self, asks: list[TurnAsk], made: list[list[int]]) -> None:
        for ask, ids in zip(asks, made, strict=True):
            if not ask.turn.done():  # cancelled, when another episode raised
                ask.turn.set_result(Turn(ids, None, self.version))
