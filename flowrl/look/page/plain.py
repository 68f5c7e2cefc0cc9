"""Values of a run as the page's JSON: short numbers, and text that any encoder takes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

DIGITS = 6
"""Significant digits of a number on the page."""


def short(value: Any) -> Any:
    """A number with `DIGITS` significant digits; NaN and infinity as None."""
    if isinstance(value, bool) or not isinstance(value, float):
        return value
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None


def shortened(values: Iterable[Any]) -> list[Any]:
    """A column for a chart or a table."""
    return [short(value) for value in values]


def dumps(value: Any) -> bytes:
    """JSON in ASCII, so that lone surrogates, U+2028 and control characters arrive as they were."""
    return json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode()


def messages_of(text: str | None) -> list[dict[str, Any]]:
    """The messages of a prompt, each with role and text; a prompt that is no list of messages is one without a role."""
    try:
        found = json.loads(text or "null")
    except ValueError:
        found = text
    if not isinstance(found, list):
        found = [] if found is None else [{"role": "prompt", "content": found}]
    return [
        {"role": str(one.get("role", "prompt")), "text": content(one)} if isinstance(one, Mapping) else {"role": "prompt", "text": str(one)}
        for one in found
    ]


def content(message: Mapping[str, Any]) -> str:
    """A message's content, as text."""
    found = message.get("content", "")
    return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)


def prompt_text(text: str | None) -> str:
    """The last message of a prompt, which tells prompts apart."""
    found = messages_of(text)
    return found[-1]["text"] if found else ""


def plain_text(text: str | None) -> str | None:
    """A value that is stored as JSON, as text: a string without its quotes."""
    if text is None:
        return None
    try:
        found = json.loads(text)
    except ValueError:
        return text
    return found if isinstance(found, str) else text
