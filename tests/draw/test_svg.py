"""Tests of `svg.py` and `layout.py`: the drawing is complete and nothing overlaps.

The page that holds it needs no network.
"""

from __future__ import annotations

import re
from html.parser import HTMLParser
from itertools import combinations, pairwise
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.core.graphs.after import After
from flowrl.draw.html import page
from flowrl.draw.layout import GAP, Cell, layout
from flowrl.draw.picture import Arrow
from flowrl.draw.svg import svg
from flowrl.graphs import grpo, ppo
from flowrl.operators import Whiten
from tests.support.kernel import exact

NAMESPACE = "{http://www.w3.org/2000/svg}"


def swapped() -> Any:
    """A diff whose two graphs together have a cycle: b is read by a, and then a by b."""
    base = grpo(exact).edit(insert={"a": After("group_advantage", Whiten())})
    first = base.edit(insert={"b": After("a", Whiten())})
    second = first.edit(
        wire={
            "b.advantages": "group_advantage.advantages",
            "a.advantages": "b.advantages",
            "update_actor.advantages": "a.advantages",
        }
    )
    return first.diff(second)


SUBJECTS = {
    "ppo": lambda: ppo(exact),
    "grpo": lambda: grpo(exact, mini_batch=64),
    "lagging": lambda: ppo(exact, n=4, lam=0.9).edit(lag=2),
    "evaluation": lambda: grpo(exact).subgraph(until="reward"),
    "to grpo": lambda: ppo(exact).diff(grpo(exact)),
    "to ppo": lambda: grpo(exact).diff(ppo(exact)),
    "swapped": swapped,
}

Box = tuple[float, float, float, float]  # left, top, right, bottom


def numbers(text: str) -> list[float]:
    return [float(n) for n in re.findall(r"-?[\d.]+", text)]


class Drawn:
    """Boxes of nodes and labels, and the points of every curve, read back from an SVG."""

    def __init__(self, text: str) -> None:
        self.root = ElementTree.fromstring(text)
        self.width, self.height = (float(self.root.attrib[k]) for k in ("width", "height"))
        self.nodes: dict[str, Box] = {}
        self.texts: list[tuple[Box, Box]] = []  # of a text, and what it has to stay in
        for group in self.root.iter(f"{NAMESPACE}g"):
            shape, *texts = list(group)
            if shape.tag == f"{NAMESPACE}polygon":
                xs, ys = numbers(shape.attrib["points"])[::2], numbers(shape.attrib["points"])[1::2]
                box = (min(xs), min(ys), max(xs), max(ys))
            else:
                box = self.rect(shape)
            self.nodes[texts[0].text or ""] = box
            # an advance of 0.602 em, that of the common monospaced fonts
            self.texts += [(self.text(t, 12 * 0.602, 12.0), box) for t in texts]
        self.labels: list[Box] = []
        elements = list(self.root)
        for rect, text_element in pairwise(elements):
            if (rect.tag, rect.get("height")) == (f"{NAMESPACE}rect", "16"):
                self.labels.append(self.rect(rect))
                self.texts.append((self.text(text_element, 10.5 * 0.602, 10.5), self.labels[-1]))
        self.curves = [self.points(path.attrib["d"]) for path in self.root.findall(f"{NAMESPACE}path")]

    @staticmethod
    def rect(element: ElementTree.Element) -> Box:
        x, y, w, h = (float(element.attrib[k]) for k in ("x", "y", "width", "height"))
        return x, y, x + w, y + h

    @staticmethod
    def text(element: ElementTree.Element, advance: float, size: float) -> Box:
        x, y, w = float(element.attrib["x"]), float(element.attrib["y"]), advance * len(element.text or "")
        return x - w / 2, y - 0.8 * size, x + w / 2, y + 0.2 * size

    @staticmethod
    def points(d: str) -> np.ndarray:
        """Points along the path, at most a few pixels apart."""
        pieces, here = [], np.zeros(2)
        t = np.linspace(0, 1, 200)[:, None]
        for command, arguments in re.findall(r"([MVHC])([^MVHC]*)", d):
            a = np.array(numbers(arguments))
            match command:
                case "M":
                    here = a
                case "V" | "H":
                    end = np.array([here[0], a[0]] if command == "V" else [a[0], here[1]])
                    pieces.append((1 - t) * here + t * end)
                    here = end
                case "C":
                    b, c, end = a.reshape(3, 2)
                    pieces.append((1 - t) ** 3 * here + 3 * t * (1 - t) ** 2 * b + 3 * t**2 * (1 - t) * c + t**3 * end)
                    here = end
        return np.concatenate(pieces)


def overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def inside(points: np.ndarray, box: Box, margin: float) -> np.ndarray:
    left, top, right, bottom = box
    x, y = points.T
    return (x > left + margin) & (x < right - margin) & (y > top + margin) & (y < bottom - margin)


@pytest.fixture(params=list(SUBJECTS), scope="module")
def subject(request: pytest.FixtureRequest) -> Any:
    return SUBJECTS[request.param]()


@pytest.fixture(scope="module")
def drawn(subject: Any) -> Drawn:
    return Drawn(svg(subject))


