"""The page in a real browser: Chromium, by Playwright.

Tests of `app.js` and all other modules of ``flowrl/look/page/static``, with `server.py` and `export.py`. They leave
pictures of every tab in ``.pictures/look-*.png``: look at them after a change of the page.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from flowrl.look.page.export import export
from tests import ROOT
from tests.look.page.pages import CHROMIUM, TABS, api_of, go, missing, opened, overflow, serving, written
from tests.support.runs import lines

pytestmark = [pytest.mark.pictures, pytest.mark.skipif(bool(missing()), reason=missing())]

PICTURES = ROOT / ".pictures"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    return [written(folder / name, steps=12, prompts=8, size=4, seed=seed) for seed, name in enumerate(("one", "two"))]


@pytest.fixture(scope="module")
def address(runs: list[Path]) -> Iterator[Callable[[], str]]:
    with serving(*runs) as server:
        yield lambda: server.address


def drawn(page: Any, tab: str, query: str = "") -> None:
    go(page, f"{tab}?{query}" if query else tab)
    page.locator(TABS[tab]).first.wait_for()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), [(1280, 800), (1920, 1080)])
def test_every_tab_fits_the_window(
    browser: Any, address: Callable[[], str], width: int, height: int, scheme: str
) -> None:
    PICTURES.mkdir(exist_ok=True)
    settings = {"viewport": {"width": width, "height": height}, "color_scheme": scheme}
    with opened(browser, address(), **settings) as page:
        for tab in TABS:
            drawn(page, tab)
            page.screenshot(path=PICTURES / f"look-{tab}-{width}-{scheme}.png", animations="disabled")
            across, down = overflow(page)
            assert across <= 0 and down <= 0, tab
            cut = page.evaluate(
                """[...document.querySelectorAll("main > *, header > *, .bar > *")].filter((element) => {
                    const box = element.getBoundingClientRect();
                    return box.width && (box.right > innerWidth + 1 || box.left < -1);
                }).map((element) => element.className)"""
            )
            assert cut == [], tab


def test_numbers_are_those_of_the_run(browser: Any, address: Callable[[], str], runs: list[Path]) -> None:
    last = [line for line in lines(runs[0] / "metrics.jsonl") if "timing/step" in line][-1]
    with opened(browser, address()) as page:
        drawn(page, "now")
        page.locator("g[data-node=reward] text", has_text="reward").nth(1).wait_for()
        assert f"{last['reward/mean']:.3g}" in page.locator("g[data-node=reward]").text_content()
        assert page.locator("header output").inner_text().split() == ["12", "/", "12"]
        bar = page.locator("g[data-node=generate] rect.share")
        page.wait_for_function(
            "() => document.querySelector('g[data-node=generate] rect.share').getAttribute('width') > 0"
        )
        share = float(bar.get_attribute("width")) / float(bar.get_attribute("data-width"))
        assert share == pytest.approx(0.9 / 2.5, abs=0.01)


def test_one_cursor_drives_every_tab_and_survives_a_reload(browser: Any, address: Callable[[], str]) -> None:
    with opened(browser, address()) as page:
        drawn(page, "rows", "step=5")
        page.locator("tr.group").nth(2).click()
        page.locator("tr.row").first.click()
        page.wait_for_function("() => location.hash.includes('row=')")
        chosen = unquote(page.url.partition("row=")[2])
        assert "step=5" in page.url and re.fullmatch(r"\d+/\d+/0#0", chosen)
        page.reload()
        page.locator(".detail h2 code", has_text=chosen).wait_for()
        page.get_by_role("link", name="Time", exact=True).click()
        page.locator(".lanes h2", has_text="Step 5").wait_for()
        page.get_by_role("link", name="Now", exact=True).click()
        page.locator(".newest h2", has_text="Rows of step 5").wait_for()
        page.locator("g[data-node=update_actor]").click()
        page.locator(".card.node h2", has_text="update_actor").wait_for()
        page.get_by_label("Run").select_option("two")
        page.locator(".newest h2", has_text="Rows of step 12").wait_for()


def test_curves_are_searched_and_a_click_moves_the_cursor(browser: Any, address: Callable[[], str]) -> None:
    with opened(browser, address()) as page:
        drawn(page, "curves")
        page.get_by_label("Search metrics").fill("entropy")
        page.wait_for_function("() => document.querySelectorAll('.small').length === 1")
        for axis in ("rows", "tokens", "seconds", "steps"):
            page.get_by_role("button", name=axis, exact=True).click()
            page.locator(".small .u-over").wait_for()
        box = page.locator(".small .u-over").bounding_box()
        page.mouse.move(box["x"] + 2, box["y"] + 40)
        page.mouse.click(box["x"] + 2, box["y"] + 40)
        page.wait_for_function("() => location.hash.includes('step=1')")


def test_rows_are_sorted_filtered_and_searched(browser: Any, address: Callable[[], str]) -> None:
    with opened(browser, address(), viewport={"width": 1920, "height": 1080}) as page:
        drawn(page, "rows", "flat=1&step=3")
        page.locator("thead button", has_text="tokens").click()
        page.locator("th[aria-sort=ascending]").wait_for()
        cells = page.locator("tbody tr.row td:nth-child(4)").all_inner_texts()
        assert [int(cell) for cell in cells] == sorted(int(cell) for cell in cells) and len(cells) == 32
        page.get_by_label("Filter").select_option("lowest")
        page.wait_for_function("() => location.hash.includes('only=lowest')")
        assert set(page.locator("tbody tr.row td:nth-child(2)").all_inner_texts()) <= {"0"}
        page.get_by_label("Filter").select_option("all")
        page.get_by_label("Search rows").fill("12 plus 42")
        page.wait_for_function("() => document.querySelectorAll('tbody tr.row').length === 1")


def test_everything_works_by_keyboard(browser: Any, address: Callable[[], str]) -> None:
    with opened(browser, address()) as page:
        drawn(page, "now")
        page.keyboard.press("ArrowLeft")
        page.wait_for_function("() => location.hash.includes('step=11')")
        page.keyboard.press("3")
        page.locator(".detail .turn.sampled").wait_for()
        page.keyboard.press("j")
        page.wait_for_function("() => location.hash.includes('row=')")
        page.keyboard.press("/")
        assert page.evaluate("document.activeElement.type") == "search"
        page.keyboard.type("1")  # text in a field, not the first tab
        assert page.evaluate("location.hash").startswith("#rows")
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.tagName") == "SELECT"
        page.evaluate("document.activeElement.blur()")
        page.keyboard.press("1")
        page.locator(TABS["now"]).wait_for()
        page.locator("g[data-node=reward]").focus()
        page.keyboard.press("Enter")
        page.locator(".card.node h2", has_text="reward").wait_for()
        page.keyboard.press("Escape")
        page.locator(".card.node").wait_for(state="detached")
        page.keyboard.press("End")
        page.wait_for_function("() => !location.hash.includes('step=')")


def test_every_control_has_a_name(browser: Any, address: Callable[[], str]) -> None:
    with opened(browser, address()) as page:
        for tab in TABS:
            drawn(page, tab)
            unnamed = page.evaluate(
                """[...document.querySelectorAll("button, a, select, input, [role=button], [role=img]")]
                    .filter((e) => !(e.ariaLabel || e.title || e.textContent.trim() || e.closest("label")))
                    .map((e) => e.outerHTML)"""
            )
            assert unnamed == [], tab


@pytest.mark.parametrize("tab", TABS)
def test_text_at_200_percent_fits_across(browser: Any, address: Callable[[], str], tab: str) -> None:
    with opened(browser, address(), viewport={"width": 640, "height": 400}, device_scale_factor=2) as page:
        drawn(page, tab)
        assert overflow(page)[0] <= 0


HOSTILE = [
    "<!--<script>alert(1)</script>",
    "</script><img src=x onerror=alert(1)>",
    "line\u2028separator\u2029",
    "\u202egnp.exe\u202c",
    "\x1b[2J\x1b]0;title\x07",
    "NUL\x00here",
    "lone \\ud800 surrogate",
    "{{constructor.constructor('alert(1)')()}} ${alert(1)}",
    "a" * 1_000_000,
    "\n" * 5000,
]


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose texts, names and error are hostile."""
    folder = tmp_path_factory.mktemp("runs") / "<img src=x onerror=alert(1)>"
    written(folder, steps=2, prompts=3, size=len(HOSTILE), texts_of=HOSTILE)
    described = json.loads((folder / "run.json").read_text())
    described |= {"status": "failed", "error": "</script><script>alert(1)</script>", "command": "<b>\u202e"}
    (folder / "run.json").write_text(json.dumps(described))
    predictions = [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]
    for i, line in enumerate(predictions):
        line |= {"response": f"\ud800{HOSTILE[i % len(HOSTILE)]}", "prompt": HOSTILE[i % 8]}
    (folder / "predictions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in predictions))
    alarm = {"step": 1, "message": HOSTILE[1], "command": HOSTILE[0], "rows": ["<script>"]}
    (folder / "alarms.jsonl").write_text(json.dumps(alarm) + "\n")
    with (folder / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps({"step": 3, "timing/step": 1.0, "<img src=x onerror=alert(1)>": 1.0}) + "\n")
    return folder


@pytest.mark.parametrize("live", [True, False], ids=["live", "file"])
def test_nothing_in_hostile_text_runs_or_breaks(browser: Any, hostile: Path, tmp_path: Path, live: bool) -> None:
    if live:
        with serving(hostile) as server:
            read_everything(browser, server.address)
    else:
        file = tmp_path / "page.html"
        file.write_text(export(api_of(hostile))[0], encoding="utf-8")
        read_everything(browser, file.as_uri())


def read_everything(browser: Any, address: str) -> None:
    """Open all tabs, and every row of a group."""
    with opened(browser, address) as page:
        page.on("dialog", lambda dialog: pytest.fail(f"a dialog: {dialog.message}"))
        for tab in TABS:
            drawn(page, tab, "step=2")
            assert page.locator("script:not([src]):not([type])").count() <= 1  # a file has its chart library inside
            assert page.locator("img").count() == 0
        drawn(page, "rows", "step=2")
        shown = []
        for i in range(len(HOSTILE)):
            page.locator("tr.group").first.locator("button.cell").nth(i).click()
            page.locator(f".detail h2 code:text-is('0/3/0#{i}')").wait_for()
            shown.append(page.locator(".turn.sampled .said").evaluate("element => element.textContent"))
        assert shown == HOSTILE


def test_a_file_shows_the_same_as_the_server_without_a_network(
    browser: Any, address: Callable[[], str], runs: list[Path], tmp_path: Path
) -> None:
    file = tmp_path / "page.html"
    file.write_text(export(api_of(*runs))[0], encoding="utf-8")
    texts: list[list[str]] = []
    for where, offline in ((address(), False), (file.as_uri(), True)):
        with opened(browser, where, offline=offline) as page:
            found = []
            for tab in TABS:
                drawn(page, tab, "step=7")
                page.wait_for_function(
                    "() => !document.querySelector('[aria-busy=true]') && !/Loading/.test(document.body.innerText)"
                )
                text = page.locator("main").inner_text()
                found.append(text.replace("Why this advantage\nReplay step 7\n", ""))  # a file computes nothing
            texts.append(found)
    for tab, live, inside in zip(TABS, *texts, strict=True):
        assert inside == live, tab


def test_a_folder_of_format_1_shows_what_it_has(browser: Any, runs: list[Path], tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.mkdir()
    described = json.loads((runs[0] / "run.json").read_text())
    for key in ("format", "id", "started", "ended", "starts", "metrics", "host", "pid", "command", "git"):
        del described[key]
    (old / "run.json").write_text(json.dumps(described))
    for name in ("metrics.jsonl", "predictions.jsonl"):
        (old / name).write_bytes((runs[0] / name).read_bytes())
    with serving(old) as server, opened(browser, server.address) as page:
        for tab in ("now", "curves", "prompts", "run"):
            drawn(page, tab)
        for tab in ("rows", "time"):
            go(page, tab)
            page.get_by_text(re.compile("no row summaries|no spans")).first.wait_for()


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """The quick demo, in progress."""
    command = [sys.executable, "-m", "flowrl", "demo", "--quick", "--steps", "500", "--folder", str(tmp_path)]
    with (tmp_path / "out").open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, cwd=ROOT, start_new_session=True)
        yield process, tmp_path / "quick" / "001" / "grpo"
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_a_run_in_progress_grows_on_the_page_until_it_is_killed(
    browser: Any, demo: tuple[subprocess.Popen[bytes], Path]
) -> None:
    process, folder = demo
    while not (folder / "metrics.jsonl").exists():
        with pytest.raises(subprocess.TimeoutExpired):  # it has not ended
            process.wait(0.2)
    with serving(folder) as server, opened(browser, server.address) as page:
        page.locator(".status.running").wait_for()
        page.wait_for_function(
            "() => Number(document.querySelector('header output')?.firstChild?.textContent) >= 2", timeout=120_000
        )
        before = int(page.locator("header output").inner_text().split()[0])
        page.wait_for_function(
            f"() => Number(document.querySelector('header output').firstChild.textContent) > {before}", timeout=120_000
        )
        page.locator("g.open").first.wait_for()
        page.locator(".figure", has_text="left").wait_for()
        page.screenshot(path=PICTURES / "look-live.png")
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        page.locator(".status.killed").wait_for()
