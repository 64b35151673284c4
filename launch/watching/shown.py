"""Text of the terminal pages: what a run, a model or a server wrote moves no cursor and opens no link."""

from typing import Any

from rich import text

from kit.core.one_line import printable


class Text(text.Text):
    """rich's text, which shows control characters instead of sending them; it reads no markup."""

    def __init__(self, plain: str = "", *arguments: Any, **settings: Any):
        super().__init__(printable(plain), *arguments, **settings)

    def append(self, part: Any, style: Any = None) -> "Text":
        super().append(printable(part) if isinstance(part, str) else part, style)
        return self
