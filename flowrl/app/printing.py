"""What commands print: tables, JSON, and text of models without terminal control."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def print_table(out: Console, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print rows of text under headings."""
    table = Table()
    for heading in headings:
        table.add_column(heading, no_wrap=heading == headings[0], overflow="fold")
    for row in rows:
        table.add_row(*(escape(printable(cell)) for cell in row))
    if not out.is_terminal:  # scripts need full names and lines
        table.width = out.measure(table, options=out.options.update(max_width=1000)).maximum
    out.print(table)


def print_json(out: Console, value: Any) -> None:
    """Print data as JSON."""
    out.file.write(json.dumps(value, indent=1, default=str) + "\n")


def printable(text: str) -> str:
    """Text without terminal control: control characters are escaped as in Python, ``\\x1b``."""
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def excerpt(text: str, characters: int = 60) -> str:
    """The beginning of a text, in one line."""
    line = text.replace("\n", "\\n")
    return line if len(line) <= characters else f"{line[: characters - 1]}…"


def number(value: Any) -> str:
    """A number as text; nothing for a missing one."""
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
