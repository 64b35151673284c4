"""The order of the problems in a run that is resumed.

TRL's sampler draws the order of each pass over the data when the pass begins, from a generator of its own that no
checkpoint holds. transformers begins a resumed run in the pass in which it stopped, and the sampler would give that
pass the order of the first: some of its problems would come twice, others never.
"""

from pathlib import Path
from typing import Any

from recipes.parts.rundir import read_json


class DataOrder:
    """Stands before `GRPOTrainer` among the bases of `trainer.PolicyTrainer`. Written for trl 1.16 and transformers
    5.17; `tests/unit/test_trl_seams.py` holds what is relied on."""

    passes = 0  # whole passes over the data that were made before this process started

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        sampler = super()._get_train_sampler(dataset)
        for _ in range(self.passes):
            next(iter(sampler))  # draws the order of a whole pass
        return sampler


def passes_made(checkpoint: Path) -> int:
    """Whole passes over the data up to a checkpoint."""
    return int(read_json(checkpoint / "trainer_state.json")["epoch"])
