"""Graphs and diffs as one SVG, without a network or a browser's scripts.

Boxes have the color of their role; those that write weights are hexagons. See `flowrl.draw.picture` and
`flowrl.draw.layout`.
"""

from __future__ import annotations

from html import escape

from flowrl.core.graphs.graph import Graph
from flowrl.draw.colors import INK, STROKES
from flowrl.draw.layout import GAP, ROW_GAP, Cell, attachment_points, layout
from flowrl.draw.picture import Arrow, Box, Change, Mark, Picture, picture

_CHAR, _LINE, _SMALL = 7.3, 16.0, 6.4  # pixels: a character and a line of a box, a character of a label
_MARGIN, _LEGEND, _HEAD, _NARROWEST = 24.0, 34.0, 8.0, 84.0
_DASHES = {"removed": ' stroke-dasharray="5 3"', "back": ' stroke-dasharray="2 4"'}
_FONT = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"


def svg(subject: Graph | Change) -> str:
    """A graph, or both graphs of a diff in one, as a stand-alone SVG document."""
    return draw(picture(subject))


def draw(drawn: Picture, row_gap: float = ROW_GAP) -> str:
    """The SVG of a picture. Boxes and arrows name what they draw, in ``data-node``, ``data-from`` and ``data-to``."""
    cells = {box.name: Cell(*_size(box)) for box in drawn.boxes}
    forward = [arrow for arrow in drawn.arrows if arrow.kind != "back"]
    backward = [arrow for arrow in drawn.arrows if arrow.kind == "back"]
    routes = layout(cells, forward, _label_width, _MARGIN, _MARGIN + _LEGEND, row_gap)
    places = [*cells.values(), *(cell for route in routes for cell in route)]
    at = attachment_points(cells, narrow=36.0)
    right = max(cell.x + cell.width / 2 for cell in places)
    lane = right + GAP + max((_label_width(arrow.label) / 2 for arrow in backward), default=0.0)
    legend, legend_width = _legend(drawn)
    width = max(2 * lane - right if backward else right, legend_width) + _MARGIN + GAP * len(backward)
    height = max(cell.bottom for cell in places) + 2 * _MARGIN
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
            f'height="{height:.0f}" font-family="{_FONT}">',
            f"<title>{escape(drawn.title)}</title>",
            f"<defs>{''.join(map(_marker, sorted({_style(arrow) for arrow in drawn.arrows})))}</defs>",
            '<rect width="100%" height="100%" fill="#ffffff"/>',
            *legend,
            *(_path(arrow, route, cells, at) for arrow, route in zip(forward, routes, strict=True)),
            *(_label(arrow, *route[-2].centre) for arrow, route in zip(forward, routes, strict=True)),
            *(_back_path(arrow, cells, lane + GAP * i, i) for i, arrow in enumerate(backward)),
            *(_box(box, cells[box.name], drawn) for box in drawn.boxes),
            "</svg>",
        ]
    )


def _size(box: Box) -> tuple[float, float]:
    longest = max(map(len, [box.name, *box.lines]))
    width = _CHAR * longest + (40.0 if box.shape == "writes" else 24.0)
    return max(width, _NARROWEST), _LINE * (1 + len(box.lines)) + 16.0


def _style(arrow: Arrow) -> str:
    return arrow.mark or arrow.kind


def _marker(style: str) -> str:
    return (
        f'<marker id="arrow-{style}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        f'markerUnits="userSpaceOnUse" orient="auto-start-reverse">'
        f'<path d="M0 0L8 4L0 8z" fill="{STROKES[style]}"/></marker>'
    )


def _stroke(arrow: Arrow, end: str = "end") -> str:
    style = _style(arrow)
    width = {"state": 0.8, "added": 2.0, "back": 1.8}.get(style, 1.2)
    dash = _DASHES.get(style, "")
    names = f'data-from="{escape(arrow.source)}" data-to="{escape(arrow.target)}"'
    return (
        f'{names} fill="none" stroke="{STROKES[style]}" stroke-width="{width}"{dash} marker-{end}="url(#arrow-{style})"'
    )


