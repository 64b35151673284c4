"""Try a reward before a run, and look for hacking after one.

python -m reward check FILE.jsonl --task math   judge answers that you already know
python -m reward attack --task all              run built-in attempts to be paid for nothing
python -m reward audit runs/tiny                look for signs of hacking in a run's completions
python -m reward.bench                          measure completions scored per second

Each has --help. Exit codes: 0 nothing found, 1 something found, 2 the input cannot be used.
"""

import importlib
import sys

from kit.core.errors import command_parser, run_command

COMMANDS = {
    "check": "verdicts about the rows of a file, with the rule that decided",
    "attack": "run the built-in adversarial suite against a reward",
    "audit": "look for the signatures of hacking in a run directory",
}


def main(argv: list[str] | None = None) -> int | None:
    argv = sys.argv[1:] if argv is None else argv
    parser = command_parser("reward", __doc__)
    parser.add_argument(
        "command", choices=COMMANDS, help="; ".join(f"{name}: {text}" for name, text in COMMANDS.items())
    )
    if argv and argv[0] in COMMANDS:  # the command's own parser reads the rest
        return importlib.import_module(f"reward.{argv[0]}").main(argv[1:])
    parser.parse_args(argv)
    return None


if __name__ == "__main__":
    run_command(main)
