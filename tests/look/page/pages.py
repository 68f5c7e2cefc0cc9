"""Runs to look at, a server in this process, and a browser that reports what goes wrong in it."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowrl.graph import Graph
from flowrl.graphs import grpo
from flowrl.look.page.api import Api
from flowrl.look.page.server import Server
from flowrl.look.page.watched import watched
from flowrl.look.recorded_run import open_run
from tests.support.kernel import exact
from tests.support.written_run import WrittenRun

CHROMIUM = shutil.which("chromium")
TABS = {
    "now": "section.drawing g[data-node=reward]",
    "curves": ".small .u-over",
    "rows": ".detail .turn.sampled",
    "prompts": ".detail .sides .said",
    "time": ".lanes .span",
    "compare": ".comparison h2",
    "run": ".facts dl",
}
"""What shows that a tab is drawn."""


def missing() -> str:
    """Why no browser can be started here. In continuous integration it must be there, so nothing is missing."""
    if CHROMIUM is None and not os.environ.get("CI"):
        return "Chromium is not installed; make pictures installs it"
    return ""


def written(folder: Path, **settings: Any) -> Path:
    """The folder of a finished run, made up."""
    return WrittenRun(grpo(exact, n=4), folder, **settings).write()


def api_of(*folders: Path) -> Api:
    return Api(watched([open_run(folder, False, Graph) for folder in folders]))


def asked(api: Api, view: str, **parameters: object) -> Any:
    """The answer to a view."""
    return api.answer(view, {name: str(value) for name, value in parameters.items()})


@contextmanager
def serving(*folders: Path) -> Iterator[Server]:
    """A server of the page of these runs."""
    api = api_of(*folders)
    api.warm_up()
    server = Server(api)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join()


@dataclass
class Heard:
    """What a page did: errors on its console, and requests to others."""

    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@contextmanager
def opened(browser: Any, address: str, **settings: Any) -> Iterator[Any]:
    """A page at an address; fails on an error on its console and on a request to anything but itself."""
    given: Mapping[str, Any] = {"viewport": {"width": 1280, "height": 800}, **settings}
    context, heard = browser.new_context(**given), Heard()
    own = address.partition("?")[0]
    page = context.new_page()
    page.on(
        "console", lambda message: heard.errors.append(message.text) if message.type in ("error", "warning") else None
    )
    page.on("pageerror", lambda error: heard.errors.append(str(error)))
    page.on("request", lambda request: heard.requests.append(request.url))
    try:
        page.goto(address)
        page.locator("header").wait_for()
        yield page
        assert heard.errors == []
        assert [url for url in heard.requests if not url.startswith((own, "data:"))] == []
    finally:
        context.close()


def go(page: Any, fragment: str) -> None:
    """Go to a view."""
    page.evaluate("fragment => { location.hash = fragment; }", fragment)


def overflow(page: Any) -> tuple[int, int]:
    """Pixels of the document that do not fit the window, across and down."""
    across, down = page.evaluate(
        "[document.documentElement.scrollWidth - innerWidth, document.documentElement.scrollHeight - innerHeight]"
    )
    return across, down
