"""Draw the pictures of README and concepts, each in a light and a dark version: ``python docs/pictures.py [RUN]``.

``docs/drawings`` draws those of the concepts. RUN is the folder of a quick demo, such as ``runs/demo/quick/001``; its
curve is copied.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from flowrl.core.graphs.graph import Graph
from flowrl.draw.colors import INK, STROKES
from flowrl.draw.picture import Picture, picture

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs"))

from drawings import draw_all  # noqa: E402
from drawings.sheet import CODE_FONT  # noqa: E402

PICTURES = ROOT / "docs" / "pictures"

Place = tuple[float, float]
"""Column and row."""

PPO: dict[str, Place] = {
    "batch": (0, 1.5),
    "generate": (1, 1.5),
    "old_log_prob": (2, 0),
    "ref_log_prob": (2, 1),
    "reward": (2, 2),
    "value": (2, 3),
    "kl_shape": (3, 1),
    "gae": (4, 2),
    "update_actor": (5, 0),
    "update_critic": (5, 3),
    "sync": (6, 0),
}
BETWEEN: dict[tuple[str, str], list[Place]] = {  # where an arrow passes between boxes
    ("batch", "reward"): [(1, 2)],
    ("generate", "kl_shape"): [(1.6, 1.5), (2.4, 1.5)],
    ("generate", "gae"): [(1.6, 2.5), (3, 2.5)],
    ("generate", "update_actor"): [(1.55, -0.6), (4, -0.6)],
    ("generate", "update_critic"): [(1.55, 3.6), (4, 3.6)],
    ("sync", "generate"): [(6, -1.15), (1, -1.15)],
}

_COLUMN, _ROW, _BOX, _CHAR = 134, 54, 32, 7.3  # pixels: between columns, between rows, height of a box, a character
_LEFT, _TOP, _WIDTH, _HEIGHT = 52, 108, 920, 320

DARK = {
    "#ffffff": "#0d1117",
    "#f6f8fa": "#161b22",
    "#d0d7de": "#30363d",
    INK: "#e6edf3",
    STROKES["data"]: "#9198a1",
    STROKES["back"]: "#ab7df8",
    "#0969da": "#4493f8",
    "#bc4c00": "#f0883e",
    "#1b7c83": "#39c5cf",
    "#bf3989": "#f778ba",
    "#ddeafa": "#12263f",
    "#f6e6db": "#33200f",
    "#dfedee": "#0e2a2e",
    "#f6e3ee": "#331b2a",
    STROKES["added"]: "#3fb950",
    STROKES["removed"]: "#f85149",
    "#d7f5dd": "#12301b",
    "#ffe1e1": "#3d1a1d",
}
"""The color on a dark page for each color on a light one."""


def dark(svg: str) -> str:
    """A light SVG in the colors for a dark page. A color without a dark one is a `KeyError`."""
    return re.sub(r"#[0-9a-f]{6}", lambda color: DARK[color[0]], svg)


def graph_of_the_readme() -> Graph:
    """The `graph` that the first Python block of the README defines, run in the repository's root."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {"__name__": "readme"}
    exec(text.partition("```python\n")[2].partition("```")[0], names)
    graph: Graph = names["graph"]
    return graph


def banner(graph: Graph) -> str:
    """Draw a graph from left to right, with all nodes and edges, as SVG."""
    shown = picture(graph)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" '
            f'height="{_HEIGHT}" font-family="{CODE_FONT}" font-size="12">',
            f"<title>{escape(shown.title)} as a graph of operators</title>",
            f"<defs>{_marker('data')}{_marker('back')}</defs>",
            '<rect width="100%" height="100%" fill="#ffffff"/>',
            *_legend(shown),
            *_arrows(shown),
            *_boxes(shown),
            "</svg>",
            "",
        ]
    )


def _at(place: Place) -> Place:
    return _LEFT + _COLUMN * place[0], _TOP + _ROW * place[1]


def _marker(kind: str) -> str:
    return (
        f'<marker id="{kind}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        f'markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0L8 4L0 8z" fill="{STROKES[kind]}"/></marker>'
    )


def _half(name: str) -> float:
    return (_CHAR * len(name) + 22) / 2


def _arrows(shown: Picture) -> Iterator[str]:
    for arrow in shown.arrows:
        between = [_at(place) for place in BETWEEN.get((arrow.source, arrow.target), [])]
        (x, y), (end, level) = _at(PPO[arrow.source]), _at(PPO[arrow.target])
        if arrow.kind == "back":
            top = between[0][1]
            d = f"M{x} {y - _BOX / 2}V{top}H{end}V{level - _BOX / 2}"
            style = f'stroke="{STROKES["back"]}" stroke-width="1.8" stroke-dasharray="2 4" marker-end="url(#back)"'
            yield f'<path d="{d}" fill="none" {style}/>'
            yield _text((x + end) / 2, top - 7, arrow.label, STROKES["back"], "middle")
            continue
        x += _half(arrow.source)
        d = f"M{x:.1f} {y:.1f}"
        for across, down in [*between, (end - _half(arrow.target), level)]:
            bend = (x + across) / 2
            d += f"C{bend:.1f} {y:.1f} {bend:.1f} {down:.1f} {across:.1f} {down:.1f}"
            x, y = across, down
        yield f'<path d="{d}" fill="none" stroke="{STROKES["data"]}" stroke-width="1.2" marker-end="url(#data)"/>'


def _boxes(shown: Picture) -> Iterator[str]:
    for box in shown.boxes:
        x, y = _at(PPO[box.name])
        half, high = _half(box.name), _BOX / 2
        fill, line = shown.colors(box.role)
        style = f'fill="{fill}" stroke="{line}" stroke-width="1.5"'
        if box.shape == "writes":
            upper = [(-half, 0), (10 - half, -high), (half - 10, -high)]
            corners = [*upper, *((-a, -b) for a, b in upper)]
            yield f'<polygon points="{" ".join(f"{x + a:.1f},{y + b:.1f}" for a, b in corners)}" {style}/>'
        else:
            size = f'x="{x - half:.1f}" y="{y - high:.1f}" width="{2 * half:.1f}" height="{_BOX}"'
            yield f'<rect {size} rx="{high if box.shape == "input" else 4}" {style}/>'
        yield _text(x, y + 4, box.name, INK, "middle")


def _legend(shown: Picture) -> Iterator[str]:
    x = 20.0
    for (role, _), title in shown.legend.items():
        fill, line = shown.colors(role)
        yield f'<rect x="{x:.1f}" y="10" width="12" height="12" rx="3" fill="{fill}" stroke="{line}" stroke-width="2"/>'
        yield _text(x + 18, 20, title, INK, "start")
        x += 18 + _CHAR * len(title) + 20


def _text(x: float, y: float, text: str, color: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}">{escape(text)}</text>'


def main() -> None:
    """Write all pictures."""
    curve = Path(sys.argv[1]) / "curve.svg" if sys.argv[1:] else PICTURES / "quick.svg"
    light = [("ppo", "", banner(graph_of_the_readme())), ("quick", "", curve.read_text(encoding="utf-8")), *draw_all()]
    for name, language, svg in light:
        (PICTURES / f"{name}{language}.svg").write_text(svg, encoding="utf-8")
        (PICTURES / f"{name}-dark{language}.svg").write_text(dark(svg), encoding="utf-8")


if __name__ == "__main__":
    main()
