"""Tables of the commands: in the terminal and in Markdown."""

from collections.abc import Iterable, Sequence

from kit.core.one_line import printable


def show_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table. Piped into a file it is 200 columns wide: rich would fold it to 80 and break the paths."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*head)
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    console = Console(soft_wrap=True)
    console.print(table) if console.is_terminal else Console(width=200).print(table)


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]
