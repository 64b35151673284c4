"""Commands found in documents, held against the programs they name without running any.

Covers python with a file or a module, accelerate launch, make and pytest, in fenced and indented blocks, in inline
code, in comments and in docstrings. An option is checked by the program's own argparse parser: the program is imported
and stopped at the moment it has parsed. Not covered: what a program checks after that, and other people's programs.
"""

import argparse
import ast
import contextlib
import difflib
import importlib.util
import io
import os
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kit.commands import COMMANDS, OWN, module_arguments, unknown
from kit.core.config.load import load_config
from kit.core.errors import KitError

ROOT = Path(__file__).parents[2]
CHECKED = ("python", "accelerate", "make", "pytest", "kit", "vllm")
# Programs of others, accepted as they are; listed so that a misspelled one stands out.
OUTSIDE = ("bash", "cat", "cd", "cp", "curl", "docker", "echo", "export", "git", "grep", "head", "jq", "kill", "less")
OUTSIDE += ("ls", "mkdir", "mv", "nvidia-smi", "pip", "rm", "ruff", "sbatch", "sleep", "source", "srun", "ssh", "tail")
OUTSIDE += ("tmux", "wait", "watch")
SHELLS = ("bash", "sh", "shell", "console")
# Files that a command makes: not there in a fresh checkout.
OUTPUTS = ("runs", "models", "data")
FILE_TYPES = (".yaml", ".yml", ".py", ".txt", ".md", ".toml", ".sh")
ELLIPSIS = "…"
OWN_FILE = "my.yaml"  # the user's copy of a configuration
SOME_CONFIG = ROOT / "recipes/configs/grpo-tiny-nf4-cpu.yaml"


@dataclass(frozen=True)
class Command:
    """One simple command of a document: its words without environment assignments, and where it stands."""

    words: tuple[str, ...]
    where: str
    is_named: bool = False  # inline code: it names the command, and may leave out what the command requires

    @property
    def text(self) -> str:
        return " ".join(self.words)


class _Parsed(BaseException):
    """Raised in place of returning from a parser, so that nothing after it runs."""

    def __init__(self, values: argparse.Namespace, rest: list[str]):
        self.values, self.rest = values, rest


def split(line: str) -> list[list[str]]:
    """The simple commands of a shell line as words, without comments, environment assignments and redirections."""
    # A placeholder such as <name> is one word, not two redirections.
    line = re.sub(r"<(\w[^<>|;]*)>", lambda found: re.sub(r"\W", "_", found[1]), line.removeprefix("$ "))
    line = re.sub(r"\[(--[^\]]*)\]", r"\1", line)  # [--option] of a usage line
    line = re.sub(r"\$\(\(.*?\)\)", "0", line)  # arithmetic, such as a port counted up in a loop
    line = re.sub(r"\s\d?>>?\s*(&\d|\S+)", " ", line)
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;")
    lexer.whitespace_split = True
    commands, words = [], []
    for word in [*lexer, ";"]:
        if word and set(word) <= set("|&;"):
            while words and (words[0] == "do" or re.fullmatch(r"[A-Z_a-z]\w*=.*", words[0])):
                words.pop(0)
            commands += [words] if words and words[0] not in ("for", "done") else []
            words = []
        else:
            words.append(word)
    return commands


def program(words: list[str]) -> str:
    """The first word as a name: python for python3, .venv/bin/python and the like."""
    return re.sub(r"^python3(\.\d+)?$", "python", Path(words[0]).name)


