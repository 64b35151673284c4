"""List the configurations of the kit, and copy one.

    python -m recipes.catalogue ls              # name, recipe, hardware, what was measured
    python -m recipes.catalogue ls tiny cpu     # those with both words in their row
    python -m recipes.catalogue cp grpo-tiny-nf4-cpu my.yaml

Hardware and measurements are the lines `# Hardware:` and `# Measured:` of each YAML in recipes/configs. `cp` never
overwrites a file. Exit code: 0 done, 2 bad input.
"""

import json
import re
import sys
from pathlib import Path
from typing import NamedTuple

from kit.commands import CONFIGS, config_names, config_path
from kit.core.config.load import load_config
from kit.core.config.recipe import recipe_of
from kit.core.errors import DONE, BadInput, command_parser, did_you_mean, run_command

FACTS = ("Hardware", "Measured")
UNSTATED = "not stated"


class Entry(NamedTuple):
    """A configuration of the kit as `ls` shows it."""

    name: str
    recipe: str
    hardware: str
    measured: str


def read_entry(path: Path) -> Entry:
    """The row of a configuration; a fact that its header does not state is `not stated`."""
    facts = dict(re.findall(rf"^# ({'|'.join(FACTS)}): (.+?)\.?$", path.read_text(), re.M))
    recipe = Path(recipe_of(load_config(path))).name
    return Entry(path.stem, recipe, *(facts.get(name, UNSTATED) for name in FACTS))


def entries(words: list[str] = []) -> list[Entry]:  # noqa: B006  (never changed)
    """The configurations whose row contains every word, whatever its case."""
    found = [read_entry(CONFIGS / f"{name}.yaml") for name in config_names()]
    return [one for one in found if all(word.lower() in " ".join(one).lower() for word in words)]


def show(found: list[Entry]) -> None:
    """Print a table that fits the terminal; elsewhere, one line per configuration, separated by tabs."""
    if not sys.stdout.isatty():
        print("\n".join("\t".join(one) for one in found))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("configuration", no_wrap=True)
    for title in ("recipe", "hardware", "measured"):
        table.add_column(title, overflow="fold")
    for one in found:
        table.add_row(one.name, one.recipe, one.hardware, one.measured)
    Console(highlight=False, markup=False).print(table)


def copy_config(name: str, target: Path) -> None:
    """Copy a configuration to `target`; `BadInput` if the file exists or its folder does not."""
    if target.is_dir():
        target /= Path(name).with_suffix(".yaml").name
    if target.exists():
        raise BadInput(f"{target} exists already. Choose another name, or remove it first.")
    if not target.parent.is_dir():
        raise BadInput(f"no directory {target.parent} for {target.name}. Create it first.")
    target.write_text(Path(config_path(name)).read_text())


def main(argv: list[str] | None = None) -> int:
    parser = command_parser("recipes.catalogue", __doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="{ls,cp}")
    listing = commands.add_parser("ls", help="list the configurations", allow_abbrev=False)
    listing.add_argument("words", nargs="*", help="show the configurations with all of these words in their row")
    listing.add_argument("--json", action="store_true", help="print one JSON object per configuration")
    copying = commands.add_parser("cp", help="copy a configuration", allow_abbrev=False)
    copying.add_argument("name", help="a configuration that ls shows, or a file")
    copying.add_argument("target", type=Path, help="file to write, e.g. my.yaml; must not exist")
    flags = parser.parse_args(argv)
    if flags.command == "cp":
        copy_config(flags.name, flags.target)
        print(f"{flags.target} written. Change run.name, then: kit train {flags.target} --dry_run")
        return DONE
    found = entries(flags.words)
    if not found:
        hint = did_you_mean(flags.words[0], {part for name in config_names() for part in name.split("-")})
        raise BadInput(f"no configuration has {' and '.join(flags.words)} in its row.{hint}")
    if flags.json:
        print("\n".join(json.dumps(one._asdict(), ensure_ascii=False) for one in found))
    else:
        show(found)
    return DONE


if __name__ == "__main__":
    run_command(main)
