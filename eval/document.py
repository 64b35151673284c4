"""Render a document of sections, tables and pictures as one self-contained HTML page and as Markdown.

All input is plain text: every character with a meaning in HTML or Markdown is escaped here and in templates/, so that
a problem or a completion is shown verbatim. The page embeds its pictures and its style; it has no script and no
external link.
"""

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kit.core.one_line import as_paragraph, in_markdown, printable

NUMBER = re.compile(r"[+\-−]?[\d.,]+(e[+\-]?\d+)?( ?[%×])?|–")


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str


@dataclass(frozen=True)
class Bullets:
    """A list; `findings` highlights it as the document's findings."""

    items: Sequence[str]
    findings: bool = False


@dataclass(frozen=True)
class Table:
    """Rows of cells under a header; a column whose cells are all numbers is right-aligned."""

    header: Sequence[str]
    rows: Sequence[Sequence[object]]
    caption: str = ""

    @property
    def numeric(self) -> list[bool]:
        """By column, whether every cell is a number."""
        columns = zip(self.header, *self.rows, strict=True)
        return [len(cells) > 0 and all(NUMBER.fullmatch(str(cell)) for cell in cells) for _, *cells in columns]


@dataclass(frozen=True)
class Picture:
    """An SVG picture; `alt` is its alternative text, `file` its name beside the Markdown."""

    file: str
    svg: bytes
    alt: str
    caption: str = ""


@dataclass(frozen=True)
class Commands:
    """Command lines, one per line."""

    lines: Sequence[str]


@dataclass(frozen=True)
class Missing:
    """A missing part and the command that makes it."""

    what: str
    command: str


Block = Text | Bullets | Table | Picture | Commands | Missing


@dataclass(frozen=True)
class Section:
    """A heading and the blocks under it."""

    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Document:
    """A title and sections."""

    title: str
    subtitle: str
    sections: Sequence[Section]

    def pictures(self) -> list[Picture]:
        return [block for section in self.sections for block in section.blocks if isinstance(block, Picture)]


def to_html(document: Document) -> str:
    """The document as one self-contained HTML page."""
    return _render("page.html.jinja", document=document)


def to_markdown(document: Document, folder: str = "") -> str:
    """The document as Markdown; `folder` is put before the name of every picture."""
    return _render("page.md.jinja", document=document, folder=folder)


def _render(template: str, **values: object) -> str:
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=".html." in template,
        finalize=lambda value: value if isinstance(value, Markup) else printable(value),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {
        "kind": lambda block: type(block).__name__,
        "anchor": _anchor,
        "base64": _base64,
        "inline": in_markdown,
        "plain": as_paragraph,
        "fenced": _fenced,
    }
    return environment.get_template(template).render(values)


def _anchor(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") or "section"


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _fenced(lines: Sequence[str]) -> str:
    text = printable("\n".join(lines))
    fence = "`" * max([3, *(len(found) + 1 for found in re.findall(r"`+", text))])
    return f"{fence}\n{text}\n{fence}"
