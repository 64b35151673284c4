"""Problems of a resumed run, in the order of the uninterrupted one.

TRL's sampler draws the order of each pass over the data when the pass begins, from its own generator, whose state is
not checkpointed. transformers resumes in the pass in which the run stopped, and the sampler would give that pass the
order of the first: some of its problems would come twice, others never.

An order consists of indices into the data, so a run can only be resumed on the problems that it was started on.
"""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from kit.core.config.checks import is_main_process
from kit.core.errors import BadInput
from kit.core.file_kinds import DATA, TRAINER_STATE
from kit.core.run_directory import RunDir, write_record
from kit.core.run_files import read_object

if TYPE_CHECKING:
    from datasets import Dataset
    from torch.utils.data import Sampler


def skip_passes(sampler: "Sampler", passes: int) -> None:
    """Advance a sampler by whole passes over the data, so that its next order is that of the following pass."""
    for _ in range(passes):
        next(iter(sampler))


def passes_made(checkpoint: Path) -> int:
    """Whole passes over the data up to a checkpoint."""
    return int(read_object(checkpoint / "trainer_state.json", TRAINER_STATE)["epoch"])


def _facts(dataset: "Dataset") -> dict[str, int | str]:
    """How many problems a training set has, and a hash of them in their order: an id is one of question and answer."""
    ids = list(dataset["problem_id"])
    return {"problems": len(ids), "blake2b": hashlib.blake2b("\n".join(ids).encode(), digest_size=32).hexdigest()}


def check_problems(run: RunDir, dataset: "Dataset") -> None:
    """Raise `BadInput` if the run was started on other problems, or on these in another order. A no-op without a
    record: in a new run, and in one of a version that wrote none."""
    if run.replaces or not run.data_file.exists():
        return
    before, now = read_object(run.data_file, DATA), _facts(dataset)
    if before != now:
        raise BadInput(
            f"--resume: {run.path} was started on {before['problems']:,} training problems, and the "
            f"{now['problems']:,} that the config names now differ from them, or are in another order: the file or "
            "data set has changed, or the tokenizer, which decides which prompts fit. Steps would repeat some "
            "problems and skip others. Restore the data, or start another run, from an adapter of this one with "
            "policy.init_adapter."
        )


def record_problems(run: RunDir, dataset: "Dataset") -> None:
    """Write `data.json`, which `check_problems` compares with on resume; in the main process only."""
    if is_main_process():
        write_record(run.data_file, _facts(dataset))
