"""The learning curve of the quick demo: bars in a terminal, and lines through all points in an SVG."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from flowrl.demo.curve import bars, svg

POINTS = [(0, 0.25), (5, 0.5), (10, 1.0)]


def test_bar_length_is_proportional_to_accuracy() -> None:
    lines = bars(POINTS).splitlines()
    assert [line.count("█") for line in lines] == [10, 20, 40]
    assert lines[0].startswith("step  0  ") and lines[2].endswith("  1.00")
    assert len({len(line) for line in lines}) == 1


def test_svg_lines_pass_through_all_points() -> None:
    picture = svg("a < b", {"one": POINTS, "two & more": [(5, 0.0), (10, 0.5)]})
    root = ElementTree.fromstring(picture)
    assert root[0].text == "a < b" and "two &amp; more" in picture
    assert re.findall(r'd="(M[^H]*?)" fill="none"', picture) == [
        "M52.0 172.0L334.0 128.0L616.0 40.0",
        "M334.0 216.0L616.0 128.0",
    ]
    assert picture.count("<circle") == 5
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[:5] == ["0%", "25%", "50%", "75%", "100%"] and texts[-2:] == ["one", "two & more"]


def test_a_run_with_one_validation_is_drawn_as_one_point() -> None:
    assert svg("short", {"one": [(0, 0.5)]}).count("<circle") == 1
    assert bars([(0, 0.0)]).endswith("0.00")