def _path(arrow: Arrow, route: list[Cell], cells: dict[str, Cell], at: dict[tuple[Cell, Cell], float]) -> str:
    """A curve between rows, straight within them."""
    first, *between, last = route
    downward = cells[arrow.target] is last
    x, y = at[first, between[0]], first.bottom if downward else first.bottom + _HEAD
    d = [f"M{x:.1f} {first.centre[1] + first.height / 2:.1f}V{y:.1f}"]
    for cell in (*between, last):
        target, top = (at[last, between[-1]], cell.top - _HEAD) if cell is last else (cell.x, cell.top)
        bend = (y + top) / 2
        d.append(f"C{x:.1f} {bend:.1f} {target:.1f} {bend:.1f} {target:.1f} {top:.1f}")
        x, y = target, cell.bottom
        d.append(f"V{last.centre[1] - last.height / 2 if cell is last else y:.1f}")
    return f'<path d="{"".join(d)}" {_stroke(arrow, "end" if downward else "start")}/>'


def _back_path(arrow: Arrow, cells: dict[str, Cell], lane: float, number: int) -> str:
    """Below its source, up the lane on the right of everything, and into its target from above."""
    source, target = cells[arrow.source], cells[arrow.target]
    low, high = source.bottom + 10.0 + 3 * number, target.top - 10.0 - 3 * number
    x = target.x + target.width / 2 - 10.0
    d = f"M{source.x:.1f} {source.centre[1] + source.height / 2:.1f}V{low:.1f}H{lane:.1f}V{high:.1f}"
    d += f"H{x:.1f}V{target.centre[1] - target.height / 2:.1f}"
    return f'<path d="{d}" {_stroke(arrow)}/>' + _label(arrow, lane, (low + high) / 2 + 20.0 * number)


def _label_width(text: str) -> float:
    return _SMALL * len(text) + 4.0


def _label(arrow: Arrow, x: float, y: float) -> str:
    if not arrow.label:
        return ""
    width = _label_width(arrow.label)
    return (
        f'<rect x="{x - width / 2:.1f}" y="{y - 8:.1f}" width="{width:.1f}" height="16" fill="#ffffff"/>'
        f'<text x="{x:.1f}" y="{y + 3.5:.1f}" font-size="10.5" text-anchor="middle" fill="{STROKES[_style(arrow)]}">'
        f"{escape(arrow.label)}</text>"
    )


def _box(box: Box, cell: Cell, drawn: Picture) -> str:
    left, right = cell.x - cell.width / 2, cell.x + cell.width / 2
    middle = cell.centre[1]
    top, bottom = middle - cell.height / 2, middle + cell.height / 2
    style = f'{_colors(box.role, box.mark, drawn)} stroke-width="1.5"{_DASHES.get(box.mark, "")}'
    if box.shape == "writes":
        corners = ((left, middle), (left + 12, top), (right - 12, top), (right, middle), (right - 12, bottom))
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (*corners, (left + 12, bottom)))
        shape = f'<polygon points="{points}" {style}/>'
    else:
        radius = cell.height / 2 if box.shape == "input" else 4.0
        place = f'x="{left:.1f}" y="{top:.1f}" width="{cell.width:.1f}" height="{cell.height:.1f}"'
        shape = f'<rect {place} rx="{radius}" {style}/>'
    texts = [
        f'<text x="{cell.x:.1f}" y="{top + 8 + _LINE * (i + 0.75):.1f}" font-size="12" text-anchor="middle" '
        f'font-weight="{"normal" if i else "bold"}" fill="{INK}">{escape(line)}</text>'
        for i, line in enumerate((box.name, *box.lines))
    ]
    return f'<g data-node="{escape(box.name)}">{shape}{"".join(texts)}</g>'


def _colors(role: str, mark: Mark, drawn: Picture) -> str:
    fill, line = drawn.colors(role, mark)
    return f'fill="{fill}" stroke="{line}"'


def _legend(drawn: Picture) -> tuple[list[str], float]:
    """The colors of roles and marks in one line, and its width."""
    parts, x = [], _MARGIN
    for (role, mark), text in drawn.legend.items():
        style = _colors(role, mark, drawn)
        parts.append(
            f'<rect x="{x:.1f}" y="14" width="12" height="12" rx="3" {style} stroke-width="2"/>'
            f'<text x="{x + 18:.1f}" y="24" font-size="12" fill="{INK}">{escape(text)}</text>'
        )
        x += 18 + _CHAR * len(text) + 22
    return parts, x
