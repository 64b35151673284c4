"""Render a document of sections, tables and pictures as one self-contained HTML page and as Markdown.

All input is plain text: every character with a meaning in HTML or Markdown is escaped here, in one place, so that a
problem or a completion is shown verbatim. The page embeds its pictures and its style; it has no script and no external
link.
"""

import base64
import html
import re
from collections.abc import Sequence
from dataclasses import dataclass

STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 68rem; padding: 1.5rem 1rem 4rem; background: #fff; color: #1a1a1a;
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .3rem; overflow-wrap: anywhere; }
h2 { font-size: 1.25rem; margin: 2.4rem 0 .6rem; padding-top: .6rem; border-top: 1px solid #d9d9d9; }
p, ul { margin: .5rem 0; } li { margin: .25rem 0; } p, li, td, th { overflow-wrap: anywhere; }
.subtitle, figcaption, .caption { color: #555; font-size: .92rem; }
nav { margin: 1rem 0; font-size: .92rem; } nav a { margin-right: .9rem; white-space: nowrap; display: inline-block; }
a { color: #0b5394; }
.scroll { overflow-x: auto; margin: .7rem 0; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .28rem .7rem; text-align: left; vertical-align: top; border-bottom: 1px solid #e6e6e6; }
th { border-bottom: 2px solid #bbb; font-weight: 600; vertical-align: bottom; }
td { min-width: 3rem; } td.long { min-width: 16rem; max-width: 34rem; white-space: pre-wrap; }
th, td.short, td.number { white-space: nowrap; overflow-wrap: normal; } td.number, th.number { text-align: right; }
figure { margin: 1rem 0; } img { max-width: 100%; height: auto; display: block; }
pre { background: #f5f5f5; padding: .6rem .8rem; overflow-x: auto; font-size: .85rem; margin: .5rem 0; }
.missing { border-left: 4px solid #b8860b; background: #fdf8e8; padding: .3rem .9rem; margin: .7rem 0; }
.findings { border-left: 4px solid #0072b2; background: #f0f6fb; padding: .3rem .9rem .3rem 2rem; margin: .7rem 0; }
@media (max-width: 44rem) { figure { overflow-x: auto; } img { max-width: none; width: 44rem; } }
@media print { nav { display: none; } h2 { break-after: avoid; } figure, tr { break-inside: avoid; } }
"""
NUMBER = re.compile(r"[+\-−]?[\d.,]+(e[+\-]?\d+)?( ?[%×])?|–")
LONG = 48  # cells with more characters may wrap


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


@dataclass(frozen=True)
class Picture:
    """An SVG picture; `alt` is its alternative text, `name` its file name beside the Markdown."""

    name: str
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
    names = [_anchor(number, section.title) for number, section in enumerate(document.sections)]
    links = "".join(
        f'<a href="#{name}">{_escape(section.title)}</a>'
        for name, section in zip(names, document.sections, strict=True)
    )
    body = "".join(
        f'<section id="{name}">\n<h2>{_escape(section.title)}</h2>\n{"".join(map(_block_html, section.blocks))}'
        "</section>\n"
        for name, section in zip(names, document.sections, strict=True)
    )
    title = _escape(document.title)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        # If an escape is ever forgotten, a browser still loads and runs nothing.
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
        "style-src 'unsafe-inline'\">\n"
        f"<title>{title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n"
        f'<p class="subtitle">{_escape(document.subtitle)}</p>\n<nav>{links}</nav>\n{body}</body>\n</html>\n'
    )


def to_markdown(document: Document, folder: str) -> str:
    """The document as Markdown; its pictures are expected as <folder>/<name>.svg."""
    lines = [f"# {_plain(document.title)}", "", _plain(document.subtitle), ""]
    for section in document.sections:
        lines += [f"## {_plain(section.title)}", ""]
        for block in section.blocks:
            lines += [*_block_markdown(block, folder), ""]
    return "\n".join(lines)


def _anchor(number: int, title: str) -> str:
    return f"{re.sub(r'[^a-z0-9]+', '-', title.lower()).strip('-') or 'section'}-{number}"


def printable(text: object) -> str:
    """Replace the characters that neither HTML nor SVG can hold."""
    return re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]", "\ufffd", str(text))


def _escape(text: object) -> str:
    return html.escape(printable(text))


def _block_html(block: Block) -> str:
    match block:
        case Text(text):
            return f"<p>{_escape(text)}</p>\n"
        case Bullets(items, findings):
            listed = "".join(f"<li>{_escape(item)}</li>\n" for item in items)
            return f'<ul class="findings">\n{listed}</ul>\n' if findings else f"<ul>\n{listed}</ul>\n"
        case Table():
            return _table_html(block)
        case Picture(_, svg, alt, caption):
            data = base64.b64encode(svg).decode()
            below = f"<figcaption>{_escape(caption)}</figcaption>" if caption else ""
            source = f"data:image/svg+xml;base64,{data}"
            return f'<figure><img alt="{_escape(alt)}" src="{source}">{below}</figure>\n'
        case Commands(lines):
            return f"<pre>{_escape(chr(10).join(lines))}</pre>\n"
        case Missing(what, command):
            return f'<div class="missing"><p>{_escape(what)}</p><pre>{_escape(command)}</pre></div>\n'


def _table_html(table: Table) -> str:
    cells = [[str(cell) for cell in row] for row in table.rows]
    numeric = [
        bool(cells) and all(NUMBER.fullmatch(row[place]) for row in cells) for place in range(len(table.header))
    ]
    kinds = ["number" if right else "text" for right in numeric]
    names = zip(table.header, kinds, strict=True)
    head = "".join(f'<th class="{kind}">{_escape(name)}</th>' for name, kind in names)
    rows = ""
    for row in cells:
        kinds = [
            "number" if right else "long" if len(cell) > LONG else "short"
            for cell, right in zip(row, numeric, strict=True)
        ]
        columns = (f'<td class="{kind}">{_escape(cell)}</td>' for cell, kind in zip(row, kinds, strict=True))
        rows += f"<tr>{''.join(columns)}</tr>\n"
    caption = f'<p class="caption">{_escape(table.caption)}</p>\n' if table.caption else ""
    scroll = '<div class="scroll" tabindex="0">'
    return f"{caption}{scroll}<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}</tbody></table></div>\n"


def _inline(text: object) -> str:
    """Text on one line, with HTML and Markdown syntax escaped."""
    flat = " ".join(printable(text).split())
    return html.escape(re.sub(r"([\\`*\[\]|~])", r"\\\1", flat), quote=False)


def _plain(text: object) -> str:
    """Like `_inline`, for the start of a line, where symbols and numbers would begin a heading or a list."""
    shown = re.sub(r"^([#+\-=])", r"\\\1", _inline(text))
    return re.sub(r"^(\d+)([.)])", r"\1\\\2", shown)


def _fenced(lines: Sequence[str]) -> list[str]:
    text = printable("\n".join(lines))
    fence = "`" * max([3, *(len(found) + 1 for found in re.findall(r"`+", text))])
    return [fence, *text.split("\n"), fence]


def _block_markdown(block: Block, folder: str) -> list[str]:
    match block:
        case Text(text):
            return [_plain(text)]
        case Bullets(items):
            return [f"- {_plain(item)}" for item in items]
        case Table(header, rows, caption):
            body = [f"| {' | '.join(map(_inline, row))} |" for row in [header, *rows]]
            body.insert(1, f"| {' | '.join(['---'] * len(header))} |")
            return [_plain(caption), "", *body] if caption else body
        case Picture(name, _, alt, caption):
            return [f"![{_inline(alt)}]({folder}/{name}.svg)", *(["", _plain(caption)] if caption else [])]
        case Commands(lines):
            return _fenced(lines)
        case Missing(what, command):
            return [_plain(what), "", *_fenced([command])]
