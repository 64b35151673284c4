"""Try rewards on the data's own references, before a run loads its base.

A reference given as the answer must be worth more than a wrong answer in the same form; a reward for which no
reference is teaches nothing. Says which rewards cannot be asked in this way. Imports no torch.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kit.core.config.schema import Config
from kit.core.errors import BadInput, CheckFailed
from kit.data.problems import Problem, chat_messages
from reward import MODELS, BoundReward, function_of, is_own
from reward.answer import message_text
from reward.answer_forms import asked_forms, described, forms_for, written
from reward.explain import FROM_A_RUN, Sample, check_callable, explain, judges, shown
from reward.own import RESERVED, is_async
from reward.pool import WorkerPool, shared_pool

EXAMPLES = 3  # references shown in a refusal
OTHERS = 3  # wrong answers, each the reference of another problem, against which a reference is compared
NO_OTHER = "none of them"  # the wrong answer if all references are equal
# Rewards of the kit whose reference is the answer; those of countdown and code hold numbers and tests.
COMPARED = ("math", "gsm8k_strict", "gsm8k_lenient", "arithmetic")


@dataclass(frozen=True)
class Attempt:
    """A reference as it was tried: the text and its reward, and a wrong answer with its reward."""

    form: str
    text: str
    reward: float | None
    wrong: str
    wrong_reward: float | None

    @property
    def is_better(self) -> bool:
        """Whether the reference earned more than the wrong answer that earned least."""
        known = self.reward is not None and self.wrong_reward is not None
        return known and self.reward > self.wrong_reward  # type: ignore[operator]


def try_rewards(
    config: Config, rewards: Iterable[Any], weights: Sequence[float], problems: list[Problem]
) -> list[str]:
    """Ask every reward about references of `problems`, and return one line for each.

    Raises `BadInput` if a reward that is learned from scores no reference above a wrong answer, if a user's function
    does so for more of them than `data.max_bad_fraction`, or if it raises.
    """
    count = min(config.reward.try_references, len(problems))
    if not count:
        return []
    chosen = [problems[place * len(problems) // count] for place in range(count)]
    lines = []
    for reward, weight in zip(rewards, weights, strict=False):
        if not isinstance(reward, BoundReward):
            continue
        name = reward.__name__
        why = "its weight is not positive" if weight <= 0 else _why_untried(config, name, chosen)
        lines.append(f"reward {name} not tried on references: {why}" if why else _tried(config, reward, chosen))
    return lines


def _why_untried(config: Config, name: str, problems: list[Problem]) -> str:
    """Why a reward cannot be asked about a reference; "" if it can."""
    function = function_of(name)
    if config.environment.is_given:
        return "completions are episodes of an environment"
    if config.data.answer_column is None:
        return "the data has no references"
    if name in MODELS:
        return "another model decides"
    if not is_own(name):
        if judges(name) and name not in COMPARED:
            return "its reference is not the answer"
        return "" if judges(name) else "it reads no reference"
    if getattr(function, "group", False):
        return "it compares the completions of a group with each other"
    if is_async(function):
        return "it is async; `python -m reward check FILE.jsonl --task …` asks it about answers that you know"
    if getattr(function, "executes_code", False):
        return "it runs the model's code"
    if not judges(name):
        return "it takes no gold"
    if all(_is_structure(problem.gold) for problem in problems):
        return "the references are objects or lists, not answers"
    columns = _columns(problems)
    try:
        check_callable(name, columns)
    except BadInput:
        return f"it needs arguments that only a run has ({', '.join(FROM_A_RUN)})"
    return ""


def _is_structure(gold: str) -> bool:
    try:
        return isinstance(json.loads(gold), dict | list)
    except (ValueError, RecursionError):
        return False


def _columns(problems: list[Problem]) -> list[str]:
    names = dict.fromkeys(str(name) for problem in problems for name in problem.columns)
    return [name for name in names if name not in RESERVED]


def _tried(config: Config, reward: BoundReward, problems: list[Problem]) -> str:
    """The line of a reward that was tried; raises `BadInput` as `try_rewards`."""
    name = reward.__name__
    found = _attempts(config, reward, problems)
    failed = [place for place, attempt in enumerate(found) if not attempt.is_better]
    count = len(problems)
    if len(failed) == count and all(one.reward is None for one in found):
        return f"WARNING: reward {name} returned None for all of {count} references: nothing is known about it"
    too_many = is_own(name) and len(failed) > config.data.max_bad_fraction * count
    if len(failed) == count or too_many:
        raise BadInput(_refusal(config, name, count, [(problems[place], found[place]) for place in failed]))
    forms = dict.fromkeys(described(one.form) for one in found if one.is_better)
    rest = f", {len(failed)} of them no better than a wrong answer" if failed else ""
    line = f"reward {name} tried on {count} references ({'; '.join(forms)}){rest}"
    asked = asked_forms(message_text(chat_messages(config.data, problems[0])))
    if asked and config.reward.answer_form is None and not any(one.form in asked for one in found):
        line = f"WARNING: {line}; the prompt asks for another form ({'; '.join(map(described, asked))})"
    return line


def _attempts(config: Config, reward: BoundReward, problems: list[Problem]) -> list[Attempt]:
    """The best attempt at each problem's reference: in the first form in which it beats a wrong answer."""
    columns = _columns(problems)
    prompts = [chat_messages(config.data, problem) for problem in problems]
    forms = [forms_for(message_text(prompt), config.reward.answer_form) for prompt in prompts]
    golds = list(dict.fromkeys(problem.gold for problem in problems))
    pool = shared_pool(reward.workers, reward.timeout_s)
    best: dict[int, Attempt] = {}
    for turn in range(max(map(len, forms))):
        left = [
            place
            for place in range(len(problems))
            if turn < len(forms[place]) and not (place in best and best[place].is_better)
        ]
        samples, owners = [], []
        for place in left:
            own = {key: problems[place].columns.get(key) for key in columns}
            at = golds.index(problems[place].gold)
            others = [*golds[at + 1 :], *golds[:at]][:OTHERS] or [NO_OTHER]
            for answer in (problems[place].gold, *others):
                text = written(forms[place][turn], answer)
                samples.append(Sample(text, problems[place].gold, prompts[place], own))
                owners.append(place)
        judged = _asked(samples, pool, reward, problems[0])
        for place in left:
            mine = [index for index, owner in enumerate(owners) if owner == place]
            right, *wrong = [(str(samples[index].completion), judged[index]) for index in mine]
            least = min(wrong, key=lambda pair: math.inf if pair[1] is None else pair[1])
            attempt = Attempt(forms[place][turn], right[0], right[1], least[0], least[1])
            if place not in best or attempt.is_better or _higher(attempt.reward, best[place].reward):
                best[place] = attempt
    return [best[place] for place in range(len(problems))]


