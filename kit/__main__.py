"""One name for the kit's commands: `kit --help` lists them; in a checkout, `python -m kit` is the same.

Each is a module of the kit that reads its arguments itself: `kit merge --run runs/tiny` replaces this process by
`python -m merge --run runs/tiny`, with the same exit code. Where a module takes --config, the YAML can come first, and
so can a name that `kit ls` shows: `kit plan grpo-tiny-nf4-cpu`.
"""

import os
import sys
from textwrap import fill

from kit.commands import COMMANDS, GROUPS, OWN, environment, module_arguments, unknown
from kit.core.errors import DONE, run_command

TITLES = {
    "find": "find and copy a configuration",
    "run": "check, start and watch a run",
    "judge": "merge, evaluate, decide",
    "make": "models and problems",
}
INTRODUCTION = """usage: kit COMMAND [arguments]        kit COMMAND --help

    kit ls                               what there is
    kit cp grpo-tiny-nf4-cpu my.yaml     a configuration of your own
    kit train my.yaml --dry_run          check everything; without the flag, train
"""


def describe() -> str:
    """The text of `kit --help`: every command in a line."""
    lines = [INTRODUCTION]
    for group, commands in GROUPS.items():
        lines += [f"{TITLES[group]}:", *(f"  {name:<15} {command.help}" for name, command in commands.items()), ""]
    lines += ["this command:"]
    for name, text in OWN.items():
        lines.append(fill(text, 100, initial_indent=f"  {name:<15} ", subsequent_indent=" " * 18))
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    name, arguments = (argv[0], argv[1:]) if argv else ("--help", [])
    if name in ("-h", "--help", "help"):
        print(describe())
        return DONE
    if name == "completion":
        from kit.completion import main as completion

        return completion(arguments)
    if name == "python":
        words = arguments
    elif name in COMMANDS:
        words = ["-m", *module_arguments(COMMANDS[name], arguments)]
    else:
        raise unknown(name, [*COMMANDS, *OWN])
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, *words], environment())


if __name__ == "__main__":
    run_command(main)
