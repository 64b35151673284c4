"""What the trained policy of a run is called: GRPO, or distilled where it learned from a teacher.

In paths and in cells it is `grpo` in both: the row beside `base`.
"""

from merge.card import is_distilled

GRPO, DISTILLED = "GRPO", "distilled"


def trained_name(config: dict) -> str:
    """The name of a run's trained policy in headings and columns; `config` is the one of its config.json."""
    return DISTILLED if is_distilled(config) else GRPO


def name_of(result: dict) -> str:
    """The same of an eval.json; one that does not say it was written when there was GRPO only."""
    return result.get("trained_policy", GRPO)


def policy_name(policy: str, trained: str) -> str:
    """A row of the matrix, `base` or `grpo`, as people read it."""
    return trained if policy == "grpo" else policy


def in_sentence(trained: str) -> str:
    """The trained policy as the subject of a sentence."""
    return trained if trained == GRPO else f"the {trained} policy"
