"""Select the held-out problems of a run and check that none of them was trained on."""

import hashlib
import json
import random
from collections.abc import Sequence

from kit.core.config.schema import DataConfig
from kit.core.errors import BadInput, CheckFailed
from kit.data.leaks import find_leaks
from kit.data.problems import Problem, load_problems

_SHOWN = 3


def held_out(
    data: DataConfig, max_problems: int, training: DataConfig | None = None, reward: str | None = None
) -> list[Problem]:
    """Return at most `max_problems` held-out problems of a data configuration, in file order.

    The selection depends only on the problem set, not on the run's seed, so two runs are measured on the same
    problems. `training` is the data configuration that the run was trained with, if it is another one; `reward` is
    what judges them (`eval.reward`): a reward of the kit must be able to compare with every reference. `CheckFailed`
    if any held-out problem, selected or not, is among the training problems, where these are known.
    """
    from reward import REWARDS, gold_checks

    if max_problems < 1:
        raise BadInput(f"eval.max_problems must be at least 1, it is {max_problems}.")
    problems = load_problems(data, "eval", gold_checks([reward] if reward in REWARDS else []))
    if not problems:
        raise BadInput("there are no held-out problems. Set data.eval_split or data.eval_path.")
    trained_on = data if training is None else training
    if names_training(trained_on):
        check_disjoint(problems, load_problems(trained_on, "train"))
    else:
        print("note: no training problems are named (data.path or data.id), so leaks cannot be found", flush=True)
    # The first N of a sorted file would be its easiest, or one topic.
    chosen = sorted(random.Random(0).sample(range(len(problems)), min(max_problems, len(problems))))
    return [problems[index] for index in chosen]


def names_training(data: DataConfig) -> bool:
    """Whether a data configuration names training problems; that of an imported adapter may not."""
    return bool(data.path or data.id)


def check_disjoint(held_out: Sequence[Problem], training: Sequence[Problem]) -> None:
    """Raise `CheckFailed` with examples if a held-out question is a training question or appears in one verbatim."""
    leaked = find_leaks(held_out, training)
    if leaked:
        shown = "\n".join(
            f"  {problem.source} {'is' if whole else 'is inside'} {other.source}: {problem.question[:100]!r}"
            for problem, other, whole in leaked[:_SHOWN]
        )
        raise CheckFailed(
            f"{len(leaked)} of {len(held_out)} held-out problems are training problems, so their accuracy measures "
            f"memorization:\n{shown}\nRemove them from one split, or point data.eval_path at other problems."
        )


def problems_hash(problems: Sequence[Problem]) -> str:
    """BLAKE2b-128 of the problems' ids, questions and answers in order."""
    rows = [[problem.id, problem.question, problem.gold] for problem in problems]
    return hashlib.blake2b(json.dumps(rows).encode(), digest_size=16).hexdigest()
