"""Command-line options that several commands of `python -m eval` share."""

import argparse
from pathlib import Path
from typing import Any

from eval.tasks import TASKS
from kit.core.own_code import add_flag
from merge.options import add_run


def command_parser(
    command: str, description: str, out: str, takes_adapter: bool = False, may_import: bool = True, **settings: Any
) -> argparse.ArgumentParser:
    """A parser for `python -m eval <command>` with --run and --out; `out` is the help text of the latter.

    With `takes_adapter`, an adapter that no run of this kit trained can be named instead of a run; with `may_import`,
    code that the run's configuration names may be allowed.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m eval {command}".rstrip(),
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        **settings,
    )
    if takes_adapter:
        add_run(parser)
    else:
        parser.add_argument("--run", required=True, help="run directory, e.g. runs/tiny")
        if may_import:
            add_flag(parser)
    named = ", which it names without --run" if takes_adapter else ""
    parser.add_argument("--out", type=Path, help=f"{out}; default: the run directory{named}")
    return parser


def add_configuration(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", help="YAML to use instead of the run's own configuration")


def add_problem_options(parser: argparse.ArgumentParser) -> None:
    """Options on which problems are asked and how often, shared by the matrix and the measurement of one endpoint."""
    parser.add_argument("--max_problems", type=int, help="held-out problems per cell; default eval.max_problems")
    parser.add_argument("--samples", type=int, help="completions per problem; default eval.samples")
    parser.add_argument("--batch_size", type=int, help="prompts generated together; default eval.batch_size")
    parser.add_argument("--task", help=f"other problems than the run's: {', '.join(TASKS)}; written to eval-<task>/")
    parser.add_argument("--data", type=Path, help="file or folder with the problems of --task; default its hub id")
    parser.add_argument(
        "--allow_code_execution", action="store_true", help="let mbpp and humaneval run in the sandbox"
    )
