"""`rollout.stream_groups`: a step's rows in batches of groups, the first while the servers generate the others.

    generate                groups of this process, as they finish ------------------------------|
    train       wait | reward, reference, forward, backward of batch 1 | ... of batch 2 | wait | last batch | update

All groups are sampled by the policy that the step updates, and the update comes after the last, so a step is as
strictly on-policy as without. Gradients of batches add up to those of the step (`loss.py`); advantages are computed
within a group. Every process gets equally many groups at a time, so that all call the same collectives.
"""

from typing import NamedTuple

import torch
from accelerate import Accelerator

from kit.rollout.policy_view import Rollouts
from kit.train.resampling import Drawn

STREAM, ROWS = "streamed_batches", "streamed_rows"  # the batches, and how many rows of this process they have
LAST = "is_last"  # entry of a batch: whether it is its step's last


class Part(NamedTuple):
    """Rows of this process at `places` of its step."""

    places: list[int]
    drawn: Drawn


def joined(parts: list[Part], accelerator: Accelerator) -> tuple[Drawn, torch.Tensor]:
    """Return all rows of a step in their order, and the indices (R,) that bring values of `parts` into it."""
    order = torch.tensor([place for part in parts for place in part.places]).argsort()
    drawn, first = [part.drawn for part in parts], parts[0].drawn

    def rows(lists: list[list]) -> list:
        together = [one for each in lists for one in each]
        return [together[index] for index in order.tolist()]

    of_rows = {
        name: rows([getattr(one, name) for one in drawn])
        for name in ("problem_ids", "prompts", "prompt_ids", "is_truncated", "completions", "versions", "old_logps")
    }
    made = Rollouts(
        rows([one.made.token_ids for one in drawn]), rows([one.made.logps or [] for one in drawn]), first.made.version
    )
    own = []
    for places, one in parts:
        own.append(one.rewards[accelerator.process_index * len(places) :][: len(places)])
    rewards = torch.cat(own)
    return Drawn(**of_rows, made=made, rewards=accelerator.gather(rewards[order.to(rewards.device)])), order
