"""HTML fragments for notebooks: no scripts, so that JupyterLab, VS Code and Colab all show them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flowrl.core.graphs.graph import Graph
    from flowrl.draw.picture import Change

_LINE, _FALL, _RISE = "#0969da", (178, 24, 43), (33, 102, 172)
_CELL = "text-align:left;padding:1px 14px 1px 0;font-variant-numeric:tabular-nums;vertical-align:top"
_WIDTH, _HEIGHT = 150, 28


def svg_bundle(subject: Graph | Change, text: str) -> dict[str, str]:
    """The MIME bundle of a graph or a diff: its text and its picture."""
    from flowrl.draw.svg import svg

    return {"text/plain": text, "image/svg+xml": svg(subject)}


def block(title: str, *parts: str) -> str:
    """A title with HTML parts below it."""
    return f"<div style='font-family:system-ui,sans-serif'><p><b>{_text(title)}</b></p>{''.join(parts)}</div>"


def table(rows: Iterable[Sequence[Any]], heading: Sequence[str] = ()) -> str:
    """A table of text and numbers; cells that `sparkline` and the like made are inserted as they are."""
    head = f"<tr>{''.join(f'<th style={_CELL!r}>{_text(cell)}</th>' for cell in heading)}</tr>" if heading else ""
    body = "".join(f"<tr>{''.join(f'<td style={_CELL!r}>{_cell(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table style='border-collapse:collapse;font-size:13px'>{head}{body}</table>"


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def sparkline(values: Sequence[float | None]) -> Html:
    """A small curve; numbers that are missing or not finite leave gaps."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    if len(finite) < 2:
        return Html("")
    low, high = min(finite), max(finite)
    points: list[list[str]] = [[]]
    for i, value in enumerate(values):
        if value is None or not math.isfinite(value):
            points.append([])
            continue
        x = 2 + (_WIDTH - 4) * i / (len(values) - 1)
        y = _HEIGHT - 3 - (_HEIGHT - 6) * ((value - low) / (high - low) if high > low else 0.5)
        points[-1].append(f"{x:.1f},{y:.1f}")
    lines = (
        f'<polyline points="{" ".join(part)}" fill="none" stroke="{_LINE}" stroke-width="1.5"/>' for part in points
    )
    drawn = "".join(line for line, part in zip(lines, points, strict=True) if len(part) > 1)
    return Html(f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img">{drawn}</svg>')


def colored(pieces: Sequence[str], values: Sequence[float | None], titles: Sequence[str]) -> Html:
    """Text in pieces, each with a background by its value: red below 0, blue above, relative to the largest."""
    largest = max((abs(v) for v in values if v is not None and math.isfinite(v)), default=0.0) or 1.0
    spans = []
    for piece, value, title in zip(pieces, values, titles, strict=True):
        share = 0.0 if value is None or not math.isfinite(value) else value / largest
        red, green, blue = _FALL if share < 0 else _RISE
        style = f"background:rgba({red},{green},{blue},{abs(share) / 2:.2f});white-space:pre-wrap"
        spans.append(f'<span style="{style}" title="{_text(title)}">{_text(piece)}</span>')
    return Html("".join(spans))


def visible(text: str) -> str:
    """Text whose control characters and lone surrogates are escapes, except for line breaks and tabs."""
    return "".join(c if c in "\n\t" or c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def named(values: Mapping[str, Any]) -> str:
    """A table of names and values."""
    return table([(name, value) for name, value in values.items()])


def job_html(graph: Graph, title: str, settings: Mapping[str, Any]) -> str:
    """A bound graph: its picture, its backends, and further settings."""
    from flowrl.draw.svg import svg

    backends = {role: str(backend) for role, backend in graph.bindings.items()}
    return block(title, svg(graph), named({**backends, **settings}))


def _cell(value: Any) -> str:
    if isinstance(value, Html):
        return value
    if isinstance(value, float):
        return f"{value:.4g}"
    return _text(str(value))


def _text(text: str) -> str:
    return escape(visible(text))
