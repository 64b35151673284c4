"""Pages and scripts as jinja2 templates."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined


def render(template: Path, values: dict[str, Any], filters: dict[str, Callable], autoescape: bool = False) -> str:
    """A template's text with these values; an unknown name is an error."""
    environment = Environment(
        loader=FileSystemLoader(template.parent),
        undefined=StrictUndefined,
        autoescape=autoescape,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= filters
    return environment.get_template(template.name).render(values)