def _higher(one: float | None, other: float | None) -> bool:
    return one is not None and (other is None or one > other)


def _asked(samples: list[Sample], pool: WorkerPool, reward: BoundReward, first: Problem) -> list[float | None]:
    """The rewards of the samples; `BadInput` if a user's function raises or returns something else."""
    if not samples:
        return []
    try:
        return [one.reward for one in explain(reward.__name__, samples, pool, reward.options)]
    except CheckFailed as error:
        raise BadInput(
            f"{error} It was tried on references of the data, from {first.source} on, before the base was loaded. Fix "
            "it, or leave this trial out with reward.try_references 0."
        ) from error


def _refusal(config: Config, name: str, count: int, failed: list[tuple[Problem, Attempt]]) -> str:
    examples = "".join(
        f"\n  {problem.source}: reference {shown(problem.gold)}: {shown(one.text)} earns {_number(one.reward)}, the "
        f"wrong answer {shown(one.wrong)} {_number(one.wrong_reward)}"
        for problem, one in failed[:EXAMPLES]
    )
    more = f"\n  … and {len(failed) - EXAMPLES} more" if len(failed) > EXAMPLES else ""
    forms = forms_for(message_text(chat_messages(config.data, failed[0][0])), config.reward.answer_form)
    part = "" if len(failed) == count else f" (data.max_bad_fraction is {config.data.max_bad_fraction:g})"
    fix = (
        f"Set reward.answer_form to the form that {name} reads (e.g. 'Label: {{answer}}'), or fix its comparison"
        if config.reward.answer_form is None
        else f"Fix reward.answer_form ({config.reward.answer_form!r}) or the comparison in {name}"
    )
    return (
        f"reward {name}: {len(failed)} of {count} references earn no more than a wrong answer{part}, so no answer can "
        f"be learned from them:{examples}{more}\nTried {', '.join(map(described, forms))}. {fix}; `python -m reward "
        "check FILE.jsonl --task …` shows what it pays. If the reference is not meant to be paid: "
        "reward.try_references 0."
    )


def _number(reward: float | None) -> str:
    return "None" if reward is None else f"{reward:g}"