def _joined(lines: list[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Lines with their continuations (a backslash at the end) put together."""
    pending = None
    for number, line in lines:
        start, text = pending or (number, "")
        text += line.strip()
        pending = (start, text[:-1] + " ") if text.endswith("\\") else None
        if pending is None:
            yield start, text
    if pending:
        yield pending


def commands_in_lines(
    lines: list[tuple[int, str]], where: str, all_commands: bool = False, is_named: bool = False
) -> Iterator[Command]:
    """Commands among numbered lines: every line, or those that start like one (the rest is output or prose)."""
    for number, line in _joined(lines):
        is_marked = line.startswith("$ ")
        if not line or line.startswith("#"):
            continue
        try:
            parts = split(line)
        except ValueError:  # a quotation mark of prose
            parts = []
        first = program(parts[0]) if parts else ""
        is_server = first == "vllm" and parts[0][1:2] == ["serve"]
        looks_like = (
            is_server or first in CHECKED[:5] or difflib.get_close_matches(first, CHECKED[:2], n=1, cutoff=0.75)
        )
        # "make" starts sentences too; a command names its target and stands alone or before a comment.
        if first == "make" and not (is_marked or all_commands or re.fullmatch(r"make( [\w=./-]+)*( +#.*)?", line)):
            looks_like = False
        if first == "kit":  # also the library's folder, and a word of sentences
            looks_like = re.match(r"kit (--help|[a-z_]+)( |$)", line) is not None
        if is_marked or all_commands or looks_like:
            yield from (Command(tuple(words), f"{where}:{number}", is_named) for words in parts)


def in_markdown(file: Path) -> Iterator[Command]:
    """Commands of a Markdown file: fenced blocks, blocks indented by four spaces, inline code."""
    where, block, language = _name(file), [], None
    for number, line in enumerate(file.read_text().splitlines(), 1):
        fence = re.match(r"\s*(```+|~~~+)\s*(\w*)", line)
        if fence and language is None:
            language, block = fence[2], []
        elif fence:
            only_marked = language == "console" or any(text.startswith("$ ") for _, text in block)
            kept = [*_marked(block)] if only_marked else block
            yield from commands_in_lines(kept, where, language in SHELLS and not only_marked)
            language = None
        elif language is not None:
            block.append((number, line))
        elif line.startswith("    "):
            yield from commands_in_lines([(number, line)], where)
        else:
            yield from commands_in_lines([(number, span) for span in _inline(line)], where, is_named=True)


def _inline(line: str) -> list[str]:
    """Inline code of several words; a single word names a thing and runs nothing."""
    return [span for span in re.findall(r"`+([^`]+)`+", line) if len(span.split()) > 1]


def _marked(block: list[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """The lines after a `$ ` prompt, with their continuations; the others are output."""
    continues = False
    for number, line in block:
        if continues or line.startswith("$ "):
            yield number, line
            continues = line.endswith("\\")


def in_comments(file: Path) -> Iterator[Command]:
    """Commands in the comment lines of a YAML file, indented after the #."""
    lines = enumerate(file.read_text().splitlines(), 1)
    block = [(number, line[1:]) for number, line in lines if line.startswith("#   ")]
    yield from commands_in_lines(block, _name(file))


def in_docstring(file: Path) -> Iterator[Command]:
    """Commands in a module's docstring: on indented lines, in inline code, and after a colon."""
    lines = [*enumerate((ast.get_docstring(ast.parse(file.read_text())) or "").splitlines(), 1)]
    yield from commands_in_lines([entry for entry in lines if entry[1].startswith("    ")], _name(file))
    for number, line in lines:
        if not line.startswith("    "):
            yield from commands_in_lines([(number, span) for span in _inline(line)], _name(file), is_named=True)
            after_colon = re.findall(r": (python3? .*)$", line)
            yield from commands_in_lines([(number, span) for span in after_colon], _name(file))


def _name(file: Path) -> str:
    return str(file.relative_to(ROOT)) if file.is_relative_to(ROOT) else file.name


def problem(command: Command) -> str | None:
    """What is wrong with a command, or None."""
    words = [*command.words]
    name = program(words)
    checks = {"python": _python, "accelerate": _accelerate, "make": _make, "pytest": _pytest, "kit": _kit}
    check = (checks | {"vllm": _vllm}).get(name)
    if check is None:
        near = difflib.get_close_matches(name, CHECKED + OUTSIDE, n=1, cutoff=0.6)
        found = None if name in OUTSIDE else f"unknown program {name!r}{f', near {near[0]!r}' if near else ''}"
    else:
        found = check(words[1:])
    if found and "required: " in found and (command.is_named or ELLIPSIS in words):
        found = None
    if found and found.endswith(f"unrecognized arguments: {ELLIPSIS}"):  # it stands for arguments of its own
        found = None
    found = found or _missing_file(words)
    return f"{command.where}: {found} in: {command.text}" if found else None


def _missing_file(words: list[str]) -> str | None:
    """The first word that names a file of the repository which does not exist."""
    tops = {entry.name for entry in ROOT.iterdir() if entry.is_dir() and not entry.name.startswith(".")}
    for word in words:
        path = word.split("=")[-1].split("::")[0]
        first, is_metavar = path.split("/")[0], re.fullmatch(r"[A-Z_]+(\.\w+)?", path)
        if (
            path == OWN_FILE
            or path.startswith(("/", "~", "$", "http", "-"))
            or first in OUTPUTS
            or set(path) & set(f"{ELLIPSIS}*?{{ ,")
        ):
            continue
        if is_metavar and not (ROOT / path).exists():
            continue
        if (Path(path).suffix in FILE_TYPES or ("/" in path and first in tops)) and not (ROOT / path).exists():
            return f"no file {path}"
    return None


def _python(words: list[str]) -> str | None:
    if words and words[0] == "-m":
        if not words[1:]:
            return "no module after -m"
        module = words[1]
        if module == "pytest":
            return _pytest(words[2:])
        if module == "accelerate.commands.launch":
            return _accelerate(["launch", *words[2:]])
        return _module(module, words[2:])
    if not words or words[0].startswith("-"):
        return None  # python -c
    if not (ROOT / words[0]).is_file():
        return f"no file {words[0]}"
    return _arguments(ROOT / words[0], words[1:], lambda: _run_file(ROOT / words[0]))


def _run_file(file: Path) -> None:
    """As `python FILE` does, with its folder first on the import path."""
    sys.path.insert(0, str(file.parent))
    runpy.run_path(str(file), run_name="__main__")


def _module(module: str, arguments: list[str]) -> str | None:
    with _restored():
        sys.path.insert(0, str(ROOT))
        try:
            spec = importlib.util.find_spec(module)
            if spec and spec.submodule_search_locations is not None:
                spec = importlib.util.find_spec(f"{module}.__main__")
        except ModuleNotFoundError:
            spec = None
    if spec is None:
        return f"no module {module} that can be run"
    if not Path(spec.origin).is_relative_to(ROOT) or ".venv" in Path(spec.origin).parts:
        return None  # an installed package: python -m venv, python -m pip
    return _arguments(Path(spec.origin), arguments, lambda: runpy.run_module(module, run_name="__main__"))


def _arguments(file: Path, arguments: list[str], run) -> str | None:
    """What the program's own parser says to the arguments, and the strict configuration to its overrides."""
    if not re.search(r"argparse|command_parser|sys\.argv|parse_command|read_command", file.read_text()):
        return f"{_name(file)} takes no arguments" if arguments else None
    parsed = _parse(file, arguments, run)
    if isinstance(parsed, str):
        return parsed
    config = getattr(parsed.values, "config", None)
    # X.yaml stands for any
    if config and (str(config) in (ELLIPSIS, OWN_FILE) or re.fullmatch(r"[A-Z_]+(\.yaml)?", str(config))):
        config = SOME_CONFIG
    if parsed.rest or config:
        try:
            load_config(ROOT / (config or SOME_CONFIG), parsed.rest)
        except KitError as error:
            return str(error).splitlines()[0]
    return None


def _parse(file: Path, arguments: list[str], run) -> "_Parsed | str":
    """Import the program, stop it when it has parsed, and return what it got, or the parser's complaint."""
    whole, known = argparse.ArgumentParser.parse_args, argparse.ArgumentParser.parse_known_args
    depth = []

    def stop_after(parse):
        def parser(self, args=None, namespace=None):
            if depth:  # parse_args calls parse_known_args, and so do subcommands
                return parse(self, args, namespace)
            depth.append(True)
            try:
                result = parse(self, args, namespace)
            finally:
                depth.pop()
            raise _Parsed(*(result if isinstance(result, tuple) else (result, [])))

        return parser

    said = io.StringIO()
    with _restored(), contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        sys.argv = [str(file), *arguments]
        sys.path.insert(0, str(ROOT))
        argparse.ArgumentParser.parse_args = stop_after(whole)
        argparse.ArgumentParser.parse_known_args = stop_after(known)
        try:
            run()
        except _Parsed as parsed:
            return parsed
        except SystemExit as end:
            if end.code == 0:  # --help
                return _Parsed(argparse.Namespace(), [])
            complaint = re.search(r"error: (.*)", said.getvalue())
            return complaint[1] if complaint else f"ended with {end.code}: {said.getvalue()[-200:]}"
        finally:
            argparse.ArgumentParser.parse_args, argparse.ArgumentParser.parse_known_args = whole, known
    raise AssertionError(f"{_name(file)} parsed no arguments")


@contextlib.contextmanager
def _restored() -> Iterator[None]:
    """Leave sys.argv, sys.path and the environment as they were, whatever a program does when it is imported."""
    argv, path, environment = sys.argv, sys.path.copy(), dict(os.environ)
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path
        os.environ.clear()
        os.environ.update(environment)


def launch_arguments(words: list[str]) -> "argparse.Namespace | str":
    """What `accelerate launch` reads from its command line, its config file included; or its complaint."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    said = io.StringIO()
    with _restored(), contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        try:
            arguments = launch_command_parser().parse_args(words)
            if not arguments.config_file or not (ROOT / arguments.config_file).is_file():
                return f"no accelerate config at {arguments.config_file}"
            arguments.config_file = str(ROOT / arguments.config_file)
            return _validate_launch_command(arguments)[0]
        except SystemExit:
            complaint = re.search(r"error: (.*)", said.getvalue())
            return complaint[1] if complaint else said.getvalue()[-200:]
        except ValueError as error:
            return str(error)


def _kit(words: list[str]) -> str | None:
    """What the module behind a command of `kit` says; `…` and `my.yaml` stand for any YAML."""
    name, arguments = (words[0], words[1:]) if words else ("--help", [])
    if name in ("--help", "-h", "completion"):
        return None
    if name == "python":
        return _python(arguments)
    if name not in COMMANDS:
        return str(unknown(name, [*COMMANDS, *OWN]))
    command = COMMANDS[name]
    if command.takes_config:
        arguments = [str(SOME_CONFIG) if word in (ELLIPSIS, OWN_FILE) else word for word in arguments]
    try:
        return _python(["-m", *module_arguments(command, arguments)])
    except KitError as error:
        return str(error)


def _accelerate(words: list[str]) -> str | None:
    if not words or words[0] != "launch":
        return None if words and words[0] in ("config", "env", "test") else "not accelerate launch"
    # accelerate reads --machine_rank as a number; <0 or 1> stands for one.
    words = ["0" if re.fullmatch(r"0_or_1", word) else word for word in words[1:]]
    arguments = launch_arguments(words)
    if isinstance(arguments, str):
        return arguments
    return _python([arguments.training_script, *arguments.training_script_args])


def _make(words: list[str]) -> str | None:
    text = (ROOT / "Makefile").read_text()
    targets = set(" ".join(re.findall(r"^\.PHONY:(.*)", text, re.M)).split())
    for word in words:
        variable, is_set, _ = word.partition("=")
        if is_set and not re.search(rf"^{re.escape(variable)} *[?:]?=", text, re.M):
            return f"the Makefile reads no variable {variable}"
        if not is_set and not word.startswith("-") and word not in targets:
            return f"no make target {word}"
    return None


def _pytest(words: list[str]) -> str | None:
    for word in words:
        path, is_node, test = word.partition("::")
        if path.endswith(".py") or path.startswith("tests"):
            if not (ROOT / path).exists():
                return f"no file {path}"
            if is_node and f"def {test.split('[')[0]}(" not in (ROOT / path).read_text():
                return f"no test {test} in {path}"
    return None


def _vllm(words: list[str]) -> str | None:
    """What vLLM's own parser says to `vllm serve MODEL …`; nothing where vLLM is not installed."""
    if words[:1] != ["serve"]:
        return "not vllm serve"
    try:
        # Where 0.31 keeps it; the option names are the same in the versions around it.
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ImportError:
        return None
    said = io.StringIO()
    options = ["--model", *words[1:]] if words[1:] else []
    with _restored(), contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        try:
            make_arg_parser(FlexibleArgumentParser()).parse_args(options)
        except (SystemExit, ValueError) as error:
            complaint = re.search(r"error: (.*)", said.getvalue())
            return complaint[1] if complaint else str(error)
    return None
