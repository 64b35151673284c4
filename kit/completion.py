"""Completion script of `kit` for bash and zsh: words that are collected once, so a TAB starts no Python.

    kit completion bash > ~/.local/share/bash-completion/completions/kit
    kit completion zsh >> ~/.zshrc

Completes commands, names of configurations and YAML files, the options of each command, every key of the YAML as
--group.key, and the choices of keys that have some.
"""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from kit.commands import COMMANDS, OWN, SUBCOMMANDS, config_names, environment
from kit.core.config.load import choices_of, leaves
from kit.core.errors import DONE, CheckFailed, command_parser

SHELLS = SUBCOMMANDS["completion"]
# Commands that take keys of the YAML besides those with a configuration.
KEYS_TOO = ("eval", "gate")
HELP_LIMIT_S = 120.0
ZSH = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"
SCRIPT = """# Written by `kit completion`.
_kit() {
    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} words=
    COMPREPLY=()
    if (( COMP_CWORD == 1 )); then
        COMPREPLY=($(compgen -W @commands@ -- "$word"))
        return
    fi
    case $before in
@choices@
        *) case ${COMP_WORDS[1]} in
@options@
        esac ;;
    esac
    if [[ $word == -* || $before == --*.* ]]; then
        COMPREPLY=($(compgen -W "$words" -- "$word"))
        return
    fi
    case ${COMP_WORDS[1]} in
        @subcommands@) (( COMP_CWORD == 2 )) && COMPREPLY=($(compgen -W "$words" -X '-*' -- "$word")) ;;
    esac
    case ${COMP_WORDS[1]} in
        @configured@)
            if (( COMP_CWORD == 2 )) || [[ $before == --config ]]; then
                COMPREPLY+=($(compgen -W @configs@ -- "$word") $(compgen -f -X '!*.yaml' -- "$word"))
            fi ;;
    esac
}
complete -o default -F _kit kit
"""


def options_of(name: str) -> list[str]:
    """The options in `kit NAME --help`; `CheckFailed` if that ends with an error."""
    words = [sys.executable, "-m", *COMMANDS[name].words, "--help"]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=HELP_LIMIT_S)
    if done.returncode != DONE:
        raise CheckFailed(f"kit {name} --help ended with {done.returncode}: {done.stderr[-500:]}")
    return sorted(set(re.findall(r"(?<![\w-])--[a-z]\w*(?![\w.])", done.stdout)))


def script(shell: str) -> str:
    """The completion script for a shell of `SHELLS`."""
    with ThreadPoolExecutor(4) as pool:
        options = dict(zip(COMMANDS, pool.map(options_of, COMMANDS), strict=True))
    keys = [f"--{key}" for key in leaves()]
    lines = []
    for name, found in options.items():
        if COMMANDS[name].takes_config or name in KEYS_TOO:
            found = [*found, *keys]
        lines.append(f"        {name}) words={_quoted([*SUBCOMMANDS.get(name, ()), *found])} ;;")
    lines.append(f"        completion) words={_quoted(SHELLS)} ;;")
    chosen = {key: choices_of(hint, item) for key, (hint, item) in leaves().items()}
    cases = [f"        --{key}) words={_quoted(values)} ;;" for key, values in chosen.items() if values]
    filled = {
        "commands": _quoted([*COMMANDS, *OWN]),
        "choices": "\n".join(cases),
        "options": "\n".join(lines),
        "subcommands": "|".join(SUBCOMMANDS),
        "configured": "|".join([*(name for name, command in COMMANDS.items() if command.takes_config), "cp"]),
        "configs": _quoted(config_names()),
    }
    text = re.sub(r"@(\w+)@", lambda found: filled[found[1]], SCRIPT)
    return ZSH + text if shell == "zsh" else text


def _quoted(words: Iterable) -> str:
    return shlex.quote(" ".join(map(str, words)))


def main(argv: list[str]) -> int:
    parser = command_parser("kit completion", __doc__)
    parser.prog = "kit completion"
    parser.add_argument("shell", choices=SHELLS)
    print(script(parser.parse_args(argv).shell), end="")
    return DONE
