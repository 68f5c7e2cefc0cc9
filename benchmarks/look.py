"""The page of a run of 1,000 steps of 512 rows in Chromium: seconds until it is drawn, and the size of one file.

Needs Chromium (`make pictures` installs it). `python benchmarks/look.py RUN...` measures other runs.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import table
from playwright.sync_api import sync_playwright

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from flowrl.demo.verifier import score_and_thinking
from flowrl.graph import Graph
from flowrl.graphs import grpo
from flowrl.look.page.api import Api
from flowrl.look.page.export import export
from flowrl.look.page.server import STATIC, Server
from flowrl.look.page.watched import watched
from flowrl.look.recorded_run import open_run
from tests.support.written_run import WrittenRun

REPEATS = 5
READY = "g[data-node] text"
DRAWN = {"curves": ".small .u-over", "prompts": ".detail .said", "time": ".lanes .span", "run": ".facts dl"}


def median_of(measure: Callable[[int], float]) -> float:
    return statistics.median(measure(i) for i in range(REPEATS))


def measure(browser: Any, address: str, steps: list[int]) -> list[tuple[str, float]]:
    """Seconds until parts of the page are drawn."""

    def ready(_: int) -> float:
        page = browser.new_context(viewport={"width": 1280, "height": 800}).new_page()
        start = time.perf_counter()
        page.goto(address)
        page.locator(READY).first.wait_for()
        page.locator(".newest td, .newest p").first.wait_for()
        seconds = time.perf_counter() - start
        page.context.close()
        return seconds

    found = [("page ready", median_of(ready))]
    page = browser.new_context(viewport={"width": 1280, "height": 800}).new_page()
    page.goto(address)
    page.locator(READY).first.wait_for()

    def rows(i: int) -> float:
        step = steps[len(steps) * i // REPEATS]
        start = time.perf_counter()
        page.evaluate("step => { location.hash = `rows?step=${step}`; }", step)
        page.locator(f"main[data-step='{step}'] .list[aria-busy=false] tr.group").first.wait_for()
        return time.perf_counter() - start

    found.append(("rows of a step", median_of(rows)))

    def row(i: int) -> float:
        cell = page.locator("tr.group button.cell").nth(7 + i)
        start = time.perf_counter()
        cell.click()
        page.locator(".detail .scroll[aria-busy=false]").wait_for()
        return time.perf_counter() - start

    found.append(("a row", median_of(row)))
    for tab, drawn in DRAWN.items():
        start = time.perf_counter()
        page.evaluate("tab => { location.hash = tab; }", tab)
        page.locator(drawn).first.wait_for()
        found.append((tab, time.perf_counter() - start))
    return found


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folders = [Path(path) for path in sys.argv[1:]]
        if not folders:
            graph = grpo(score_and_thinking, n=8)
            folders = [WrittenRun(graph, Path(temporary) / "run", steps=1000, prompts=64, size=8, texts=20).write()]
        api = Api(watched([open_run(folder, False, Graph) for folder in folders]))
        start = time.perf_counter()
        api.warm_up()
        found = [("warm-up, before the address is printed", time.perf_counter() - start)]
        server = Server(api)
        thread = threading.Thread(target=server.serve)
        thread.start()
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            found += measure(browser, server.address, next(iter(api.named.values())).steps)
            start = time.perf_counter()
            file = Path(temporary) / "page.html"
            file.write_text(export(api)[0], encoding="utf-8")
            found.append((f"one file, {file.stat().st_size / 1e6:.1f} MB", time.perf_counter() - start))
            start = time.perf_counter()
            page = browser.new_page()
            page.goto(file.as_uri())
            page.locator(READY).first.wait_for()
            found.append(("that file ready", time.perf_counter() - start))
            browser.close()
        server.stop()
        thread.join()
    table("the page in Chromium", ("what", "seconds"), [(what, f"{seconds:.3f}") for what, seconds in found])
    size = sum(path.stat().st_size for path in STATIC.rglob("*") if path.is_file())
    print(f"\nassets: {size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
