"""HTML fragments for notebooks, parsed by the standard library."""

from __future__ import annotations

import math
from html.parser import HTMLParser

import pytest

from flowrl.draw.notebook import Html, block, colored, sparkline, table, visible

HOSTILE = "<!--<script>alert(1)</script> \u2028\u202e\x1b[31m\x00\ud800'\"&"


class Parsed(HTMLParser):
    """Tags and text of a fragment."""

    def __init__(self, fragment: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text: list[str] = []
        self.attributes: list[str] = []
        self.feed(fragment)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.mark.parametrize(
    "fragment",
    [
        block(HOSTILE, table([(HOSTILE, 1)], (HOSTILE, "n"))),
        colored([HOSTILE, "b"], [1.0, None], [HOSTILE, ""]),
        table([(colored([HOSTILE], [math.nan], [HOSTILE]),)]),
    ],
)
def test_text_never_becomes_markup(fragment: str) -> None:
    parsed = Parsed(fragment)
    assert set(parsed.tags) <= {"div", "p", "b", "table", "tr", "th", "td", "span", "svg", "polyline"}
    assert not [name for name in parsed.attributes if name.startswith("on")]
    assert "<!--<script>alert(1)</script>" in "".join(parsed.text)
    fragment.encode("utf-8")  # no lone surrogates


def test_control_characters_are_escapes() -> None:
    assert visible("a\x1b[31m\u202e\n") == "a\\x1b[31m\\u202e\n"


def test_a_curve_leaves_gaps_where_numbers_are_missing() -> None:
    parts = sparkline([0.0, 1.0, None, 0.5, math.nan, 1.0]).count("<polyline")
    assert parts == 1
    assert sparkline([0.0, 1.0, None, 0.5, 1.0]).count("<polyline") == 2
    assert sparkline([1.0]) == "" and sparkline([None, None]) == ""


def test_cells_that_are_html_are_inserted_as_they_are() -> None:
    assert "<b>x</b>" in table([(Html("<b>x</b>"),)])
    assert "<b>x</b>" not in table([("<b>x</b>",)])


def test_the_color_of_a_token_follows_sign_and_size() -> None:
    spans = colored(["a", "b", "c"], [-2.0, 1.0, 0.0], ["", "", ""])
    assert "rgba(178,24,43,0.50)" in spans and "rgba(33,102,172,0.25)" in spans and ",0.00)" in spans
