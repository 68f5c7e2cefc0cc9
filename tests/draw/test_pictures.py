"""Pictures as Mermaid draws them, measured in a browser.

`make test-pictures` leaves what was drawn in ``.pictures/mermaid.png`` and ``.pictures/mermaid-11.png``: look at it.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from flowrl.draw.mermaid import draw
from flowrl.draw.picture import picture
from flowrl.edits.diff import Diff
from flowrl.graph import Graph
from flowrl.graphs import grpo, ppo
from tests.draw.browser import BUNDLES, Place, drawn, missing, parsed
from tests.draw.charts import ODD_NAMES, ODD_TEXTS, Frozen, Remote, probed, read, score, two_rewards

pytestmark = [pytest.mark.pictures, pytest.mark.skipif(bool(missing()), reason=missing())]


def swapped() -> Any:
    first, second = (grpo(score).edit(bind={"ref": backend}) for backend in (Frozen("x"), Remote("y")))
    return first.diff(second)


SUBJECTS: dict[str, Callable[[], Graph | Diff]] = {
    "ppo": lambda: ppo(score),
    "grpo": lambda: grpo(score, mini_batch=64),
    "two rewards": two_rewards,
    "ppo to grpo": lambda: ppo(score).diff(grpo(score)),
    "grpo to ppo": lambda: grpo(score).diff(ppo(score)),
    "a swap of engines": swapped,
}


@pytest.fixture(scope="module", params=BUNDLES)
def pictures(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All subjects as one version of Mermaid draws them."""
    texts = {name: draw(make()) for name, make in SUBJECTS.items()}
    return drawn(request.param, texts, tmp_path_factory.mktemp("drawn"))


@pytest.fixture(params=SUBJECTS)
def subject(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def places(picture: dict[str, Any], kind: str) -> list[Place]:
    assert "error" not in picture, picture["error"]
    return [Place(**{**place, "box": tuple(place["box"])}) for place in picture[kind]]


def test_everything_is_drawn_and_nothing_overlaps(pictures: dict[str, Any], subject: str) -> None:
    chart = read(draw(SUBJECTS[subject]()))
    nodes, labels = (places(pictures[subject], kind) for kind in ("nodes", "labels"))
    assert sorted(node.name for node in nodes) == sorted([*chart.names.values(), *chart.legend.values()])
    assert sorted(label.text.split("\n") for label in labels) == sorted(
        label.split("<br/>") for _, _, label, _ in chart.links if label
    )
    assert [(a.text, b.text) for a, b in combinations([*nodes, *labels], 2) if a.overlaps(b)] == []
    left, top, right, bottom = pictures[subject]["box"]
    for x, y, to_x, to_y in (place.box for place in [*nodes, *labels]):
        assert left - 1 <= x and top - 1 <= y and to_x <= right + 1 and to_y <= bottom + 1


def test_boxes_have_the_colors_of_the_legend(pictures: dict[str, Any], subject: str) -> None:
    shown = picture(SUBJECTS[subject]())
    nodes = {place.name: place for place in places(pictures[subject], "nodes")}
    legend = {key: nodes[text] for key, text in shown.legend.items()}
    looks = [(entry.fill, entry.stroke) for entry in legend.values()]
    assert len(set(looks)) == len(looks) and shown.roles.keys() <= {role for role, _ in legend}
    for box in shown.boxes:
        if box.role:
            assert nodes[box.name].stroke == legend[box.role, ""].stroke
        if box.mark:
            assert nodes[box.name].fill == legend["", box.mark].fill
        elif box.role:
            assert nodes[box.name].fill == legend[box.role, ""].fill
        else:
            assert nodes[box.name].fill not in {fill for fill, _ in looks}


def test_the_legend_is_one_line_at_the_top_and_boxes_are_compact(pictures: dict[str, Any], subject: str) -> None:
    shown = picture(SUBJECTS[subject]())
    nodes = {place.name: place for place in places(pictures[subject], "nodes")}
    tops = [nodes[text].box[1] for text in shown.legend.values()]
    assert max(tops) <= min(nodes[box.name].box[3] for box in shown.boxes)  # beside the inputs, above all that follows
    left, top, right, bottom = pictures[subject]["box"]
    assert all(place.box[2] - place.box[0] < (right - left) / 3 for place in nodes.values())
    assert bottom - top < 1.25 * (right - left)


@pytest.mark.parametrize("bundle", BUNDLES)
def test_mermaid_parses_the_same_nodes_and_links(bundle: str, tmp_path: Path) -> None:
    texts = {name: draw(make()) for name, make in SUBJECTS.items()} | {"probed": draw(probed())}
    texts |= {f"named {name}": draw(grpo(score).edit(rename={"generate": name})) for name in ODD_NAMES}
    texts |= {f"says {text}": draw(probed(text, text)) for text in ODD_TEXTS}
    found = parsed(bundle, texts, tmp_path)
    arrows = {"normal": "-->", "dotted": "-.->"}
    for name, text in texts.items():
        ours, theirs = read(text), found[name]
        assert "error" not in theirs, (name, theirs)
        labels = ours.legend | {i: label for i, (_, label) in ours.nodes.items()}
        assert [i for i, _ in theirs["nodes"]] == list(labels)
        for i, label in theirs["nodes"]:
            decoded = html.unescape(re.sub("ﬂ°°(\\w+?)¶ß", "&#\\1;", label)).replace("<br>", "<br/>")
            assert decoded == labels[i]
        assert [(a, arrows[s], b) for a, s, _, b in theirs["links"]] == [(a, s, b) for a, s, _, b in ours.links]
