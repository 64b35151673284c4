"""`data.format: module:function`, a user's function that makes the prompt of a row: import it, call it, check it.

It gets a row with all its columns and returns the user's message as text, or messages `[{role, content}]`; None skips
the row. `data.system_prompt` and `data.prompt_suffix` are added as to any question. Whoever reads problems reads them
through it: training, held-out measurements, evaluation, the gate, leaks, calibration and pass rates.
"""

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kit.core.errors import BadInput, KitError
from reward.own import imported_taking, source_hash

if TYPE_CHECKING:
    from kit.core.config.schema import Config, DataConfig
    from kit.core.run_directory import RunDir

KEY, RECORDED = "data.format", "own_format"  # the key, and the hash of its source in config.json
TRIED_TWICE = 100  # rows whose prompts must come out equal a second time


class Formatter:
    """The user's function. A prompt that it cannot make is a `BadInput` that names the row."""

    def __init__(self, name: str, function: Callable[[dict], Any]):
        self.name, self.function, self._calls = name, function, 0

    def __call__(self, source: str, row: dict) -> str | list[dict] | None:
        """The prompt of the row at `source`, "file:line"; None: the row is skipped. The first rows are asked twice:
        problems are known by their prompts, so these must not depend on chance or on the order of the rows."""
        made = self._call(source, row)
        self._calls += 1
        if self._calls <= TRIED_TWICE and self._call(source, row) != made:
            raise BadInput(
                f"{source}: {KEY} {self.name!r} makes another prompt when it is called again. Draw at random from a "
                "seed that depends on the row, so that a resume and an evaluation get the same problems."
            )
        return made

    def _call(self, source: str, row: dict) -> str | list[dict] | None:
        try:
            made = self.function(copy.deepcopy(row))
        except KitError:
            raise
        except Exception as error:  # a user's function may raise anything
            said = " ".join(str(error).split())[:300] or "no message"
            raise BadInput(
                f"{source}: {KEY} {self.name!r} raised {type(error).__name__}: {said.rstrip('.')}. The row has "
                f"{', '.join(map(str, row)) or 'no columns'}."
            ) from error
        if made is None or isinstance(made, str):
            return made
        if isinstance(made, list) and made and all(isinstance(one, dict) for one in made):
            return made
        raise BadInput(
            f"{source}: {KEY} {self.name!r} returned {made!r:.60}, a {type(made).__name__}. Return the user's message "
            "as text, messages [{role, content}], or None to skip the row."
        )


def load_format(data: "DataConfig") -> Formatter | None:
    """The function of `data.format`; None if not set. Raises `BadInput` if it cannot be imported or called."""
    name = data.format
    if name is None:
        return None
    return Formatter(name, imported_taking(name, KEY, 1, "one argument, the row"))


def format_hash(config: "Config") -> dict[str, str]:
    """{`RECORDED`: hash of the file of the run's function}; empty without one."""
    own = load_format(config.data)
    return {RECORDED: source_hash(own.function)} if own else {}


def check_format(config: "Config", run: "RunDir") -> None:
    """Raise `BadInput` if the run to resume was started with another source of its function."""
    if run.replaces or not run.base_file.exists():
        return
    before, now = run.facts().get(RECORDED), format_hash(config).get(RECORDED)
    if before != now:
        raise BadInput(
            f"--resume: the file of {KEY} {config.data.format!r} has changed since {run.path} was started (hash "
            f"{before}, now {now}). Restore it, or start another run, from an adapter of this one with "
            "policy.init_adapter."
        )
