"""Mermaid's flowcharts in pages, drawn at build time by `flowrl.draw`, for a light and a dark page.

The part of Mermaid's language that `flowrl.draw.mermaid` writes, and labels as ``a -- label --> b``.
"""

from __future__ import annotations

import re
import runpy
from base64 import b64encode
from html import unescape
from pathlib import Path
from typing import Literal

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

from flowrl.draw.picture import Arrow, Box, Picture
from flowrl.draw.svg import draw

Shape = Literal["input", "reads", "writes"]

_NODE = re.compile(r'([\w-]+)(\(\[|\[|\{\{|\()(?:"([^"]*)"|(\w+))(?:\]\)|\]|\}\}|\))')
_SHAPES: dict[str, Shape] = {"([": "input", "[": "reads", "{{": "writes"}
_ARROW = re.compile(r'([\w-]+) (?:(-->|-\.->)(?:\|"(.*)"\|)?|-- (.*) -->) ([\w-]+)')
_STYLE = re.compile(r"(flowchart|linkStyle|classDef|class) ")


class Flowcharts(SphinxTransform):
    """A code block of Mermaid becomes its picture."""

    default_priority = 220

    def apply(self) -> None:
        dark = runpy.run_path(str(Path(self.env.srcdir) / "pictures.py"))["dark"]
        for block in list(self.document.findall(nodes.literal_block)):
            if block.get("language") != "mermaid":
                continue
            svg = draw(read(block.astext()))
            html = "".join(_image(text, name) for text, name in ((svg, "only-light"), (dark(svg), "only-dark")))
            block.replace_self(nodes.raw("", f'<div class="flowchart">{html}</div>', format="html"))


def _image(svg: str, theme: str) -> str:
    title = re.search(r"<title>(.*?)</title>", svg)
    alt = title[1] if title else ""
    return f'<img class="{theme}" alt="{alt}" src="data:image/svg+xml;base64,{b64encode(svg.encode()).decode()}">'


def read(text: str) -> Picture:
    """The picture that a flowchart describes.

    Raises:
        ValueError: a line is none of a node, an arrow or a style.
    """
    roles: dict[str, str] = {}
    nodes_found: dict[str, tuple[list[str], Shape]] = {}
    members: dict[str, str] = {}
    arrows: list[tuple[str, str, str, bool]] = []
    for line in map(str.strip, text.splitlines()):
        for name, opening, quoted, word in _NODE.findall(line):
            parts = [
                unescape(re.sub(r"</?[bi]>", "", part)) for part in (quoted or word).replace("#", "&#").split("<br/>")
            ]
            if name.startswith("legend-"):
                roles[name] = parts[0]
            else:
                nodes_found[name] = (parts, _SHAPES[opening])
        bare = _NODE.sub(r"\1", line)
        if arrow := _ARROW.fullmatch(bare):
            source, kind, label, other, target = arrow.groups()
            arrows.append((source, target, unescape((label or other or "").replace("<br/>", ", ")), kind == "-.->"))
        elif grouped := re.fullmatch(r"class (legend-\d+),(.*) c\d+", line):
            members.update(dict.fromkeys(grouped[2].split(","), grouped[1]))
        elif not re.fullmatch(r"[\w-]*", bare) and not _STYLE.match(line):
            raise ValueError(f"This line of a flowchart cannot be drawn: {line}")
    boxes = {
        name: _box(parts, roles.get(members.get(name, ""), ""), shape) for name, (parts, shape) in nodes_found.items()
    }
    order = list(boxes)
    drawn = tuple(
        Arrow(boxes[a].name, boxes[b].name, label, "back" if back or order.index(b) <= order.index(a) else "data")
        for a, b, label, back in arrows
    )
    return Picture(_title(boxes), tuple(boxes.values()), drawn, {title: title for title in roles.values()})


def _box(parts: list[str], role: str, shape: Shape) -> Box:
    writes = parts[-1].startswith("→") and shape == "reads"
    return Box(parts[0], tuple(parts[1 : len(parts) - writes]), parts[-1][2:] if writes else "", role, shape)


def _title(boxes: dict[str, Box]) -> str:
    return "Flowchart: " + ", ".join(box.name for box in boxes.values())


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_transform(Flowcharts)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
