"""The positions of the boxes and arrows of a drawing: in layers (Sugiyama et al. 1981, doi:10.1109/TSMC.1981.4308636).

Boxes are in rows by their longest path from the inputs. Every arrow passes through its own cell in each row between,
which is as wide as its label in the last of them, so nothing overlaps. Rows are ordered by barycenters; x is as near to
the neighbors' as that order permits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise

import networkx as nx

from flowrl.draw.picture import Arrow

GAP = 16.0
"""Pixels between two cells of a row."""
ROW_GAP = 26.0
"""Pixels between two rows, if nothing else is passed."""


@dataclass(eq=False)
class Cell:
    """A cell of a row: a box, or one that an arrow passes through (with its label in one of them)."""

    width: float
    height: float
    above: list[Cell] = field(default_factory=list)
    below: list[Cell] = field(default_factory=list)
    x: float = 0.0  # center
    top: float = 0.0  # of the row
    bottom: float = 0.0

    @property
    def centre(self) -> tuple[float, float]:
        return self.x, (self.top + self.bottom) / 2


def layout(
    cells: Mapping[str, Cell],
    arrows: Sequence[Arrow],
    label_width: Callable[[str], float],
    left: float,
    top: float,
    row_gap: float = ROW_GAP,
) -> list[list[Cell]]:
    """Place every cell; returns the cells of every arrow, from its upper box to its lower one.

    An arrow that would close a cycle, which only the two graphs of a diff can, points upwards. Widths are in pixels.
    """
    rows, routes = _rows(cells, arrows, label_width)
    _order(rows)
    _place(rows, left, top, row_gap)
    return routes


def _rows(
    cells: Mapping[str, Cell], arrows: Sequence[Arrow], label_width: Callable[[str], float]
) -> tuple[list[list[Cell]], list[list[Cell]]]:
    """Rows of cells, boxes in the even ones, and the cells of every arrow."""
    layers: nx.DiGraph[str] = nx.DiGraph()
    layers.add_nodes_from(cells)
    for arrow in sorted(arrows, key=lambda arrow: arrow.mark == "removed"):
        if not nx.has_path(layers, arrow.target, arrow.source):
            layers.add_edge(arrow.source, arrow.target)
    rank = {name: 2 * i for i, names in enumerate(nx.topological_generations(layers)) for name in names}
    rows: list[list[Cell]] = [[] for _ in range(max(rank.values()) + 1)]
    for name, cell in cells.items():
        rows[rank[name]].append(cell)
    routes = []
    for arrow in arrows:
        first, last = sorted((arrow.source, arrow.target), key=rank.__getitem__)
        route = [cells[first]]
        for row in range(rank[first] + 1, rank[last]):
            labeled = arrow.label and row == rank[last] - 1
            route.append(Cell(label_width(arrow.label), 18.0) if labeled else Cell(8.0, 0.0))
            rows[row].append(route[-1])
        route.append(cells[last])
        for upper, lower in pairwise(route):
            upper.below.append(lower)
            lower.above.append(upper)
        routes.append(route)
    return rows, routes


def _order(rows: list[list[Cell]]) -> None:
    """Sort rows by their neighbors above, then by those below, and so on; use the order with the fewest crossings."""
    best, fewest = [list(row) for row in rows], _crossings(rows)
    for _ in range(12):
        for fixed, row in pairwise(rows):
            _sort(row, fixed, [cell.above for cell in row])
        for fixed, row in pairwise(reversed(rows)):
            _sort(row, fixed, [cell.below for cell in row])
        if (crossings := _crossings(rows)) < fewest:
            best, fewest = [list(row) for row in rows], crossings
    rows[:] = best


def _sort(row: list[Cell], fixed: list[Cell], neighbors: list[list[Cell]]) -> None:
    """Sort by the mean place of the neighbors in the fixed row; a cell without neighbors does not move."""
    place = {cell: float(k) for k, cell in enumerate(fixed)}
    means = {
        cell: sum(place[n] for n in near) / len(near) if near else float(k)
        for k, (cell, near) in enumerate(zip(row, neighbors, strict=True))
    }
    row.sort(key=means.__getitem__)


def _crossings(rows: list[list[Cell]]) -> int:
    count = 0
    for upper, lower in pairwise(rows):
        place = {cell: k for k, cell in enumerate(lower)}
        ends = [place[below] for cell in upper for below in sorted(cell.below, key=place.__getitem__)]
        count += sum(a > b for a, b in combinations(ends, 2))
    return count


def _place(rows: list[list[Cell]], left: float, top: float, row_gap: float) -> None:
    """Give every cell its x, and every row its top and bottom."""
    for row in rows:
        height = max(cell.height for cell in row)
        for cell in row:
            cell.top, cell.bottom = top, top + height
        top += height + row_gap
        _spread(row, [0.0] * len(row))
    for sweep in range(40):
        down = sweep % 2 == 0
        for row in rows if down else reversed(rows):
            near = [(cell.above if down else cell.below) or [cell] for cell in row]
            _spread(row, [sum(n.x for n in ns) / len(ns) for ns in near])
    shift = left - min(cell.x - cell.width / 2 for row in rows for cell in row)
    for row in rows:
        for cell in row:
            cell.x += shift


def _spread(row: list[Cell], targets: list[float]) -> None:
    """The places nearest to `targets` (least squares) that keep order and gaps, by pooling adjacent violators."""
    offsets = [0.0]
    for left, right in pairwise(row):
        offsets.append(offsets[-1] + (left.width + right.width) / 2 + GAP)
    pools: list[tuple[float, int]] = []  # mean and number of members
    for target, offset in zip(targets, offsets, strict=True):
        mean, size = target - offset, 1
        while pools and pools[-1][0] > mean:
            other, members = pools.pop()
            mean, size = (mean * size + other * members) / (size + members), size + members
        pools.append((mean, size))
    places = [mean for mean, size in pools for _ in range(size)]
    for cell, place, offset in zip(row, places, offsets, strict=True):
        cell.x = place + offset


def attachment_points(cells: Mapping[str, Cell], narrow: float) -> dict[tuple[Cell, Cell], float]:
    """The x at which arrows leave and enter a box, by the box and the arrow's next cell: in their order.

    `narrow` is the number of pixels of a box's width without arrows.
    """
    found: dict[tuple[Cell, Cell], float] = {}
    for box in cells.values():
        for side in (box.above, box.below):
            near = sorted(side, key=lambda cell: cell.x)
            step = min(GAP, (box.width - narrow) / max(len(near), 1))
            found |= {(box, cell): box.x + (k - (len(near) - 1) / 2) * step for k, cell in enumerate(near)}
    return found
