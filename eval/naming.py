"""Display name of a run's trained policy: GRPO, distilled if it learned from a teacher, fine-tuned if from
demonstrations, imported if another program trained it.

In paths and cells it is `grpo` either way: the row beside `base`.
"""

from merge.card import GRPO, trained_by


def trained_name(config: dict) -> str:
    """Name of a run's trained policy in headings and columns; `config` is that of its config.json."""
    return trained_by(config)


def name_of(result: dict) -> str:
    """The same for an eval.json; one without the name dates from when there was only GRPO."""
    return result.get("trained_policy", GRPO)


def policy_name(policy: str, trained: str) -> str:
    """Display name of a row of the matrix, `base` or `grpo`."""
    return trained if policy == "grpo" else policy


def in_sentence(trained: str) -> str:
    """The trained policy as the subject of a sentence."""
    return trained if trained == GRPO else f"the {trained} policy"
