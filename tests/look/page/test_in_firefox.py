"""The page and its file (`export.py`, `app.js`) in Firefox."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowrl.look.page.export import export
from tests.look.page.firefox import FIREFOX, Firefox, firefox
from tests.look.page.pages import TABS, api_of, serving, written

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(FIREFOX is None, reason="Firefox is not installed; apt-get install firefox-esr installs it"),
]


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Firefox]:
    profile = tmp_path / "profile"
    profile.mkdir()
    with firefox(profile) as found:
        yield found


def texts(browser: Firefox, address: str) -> dict[str, str]:
    """The text of every tab at a step."""
    browser.open(address)
    found = {}
    for tab, drawn in TABS.items():
        browser.evaluate("void (location.hash = arguments[0])", f"{tab}?step=7")
        browser.wait(f"document.querySelector('main[data-step=\"7\"]') && document.querySelector({json.dumps(drawn)})")
        browser.wait("!document.querySelector('[aria-busy=true]') && !/Loading/.test(document.body.innerText)")
        text = browser.evaluate("document.querySelector('main').innerText")
        found[tab] = text.replace("Why this advantage\nReplay step 7\n", "")  # a file computes nothing
    assert browser.errors() == []
    return found


def test_a_file_shows_the_same_as_the_server_without_a_network(browser: Firefox, tmp_path: Path) -> None:
    runs = [
        written(tmp_path / name, steps=12, prompts=8, size=4, seed=seed) for seed, name in enumerate(("one", "two"))
    ]
    file = tmp_path / "page.html"
    file.write_text(export(api_of(*runs))[0], encoding="utf-8")
    with serving(*runs) as server:
        live = texts(browser, server.address)
    browser.set_offline()
    assert texts(browser, file.as_uri()) == live
    assert "reward" in live["now"]


def test_errors_of_a_page_are_found(browser: Firefox, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    policy = "<!DOCTYPE html><meta http-equiv=Content-Security-Policy content=\"connect-src 'none'\">"
    page.write_text(f"{policy}<script>fetch('http://127.0.0.1:1/'); throw Error('of a script')</script>")
    browser.open(page.as_uri())
    found = " ".join(browser.errors())
    assert "Content-Security-Policy" in found and "of a script" in found
