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


def messages_of(prompt: Any) -> list[dict[str, Any]]:
    """The messages of a prompt, each with role and text; a prompt that is no list of messages is one message."""
    found = prompt if isinstance(prompt, list) else [] if prompt is None else [prompt]
    return [
        {"role": str(one.get("role", "prompt")), "text": content(one)}
        if isinstance(one, Mapping)
        else {"role": "prompt", "text": as_text(one)}
        for one in found
    ]


def content(message: Mapping[str, Any]) -> str:
    """A message's content, as text."""
    return as_text(message.get("content", ""))


def prompt_text(prompt: Any) -> str:
    """The last message of a prompt, which tells prompts apart."""
    found = messages_of(prompt)
    return str(found[-1]["text"]) if found else ""


def as_text(value: Any) -> str:
    """Text as it is, other data as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
