"""Graphs and diffs as Mermaid text, made offline.

Boxes have the color of their role, which the legend names; those that write weights are hexagons; inputs are rounded. A
box lists what it writes, and an arrow has a label only if it carries a part of that. A thin gray arrow is a state edge,
the dotted one the back-edge across steps. See `flowrl.draw.picture`.
"""

from __future__ import annotations

import re

from flowrl.core.graphs.graph import Graph
from flowrl.draw.colors import INK, STROKES
from flowrl.draw.picture import Arrow, Box, Change, Mark, Picture, picture

_DASHES = {"removed": ",stroke-dasharray:5 3"}
_STYLES = {  # a later one wins
    "state": f"stroke:{STROKES['state']},stroke-width:1px",
    "back": f"stroke:{STROKES['back']},stroke-width:2px,stroke-dasharray:2 4",
    "added": f"stroke:{STROKES['added']},stroke-width:2px",
    "removed": f"stroke:{STROKES['removed']}{_DASHES['removed']}",
}
_SHAPES = {"input": ('(["', '"])'), "reads": ('["', '"]'), "writes": ('{{"', '"}}')}

# Words that Mermaid's grammar reserves among identifiers, and members that its plain objects have.
_RESERVED = {"end", "graph", "subgraph", "class", "classdef", "click", "style", "linkstyle", "default", "flowchart"}
_RESERVED |= {"direction", "href", "call", "interpolate", "_self", "_blank", "_parent", "_top"}
_RESERVED |= {"constructor", "tostring", "tolocalestring", "valueof", "hasownproperty", "isprototypeof"}
_RESERVED |= {"propertyisenumerable"}
_SPECIAL = str.maketrans({character: f"#{ord(character)};" for character in "#&\"'<>`\\%{}"})


def draw(subject: Graph | Change) -> str:
    """A Mermaid flowchart: of a diff both graphs in one, with what was added, removed and changed marked."""
    return _flowchart(picture(subject))


def _flowchart(drawn: Picture) -> str:
    # The legend goes first: boxes without an incoming arrow are in a line with the inputs.
    lines = ["flowchart TD"]
    lines += [f'    legend-{i}("{_escape(text)}")' for i, text in enumerate(drawn.legend.values(), 1)]
    lines += [f"    {_box(box)}" for box in drawn.boxes]
    lines += [f"    {_arrow(arrow)}" for arrow in drawn.arrows]
    lines.append(f"    linkStyle default stroke:{STROKES['data']}")
    for name, style in _STYLES.items():
        if numbers := [str(i) for i, arrow in enumerate(drawn.arrows) if name in (arrow.mark, arrow.kind)]:
            lines.append(f"    linkStyle {','.join(numbers)} {style}")
    members: dict[tuple[str, Mark], list[str]] = {key: [f"legend-{i}"] for i, key in enumerate(drawn.legend, 1)}
    for box in drawn.boxes:
        members.setdefault((box.role, box.mark), []).append(_id(box.name))
    for i, ((role, mark), names) in enumerate(members.items(), 1):
        fill, line = drawn.colors(role, mark)
        wide = ",stroke-width:2px" if role else ""
        lines.append(f"    classDef c{i} fill:{fill},stroke:{line},color:{INK}{wide}{_DASHES.get(mark, '')}")
        lines.append(f"    class {','.join(names)} c{i}")
    return "\n".join(lines)


def _box(box: Box) -> str:
    opening, closing = _SHAPES[box.shape]
    lines = [f"<b>{_escape(box.name)}</b>", *map(_escape, box.lines)]
    if box.writes:
        lines.append(f"<i>→\N{NO-BREAK SPACE}{_escape(box.writes)}</i>")
    return f"{_id(box.name)}{opening}{'<br/>'.join(lines)}{closing}"


def _arrow(arrow: Arrow) -> str:
    line = "-.->" if arrow.kind == "back" else "-->"
    label = "" if arrow.whole else f'|"{"<br/>".join(_escape(part) for part in arrow.label.split(", "))}"|'
    return f"{_id(arrow.source)} {line}{label} {_id(arrow.target)}"


def _id(name: str) -> str:
    """An identifier that Mermaid takes, different for different names: `name` itself where that is possible."""
    if re.fullmatch(r"[A-Za-z0-9_]*[A-Za-z0-9]", name) and name.lower() not in _RESERVED:
        return name
    escaped = (c if re.fullmatch("[A-Za-z0-9]", c) else "__" if c == "_" else f"_{ord(c):x}_" for c in name)
    return f"{''.join(escaped)}_"


def _escape(text: str) -> str:
    """Text for a label: what Mermaid or HTML would read as syntax, by its code."""
    return text.translate(_SPECIAL)
