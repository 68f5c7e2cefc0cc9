"""The site in a real browser, Chromium by Playwright, at the sizes of a phone, a laptop and a wide screen.

``make docs`` builds it. The tests leave a picture of every page in ``.pictures/site``: look at them after a
change of pages or theme.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests import ROOT
from tests.look.page.pages import CHROMIUM, missing

SITE = ROOT / "build" / "site"
PICTURES = ROOT / ".pictures" / "site"
SIZES = {"wide": (1920, 1080), "phone": (390, 844), "laptop": (1280, 800)}
PAGES = sorted(
    str(page.relative_to(SITE))
    for page in SITE.rglob("*.html")
    if not {"files", "_static"} & {*page.relative_to(SITE).parts}
)

pytestmark = [
    pytest.mark.pictures,
    pytest.mark.skipif(bool(missing()), reason=missing()),
    pytest.mark.skipif(not PAGES, reason="needs the site: run make docs"),
]


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(SITE))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


def opened(browser: Any, address: str) -> tuple[Any, list[str]]:
    """A page of the browser, and the list that its errors and its requests to other hosts are appended to."""
    page = browser.new_page()
    wrong: list[str] = []
    page.on("console", lambda said: wrong.append(said.text) if said.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("response", lambda got: wrong.append(f"{got.status} {got.url}") if got.status >= 400 else None)
    page.on("request", lambda sent: None if sent.url.startswith((address, "data:")) else wrong.append(sent.url))
    return page, wrong


def test_no_page_scrolls_sideways_and_none_has_an_error(browser: Any, address: str) -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    page, wrong = opened(browser, address)
    wide = []
    for name in PAGES:
        page.goto(f"{address}/{name}")
        for size, (width, height) in SIZES.items():
            page.set_viewport_size({"width": width, "height": height})
            if page.evaluate("document.documentElement.scrollWidth > innerWidth"):
                wide.append((name, size))
        page.screenshot(path=PICTURES / f"{name[:-5].replace('/', '-')}.png")
    page.close()
    assert (wide, wrong) == ([], [])


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("UpdateActor", "reference/"),
        ("FR011", "reference/rules"),
        ("kl/ref", "reference/metrics"),
        ("dapo", "reference/api/flowrl.graphs.html#flowrl.graphs.dapo"),
        ("clip", "reference/"),
        ("zh:优势", "concepts/"),
        ("zh:在线策略训练", "concepts/"),
    ],
)
def test_the_search_finds(browser: Any, address: str, query: str, found: str) -> None:
    page, wrong = opened(browser, address)
    folder, _, text = query.rpartition(":")
    page.goto(f"{address}/{folder}/search.html?q={text}" if folder else f"{address}/search.html?q={text}")
    page.wait_for_function("document.querySelectorAll('#search-results ul.search li').length > 0", timeout=20_000)
    page.wait_for_function("Search._pulse_status === -1 || !document.querySelector('#search-progress')")
    targets = page.evaluate("[...document.querySelectorAll('#search-results ul.search li a')].map((a) => a.href)")
    page.close()
    assert any(f"/{found}" in target for target in targets[:15]), targets
    assert wrong == []
