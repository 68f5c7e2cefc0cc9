"""The pictures of the concepts in Chromium: no text is cut, and none meets another text or the line of a box."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import ROOT
from tests.look.page.pages import CHROMIUM, missing

pytestmark = [pytest.mark.pictures, pytest.mark.skipif(bool(missing()), reason=missing())]

PAGES = sorted((ROOT / "docs" / "concepts").glob("*.md"))
PICTURES = [
    path
    for page in PAGES
    for path in sorted((ROOT / "docs" / "pictures").glob("*.svg"))
    if path.name.partition(".")[0] == page.stem  # the dark ones differ in colors only
]

FOUND = """() => {
  const box = (element) => { const r = element.getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom]; };
  const all = (names) => [...document.querySelectorAll(names)].map((element) => [element.textContent, box(element)]);
  return { whole: box(document.querySelector("svg")), texts: all("text"), shapes: all("svg > rect, polygon").slice(1) };
}"""


def _meet(one: list[float], other: list[float], by: float) -> bool:
    (a, b, c, d), (e, f, g, h) = one, other
    return min(c, g) - max(a, e) > by and min(d, h) - max(b, f) > by


def _inside(one: list[float], other: list[float]) -> bool:
    (a, b, c, d), (e, f, g, h) = one, other
    return e <= a and f <= b and c <= g and d <= h


@pytest.fixture(scope="module")
def page() -> Any:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser.new_page()
        browser.close()


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
def test_every_text_is_legible(page: Any, path: Path) -> None:
    page.set_content(f"<body style='margin: 0'>{path.read_text(encoding='utf-8')}</body>")
    found = page.evaluate(FOUND)
    for number, (text, box) in enumerate(found["texts"]):
        assert _inside(box, found["whole"]), text
        assert not [other for other, at in found["texts"][:number] if _meet(box, at, by=3)], text
        assert not [at for _, at in found["shapes"] if _meet(box, at, by=0.5) and not _inside(box, at)], text
