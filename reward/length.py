"""Reward "length": a penalty for completions near the length limit, with a soft zone before it (DAPO, equation 13)."""

from typing import Any

from reward.score import Messages, Prompts, Rewards


def length(
    prompts: Prompts,
    completions: Messages,
    *,
    completion_ids: list[list[int]] | None = None,
    max_length: int = 0,
    soft_zone: int = 0,
    **_: Any,
) -> Rewards:
    """0.0 up to `max_length - soft_zone` tokens, then linearly down to -1.0 at `max_length`, and -1.0 beyond.

    Lengths are counted in `completion_ids`, the tokens that TRL passes. `max_length` must be set (use
    rollout.max_completion_length). DAPO's values are 20,480 with a zone of 4,096.
    """
    check_options(max_length, soft_zone)
    if completion_ids is None or len(completion_ids) != len(completions):
        raise ValueError("reward 'length' needs completion_ids, one list of tokens per completion.")
    return [_penalty(len(tokens), max_length, soft_zone) for tokens in completion_ids]


def _penalty(tokens: int, max_length: int, soft_zone: int) -> float:
    if tokens <= max_length - soft_zone:
        return 0.0
    return -1.0 if tokens >= max_length else (max_length - soft_zone - tokens) / soft_zone


def check_options(max_length: int, soft_zone: int, **_: Any) -> None:
    """Raise `ValueError` unless there is a limit and the zone fits below it."""
    if max_length < 1 or not 0 <= soft_zone <= max_length:
        raise ValueError(
            f"max_length ({max_length}) must be set, to rollout.max_completion_length for example, and soft_zone "
            f"({soft_zone}) must be 0 to max_length."
        )


length.check_options = check_options  # type: ignore[attr-defined]
