"""The colors of pictures: of roles, of what a diff marks, and of arrows."""

from __future__ import annotations

INK = "#24292f"
"""Text, on any of the light fills."""
STROKES = {"data": "#57606a", "state": "#9aa0a6", "back": "#8250df"}
STROKES |= {"added": "#1a7f37", "removed": "#cf222e", "changed": "#9a6700"}
"""Of arrows, by their kind or mark; a later one wins."""
_FILLS = {"added": "#d7f5dd", "removed": "#ffe1e1", "changed": "#fff3c4"}
_ROLES = ["#0969da", "#bc4c00", "#1b7c83", "#bf3989", "#6639ba", "#7d4e00"]
_PLAIN = "#f6f8fa", "#57606a"


def colors(role: int | None, mark: str = "") -> tuple[str, str]:
    """Fill and line of a box, as ``#rrggbb``: those of its role, with the mark's color as the fill if it is marked.

    `role` is its index among the roles of the picture (colors repeat after six), or None; `mark` is of a diff, or
    ``""``.
    """
    fill, line = _PLAIN
    if mark:
        fill, line = _FILLS[mark], STROKES[mark]
    if role is not None:
        line = _ROLES[role % len(_ROLES)]
        fill = fill if mark else _tint(line)
    return fill, line


def _tint(color: str) -> str:
    """A little of a color, on white."""
    parts = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(255 - (255 - part) * 0.14):02x}" for part in parts)