class TestDrawing:
    def test_every_node_and_link_is_drawn(self, subject: Any, drawn: Drawn) -> None:
        graphs = [subject] if hasattr(subject, "nodes") else [subject.before, subject.after]
        links = {(s, n.name) for g in graphs for n in g.nodes.values() for s in n.sources}
        assert set(drawn.nodes) == {name for graph in graphs for name in graph.nodes}
        backs = {edge for graph in graphs for edge in graph.back_edges}
        assert len(drawn.curves) == len(drawn.labels) == len(links) + len(backs)

    def test_nothing_overlaps_or_exceeds_the_canvas(self, drawn: Drawn) -> None:
        boxes = [*drawn.nodes.values(), *drawn.labels]
        assert not any(overlap(a, b) for a, b in combinations(boxes, 2))
        for left, top, right, bottom in boxes:
            assert min(left, top) >= 0 and right <= drawn.width and bottom <= drawn.height
        for text, room in drawn.texts:
            assert room[0] <= text[0] and text[2] <= room[2] and room[1] <= text[1] and text[3] <= room[3]
        for curve in drawn.curves:
            assert not any(inside(curve, box, margin=1.0).any() for box in drawn.nodes.values())
            assert (curve.min(0) >= 0).all() and (curve.max(0) <= (drawn.width, drawn.height)).all()

    def test_a_link_crosses_no_label_but_its_own(self, drawn: Drawn) -> None:
        for curve in drawn.curves[: len(drawn.curves) - 1]:
            assert sum(inside(curve, box, margin=2.0).any() for box in drawn.labels) == 1

    def test_links_end_at_boxes(self, drawn: Drawn) -> None:
        for curve in drawn.curves:
            for end in (curve[0], curve[-1]):
                edges = [
                    y
                    for left, top, right, bottom in drawn.nodes.values()
                    if left < end[0] < right
                    for y in (top, bottom)
                ]
                assert min(abs(y - end[1]) for y in edges) < 0.2

    def test_drawing_is_deterministic(self) -> None:
        for make in SUBJECTS.values():
            assert svg(make()) == svg(make())

    def test_data_runs_downwards(self) -> None:
        graph = ppo(exact)
        tops = {name: box[1] for name, box in Drawn(svg(graph)).nodes.items()}
        assert all(tops[source] < tops[node.name] for node in graph.nodes.values() for source in node.sources)

    def test_diff_marks_and_the_back_edge_are_drawn(self) -> None:
        text = svg(SUBJECTS["to grpo"]())
        assert text.count('stroke-dasharray="2 4"') == 1
        for word in ("added", "removed", "changed", "lag 0 (on-policy)", "n: 1 → 8"):
            assert f">{word}</text>" in text


@st.composite
def drawings(draw: st.DrawFn) -> tuple[dict[str, Cell], list[Arrow]]:
    count = draw(st.integers(1, 9))
    sizes = st.floats(10, 200)
    cells = {f"n{i}": Cell(draw(sizes), draw(sizes)) for i in range(count)}
    pairs = draw(st.lists(st.tuples(st.integers(0, count - 1), st.integers(0, count - 1)), unique=True, max_size=20))
    labels = st.text("abc", max_size=9)
    return cells, [Arrow(f"n{a}", f"n{b}", draw(labels), "data") for a, b in pairs if a != b]


@given(drawings())
def test_cells_of_random_layouts_do_not_overlap(drawing: tuple[dict[str, Cell], list[Arrow]]) -> None:
    cells, arrows = drawing
    routes = layout(cells, arrows, lambda label: 7.0 * len(label), left=5.0, top=3.0)
    assert [{r[0], r[-1]} for r in routes] == [{cells[k.source], cells[k.target]} for k in arrows]
    places = list(dict.fromkeys([*cells.values(), *(cell for route in routes for cell in route)]))
    assert min(s.x - s.width / 2 for s in places) == pytest.approx(5.0)
    assert min(s.top for s in places) == 3.0
    for a, b in combinations(places, 2):
        if a.top == b.top and a.bottom == b.bottom:
            assert abs(a.x - b.x) >= (a.width + b.width) / 2 + GAP - 1e-6
        else:
            assert a.bottom <= b.top or b.bottom <= a.top
    for route in routes:
        assert all(upper.bottom < lower.top for upper, lower in pairwise(route))


class Tags(HTMLParser):
    """Tags, attributes that could load something, and text by tag."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.links: list[tuple[str, str | None]] = []
        self.text: list[tuple[str, str]] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.links += [(k, v) for k, v in attributes if k in ("src", "href", "xlink:href", "srcset", "data")]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append((self.open[-1] if self.open else "", data))


class TestPage:
    def test_the_page_loads_no_external_resource(self, subject: Any) -> None:
        tags = Tags()
        text = page(subject)
        tags.feed(text)
        assert tags.open == [] and tags.links == []
        assert not tags.seen & {"script", "link", "img", "iframe", "object"}
        addresses = re.findall(r"https?://[^\s\"'<]+", text)
        assert set(addresses) == {"http://www.w3.org/2000/svg"}
        assert "@import" not in text and not re.search(r"url\((?!#)", text)

    def test_the_page_contains_the_svg_and_the_mermaid_source(self, subject: Any) -> None:
        tags = Tags()
        tags.feed(page(subject))
        assert svg(subject) in page(subject)
        sources = [text for tag, text in tags.text if tag == "pre"]
        assert sources[-1] == subject.mermaid()
        if not hasattr(subject, "nodes"):
            assert sources[0] == str(subject)

    def test_the_page_title_names_the_graph_or_diff(self) -> None:
        assert "<title>ppo</title>" in page(ppo(exact))
        assert "<h1>ppo → grpo</h1>" in page(SUBJECTS["to grpo"]())
