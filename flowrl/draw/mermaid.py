"""Graphs and diffs as Mermaid text, made offline.

Roles are subgraphs; nodes that write weights are hexagons; inputs are rounded; a thin grey edge is a state edge, the
dotted one the back-edge across steps. See `flowrl.draw.picture` for what is drawn.
"""

from __future__ import annotations

import re

from flowrl.core.diff import Diff
from flowrl.core.graph import Graph
from flowrl.draw.picture import Arrow, Box, Picture, picture

_MARKS = {
    "added": "fill:#d7f5dd,stroke:#1a7f37,color:#0b3d1a",
    "removed": "fill:#ffe1e1,stroke:#cf222e,color:#5c0f14,stroke-dasharray:5 3",
    "changed": "fill:#fff3c4,stroke:#9a6700,color:#4d3300",
}
_STYLES = {  # a later one wins
    "state": "stroke:#9aa0a6,stroke-width:1px",
    "back": "stroke:#8250df,stroke-width:2px,stroke-dasharray:2 4",
    "added": "stroke:#1a7f37,stroke-width:2px",
    "removed": "stroke:#cf222e,stroke-dasharray:5 3",
}
_SHAPES = {"input": ('(["', '"])'), "reads": ('["', '"]'), "writes": ('{{"', '"}}')}
_ROLE = "fill:#f6f8fa,stroke:#8c959f,color:#24292f"

# Words that Mermaid's grammar reserves where an identifier stands, and members that its plain objects have.
_RESERVED = {"end", "graph", "subgraph", "class", "classdef", "click", "style", "linkstyle", "default", "flowchart"}
_RESERVED |= {"direction", "href", "call", "interpolate", "_self", "_blank", "_parent", "_top"}
_RESERVED |= {"constructor", "tostring", "tolocalestring", "valueof", "hasownproperty", "isprototypeof"}
_RESERVED |= {"propertyisenumerable"}
_SPECIAL = str.maketrans({character: f"#{ord(character)};" for character in "#&\"'<>`\\%{}"})


def draw(subject: Graph | Diff) -> str:
    """A Mermaid flowchart: of a diff both graphs in one, with what was added, removed and changed marked."""
    return _flowchart(picture(subject))


def _flowchart(drawn: Picture) -> str:
    lines = ["flowchart TD", *(f"    {_box(box)}" for box in drawn.of_role(""))]
    for role, title in drawn.roles.items():
        lines += [f'    subgraph {_role_id(role)}["{_escape(title)}"]']
        lines += [f"        {_box(box)}" for box in drawn.of_role(role)]
        lines += ["    end"]
    lines += [f"    {_arrow(arrow)}" for arrow in drawn.arrows]
    for name, style in _STYLES.items():
        if numbers := [str(i) for i, arrow in enumerate(drawn.arrows) if name in (arrow.mark, arrow.kind)]:
            lines.append(f"    linkStyle {','.join(numbers)} {style}")
    if drawn.roles:
        lines += [f"    classDef role {_ROLE}", f"    class {','.join(map(_role_id, drawn.roles))} role"]
    for mark, style in _MARKS.items():
        if members := [_id(box.name) for box in drawn.boxes if box.mark == mark]:
            lines += [f"    classDef {mark} {style}", f"    class {','.join(members)} {mark}"]
    return "\n".join(lines)


def _box(box: Box) -> str:
    opening, closing = _SHAPES[box.shape]
    label = "<br/>".join([f"<b>{_escape(box.name)}</b>", *map(_escape, box.lines)])
    return f"{_id(box.name)}{opening}{label}{closing}"


def _arrow(arrow: Arrow) -> str:
    line = "-.->" if arrow.kind == "back" else "-->"
    label = "<br/>".join(_escape(part) for part in arrow.label.split(", "))
    return f'{_id(arrow.source)} {line}|"{label}"| {_id(arrow.target)}'


def _id(name: str) -> str:
    """An identifier that Mermaid takes, different for different names: `name` itself where that is possible."""
    if re.fullmatch(r"[A-Za-z0-9_]*[A-Za-z0-9]", name) and name.lower() not in _RESERVED:
        return name
    escaped = (c if re.fullmatch("[A-Za-z0-9]", c) else "__" if c == "_" else f"_{ord(c):x}_" for c in name)
    return f"{''.join(escaped)}_"


def _role_id(role: str) -> str:
    return f"role-{_id(role)}"  # a hyphen, which no node's name has


def _escape(text: str) -> str:
    """Text for a label: what Mermaid or HTML would read as syntax, by its code."""
    return text.translate(_SPECIAL)
