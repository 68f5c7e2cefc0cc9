"""The trials of a sweep as SVG: a panel for each varied setting, the value of every trial over it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

from flowrl.draw.colors import INK, STROKES, colors

_WIDTH, _HEIGHT = 320, 260  # of a panel, in pixels
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 44, 48
_FONT = "system-ui,-apple-system,'Segoe UI','DejaVu Sans',sans-serif"


class Point(NamedTuple):
    """A trial: its settings as text by path, its value, and the values of its seeds."""

    settings: Mapping[str, str]
    value: float
    values: Sequence[float]


def svg(metric: str, paths: Sequence[str], points: Sequence[Point], best: int) -> str:
    """The picture as a stand-alone SVG document.

    Args:
        metric: the name of the value.
        paths: the settings that vary.
        best: the index of the best point, which is marked.
    """
    width = _WIDTH * max(1, len(paths))
    panels = [part for i, path in enumerate(paths) for part in _panel(i * _WIDTH, path, points, best)]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {_HEIGHT}" width="{width}" '
            f'height="{_HEIGHT}" font-family="{_FONT}" font-size="12">',
            f"<title>{escape(metric)} of {len(points)} trials</title>",
            '<rect width="100%" height="100%" fill="#ffffff"/>',
            _text(_LEFT, 20, metric, "start", INK),
            *panels,
            "</svg>",
            "",
        ]
    )


def _panel(left: float, path: str, points: Sequence[Point], best: int) -> list[str]:
    """The axes and the points of one setting."""
    places, ticks = _places([point.settings[path] for point in points])
    numbers = [number for point in points for number in (point.value, *point.values)]
    low, high = min(numbers), max(numbers)
    spread = high - low or 1.0

    def x(place: float) -> float:
        return left + _LEFT + 12 + (_WIDTH - _LEFT - _RIGHT - 24) * place

    def y(number: float) -> float:
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (high - number) / spread

    parts = []
    for number in sorted({low, (low + high) / 2, high}):
        parts.append(f'<path d="M{left + _LEFT} {y(number):.1f}h{_WIDTH - _LEFT - _RIGHT}" stroke="#d0d7de"/>')
        parts.append(_text(left + _LEFT - 6, y(number) + 4, f"{number:.4g}", "end"))
    parts += [_text(x(place), _HEIGHT - _BOTTOM + 18, label, "middle") for place, label in ticks]
    parts.append(_text(left + (_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 10, path, "middle", INK))
    for i, (place, point) in enumerate(zip(places, points, strict=True)):
        color = colors(1 if i == best else 0)[1]
        if len(point.values) > 1:
            ends = f"{y(min(point.values)):.1f}V{y(max(point.values)):.1f}"
            parts.append(f'<path d="M{x(place):.1f} {ends}" stroke="{color}" stroke-width="1.5"/>')
        parts.append(f'<circle cx="{x(place):.1f}" cy="{y(point.value):.1f}" r="4" fill="{color}"/>')
    return parts


def _places(texts: Sequence[str]) -> tuple[list[float], list[tuple[float, str]]]:
    """Each value's place on its axis, between 0 and 1, and the labels of the axis.

    Numbers over more than a factor of 20 are on a logarithmic axis; other texts in the order of their first trial.
    """
    try:
        numbers = [float(text) for text in texts]
    except ValueError:
        order = list(dict.fromkeys(texts))
        at = {text: i / max(1, len(order) - 1) if len(order) > 1 else 0.5 for i, text in enumerate(order)}
        return [at[text] for text in texts], [(at[text], text) for text in order]
    is_log = min(numbers) > 0 and max(numbers) > 20 * min(numbers)
    scaled = [math.log(number) if is_log else number for number in numbers]
    low, spread = min(scaled), max(scaled) - min(scaled) or 1.0
    ends = {(value - low) / spread: f"{number:.3g}" for value, number in zip(scaled, numbers, strict=True)}
    shown = sorted(ends.items()) if len(ends) <= 4 else [min(ends.items()), max(ends.items())]
    return [(value - low) / spread for value in scaled], shown


def _text(x: float, y: float, text: str, anchor: str, color: str = STROKES["data"]) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}">{escape(text)}</text>'
