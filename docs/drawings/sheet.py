"""A sheet to draw on: boxes, arrows and texts as SVG, legible at the width of a phone."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from itertools import pairwise

from flowrl.draw.colors import INK, STROKES, colors

Point = tuple[float, float]

WIDTH = 480
"""Pixels; a phone shows about three quarters of it."""
LINE = 20
"""Pixels from a line of text to the next."""
CODE_FONT = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"
_FONT = "system-ui,-apple-system,'Segoe UI',Roboto,'Noto Sans','Noto Sans CJK SC','PingFang SC',sans-serif"
_SIZE, _CODE_SIZE = 14.5, 13.5  # pixels
_MARGIN = 5  # pixels between a text and the line of its box
ROLES = {"rollout": 0, "actor": 1, "ref": 2, "critic": 3}
"""The index of the color of each role, as in the picture of the README."""
MUTED = STROKES["data"]


class Code(str):
    """A text that is not translated, in a monospaced font."""


def width(text: str) -> float:
    """At most so many pixels wide is a line of text, in common fonts."""
    size, narrow = (_CODE_SIZE, 0.61) if isinstance(text, Code) else (_SIZE, 0.6)
    return sum(size * (1.0 if ord(char) > 0x2E80 else narrow) for char in text)


class Sheet:
    """A picture of a fixed size.

    Args:
        title: for those who do not see it.
        height: in pixels.
    """

    def __init__(self, title: str, height: int) -> None:
        self.title, self.height = title, height
        self._parts: list[str] = []

    def box(
        self, x: float, y: float, wide: float, high: float, *texts: str, color: str = "", shape: str = "box"
    ) -> None:
        """A box with texts in the middle, one below the other.

        Args:
            x: left edge.
            y: upper edge.
            wide: width in pixels.
            high: height in pixels.
            texts: a line break in one is one in the picture.
            color: a role, ``added``, ``removed`` or nothing.
            shape: ``box``, ``round``, ``writes`` (a hexagon) or ``dashed``.
        """
        fill, line = colors(ROLES.get(color), color if color in STROKES else "")
        style = f'fill="{fill}" stroke="{line}" stroke-width="1.5"' + (' stroke-dasharray="5 4"' * (shape == "dashed"))
        if shape == "writes":
            middle, right, low = y + high / 2, x + wide, y + high
            corners = [(x, middle), (x + 12, y), (right - 12, y), (right, middle), (right - 12, low), (x + 12, low)]
            self._parts.append(f'<polygon points="{" ".join(f"{a:g},{b:g}" for a, b in corners)}" {style}/>')
        else:
            radius = high / 2 if shape == "round" else 5
            size = f'x="{x:g}" y="{y:g}" width="{wide:g}" height="{high:g}" rx="{radius:g}"'
            self._parts.append(f"<rect {size} {style}/>")
        lines = [line for text in texts for line in _lines(text)]
        for line in lines:
            _refuse_wide(line, wide - 2 * (_MARGIN + (6 if shape == "writes" else 0)))
        self.text(x + wide / 2, y + high / 2 - (len(lines) - 1) * LINE / 2 + 5, *lines)

    def text(self, x: float, y: float, *texts: str, anchor: str = "middle", color: str = INK) -> None:
        """Texts, the first on the baseline `y`; `anchor` is ``start``, ``middle`` or ``end``."""
        room = {"start": WIDTH - x, "end": x, "middle": 2 * min(x, WIDTH - x)}[anchor]
        for number, line in enumerate(line for text in texts for line in _lines(text)):
            _refuse_wide(line, room)
            font = f' font-family="{CODE_FONT}" font-size="{_CODE_SIZE}"' if isinstance(line, Code) else ""
            place = f'x="{x:g}" y="{y + number * LINE:g}" text-anchor="{anchor}" fill="{color}"'
            self._parts.append(f"<text {place}{font}>{escape(line)}</text>")

    def arrow(self, *points: Point, kind: str = "data") -> None:
        """An arrow along points, of a kind of `STROKES`; one that crosses steps (``back``) is dotted."""
        d = "M" + "L".join(f"{x:g} {y:g}" for x, y in points)
        style = ' stroke-width="1.8" stroke-dasharray="2 4"' if kind == "back" else ' stroke-width="1.4"'
        end = f' marker-end="url(#{kind})"'
        self._parts.append(f'<path d="{d}" fill="none" stroke="{STROKES[kind]}"{style}{end}/>')

    def line(self, *points: Point, color: str = MUTED) -> None:
        """A thin line along points."""
        for (a, b), (c, d) in pairwise(points):
            self._parts.append(f'<path d="M{a:g} {b:g}L{c:g} {d:g}" stroke="{color}" stroke-width="1"/>')

    def svg(self) -> str:
        return "\n".join([*self._head(), *self._parts, "</svg>", ""])

    def _head(self) -> Iterator[str]:
        yield (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" width="{WIDTH}" '
            f'height="{self.height}" font-family="{_FONT}" font-size="{_SIZE}">'
        )
        yield f"<title>{escape(self.title)}</title>"
        kinds = [kind for kind in STROKES if any(f"url(#{kind})" in part for part in self._parts)]
        yield f"<defs>{''.join(map(_marker, kinds))}</defs>"
        yield '<rect width="100%" height="100%" fill="#ffffff"/>'


def _lines(text: str) -> list[str]:
    return [type(text)(line) for line in text.split("\n")]


def _refuse_wide(line: str, room: float) -> None:
    if width(line) > room:
        raise ValueError(f"{line!r} may need {width(line):.0f} pixels and has {room:.0f}. Break or shorten it.")


def _marker(kind: str) -> str:
    return (
        f'<marker id="{kind}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
        f'markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0L8 4L0 8z" fill="{STROKES[kind]}"/></marker>'
    )
