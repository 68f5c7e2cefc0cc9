"""Where the boxes and links of a drawing go: in layers (Sugiyama et al. 1981, doi:10.1109/TSMC.1981.4308636).

Boxes stand in rows by their longest path from the inputs. Every link passes through a slot of its own in each row
between, one as wide as its label in the last of them, so that nothing overlaps. Rows are ordered by barycentres; x is
as near to the neighbours' as that order leaves room for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise

import networkx as nx

from flowrl.draw.picture import Link

GAP = 16.0
"""Pixels between two slots of a row."""
ROW_GAP = 26.0
"""Pixels between two rows."""


@dataclass(eq=False)
class Slot:
    """A place in a row: a box, or where a link passes by (with its label in one of them)."""

    width: float
    height: float
    above: list[Slot] = field(default_factory=list)
    below: list[Slot] = field(default_factory=list)
    x: float = 0.0  # centre
    top: float = 0.0  # of the row
    bottom: float = 0.0

    @property
    def centre(self) -> tuple[float, float]:
        return self.x, (self.top + self.bottom) / 2


def layout(
    slots: Mapping[str, Slot], links: Sequence[Link], label_width: Callable[[str], float], left: float, top: float
) -> list[list[Slot]]:
    """Give every slot its place; returns the slots of every link, from the upper of its boxes to the lower.

    Args:
        slots: by box, with their sizes.
        links: what connects them. One that would close a cycle, which only the two graphs of a diff can, runs upwards.
        label_width: of a label, in pixels.
        left: x of the left edge.
        top: y of the upper edge.
    """
    rows, routes = _rows(slots, links, label_width)
    _order(rows)
    _place(rows, left, top)
    return routes


def _rows(
    slots: Mapping[str, Slot], links: Sequence[Link], label_width: Callable[[str], float]
) -> tuple[list[list[Slot]], list[list[Slot]]]:
    """Rows of slots, boxes in the even ones, and the slots of every link."""
    layers: nx.DiGraph[str] = nx.DiGraph()
    layers.add_nodes_from(slots)
    for link in sorted(links, key=lambda link: link.mark == "removed"):
        if not nx.has_path(layers, link.target, link.source):
            layers.add_edge(link.source, link.target)
    rank = {name: 2 * i for i, names in enumerate(nx.topological_generations(layers)) for name in names}
    rows: list[list[Slot]] = [[] for _ in range(max(rank.values()) + 1)]
    for name, slot in slots.items():
        rows[rank[name]].append(slot)
    routes = []
    for link in links:
        first, last = sorted((link.source, link.target), key=rank.__getitem__)
        route = [slots[first]]
        for row in range(rank[first] + 1, rank[last]):
            labelled = row == rank[last] - 1
            route.append(Slot(label_width(link.label), 18.0) if labelled else Slot(8.0, 0.0))
            rows[row].append(route[-1])
        route.append(slots[last])
        for upper, lower in pairwise(route):
            upper.below.append(lower)
            lower.above.append(upper)
        routes.append(route)
    return rows, routes


def _order(rows: list[list[Slot]]) -> None:
    """Sort rows by their neighbours above, then by those below, and so on; keep the order that crosses least."""
    best, fewest = [list(row) for row in rows], _crossings(rows)
    for _ in range(12):
        for fixed, row in pairwise(rows):
            _sort(row, fixed, [slot.above for slot in row])
        for fixed, row in pairwise(reversed(rows)):
            _sort(row, fixed, [slot.below for slot in row])
        if (crossings := _crossings(rows)) < fewest:
            best, fewest = [list(row) for row in rows], crossings
    rows[:] = best


def _sort(row: list[Slot], fixed: list[Slot], neighbours: list[list[Slot]]) -> None:
    """By the mean place of the neighbours in the row that is fixed; who has none keeps its own."""
    place = {slot: float(k) for k, slot in enumerate(fixed)}
    means = {
        slot: sum(place[n] for n in near) / len(near) if near else float(k)
        for k, (slot, near) in enumerate(zip(row, neighbours, strict=True))
    }
    row.sort(key=means.__getitem__)


def _crossings(rows: list[list[Slot]]) -> int:
    count = 0
    for upper, lower in pairwise(rows):
        place = {slot: k for k, slot in enumerate(lower)}
        ends = [place[below] for slot in upper for below in sorted(slot.below, key=place.__getitem__)]
        count += sum(a > b for a, b in combinations(ends, 2))
    return count


def _place(rows: list[list[Slot]], left: float, top: float) -> None:
    """Give every slot its x, and every row its top and bottom."""
    for row in rows:
        height = max(slot.height for slot in row)
        for slot in row:
            slot.top, slot.bottom = top, top + height
        top += height + ROW_GAP
        _spread(row, [0.0] * len(row))
    for sweep in range(40):
        down = sweep % 2 == 0
        for row in rows if down else reversed(rows):
            near = [(slot.above if down else slot.below) or [slot] for slot in row]
            _spread(row, [sum(n.x for n in ns) / len(ns) for ns in near])
    shift = left - min(slot.x - slot.width / 2 for row in rows for slot in row)
    for row in rows:
        for slot in row:
            slot.x += shift


def _spread(row: list[Slot], wanted: list[float]) -> None:
    """The places nearest to `wanted` (least squares) that keep order and gaps, by pooling adjacent violators."""
    offsets = [0.0]
    for left, right in pairwise(row):
        offsets.append(offsets[-1] + (left.width + right.width) / 2 + GAP)
    pools: list[tuple[float, int]] = []  # mean and number of members
    for want, offset in zip(wanted, offsets, strict=True):
        mean, size = want - offset, 1
        while pools and pools[-1][0] > mean:
            other, members = pools.pop()
            mean, size = (mean * size + other * members) / (size + members), size + members
        pools.append((mean, size))
    places = [mean for mean, size in pools for _ in range(size)]
    for slot, place, offset in zip(row, places, offsets, strict=True):
        slot.x = place + offset


def ports(slots: Mapping[str, Slot], narrow: float) -> dict[tuple[Slot, Slot], float]:
    """The x at which links leave and enter a box, by the box and the link's next slot: side by side, in their order.

    Args:
        slots: by box, placed.
        narrow: pixels of a box's width that bear no port.
    """
    found: dict[tuple[Slot, Slot], float] = {}
    for box in slots.values():
        for side in (box.above, box.below):
            near = sorted(side, key=lambda slot: slot.x)
            step = min(GAP, (box.width - narrow) / max(len(near), 1))
            found |= {(box, slot): box.x + (k - (len(near) - 1) / 2) * step for k, slot in enumerate(near)}
    return found
