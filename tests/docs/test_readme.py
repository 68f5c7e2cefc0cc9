"""The README is short, its blocks run and print what it shows, and its table lists every algorithm and engine."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
from typing import Any

import pytest

import flowrl.backends
import flowrl.graphs
from flowrl import Job
from tests import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
PICTURES = runpy.run_path(str(ROOT / "docs" / "pictures.py"))


def blocks(language: str) -> list[str]:
    """The blocks of a language, in order."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return [text for label, text in found if label == language]


def section(heading: str) -> str:
    return README.partition(f"## {heading}\n")[2].partition("\n## ")[0]


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """The names that the Python blocks define, and as ``printed`` what they print."""
    names: dict[str, Any] = {"__name__": "page_readme"}
    with contextlib.chdir(ROOT), contextlib.redirect_stdout(io.StringIO()) as out:
        for block in blocks("python"):
            exec(compile(block, "README.md", "exec", dont_inherit=True), names)
    return names | {"printed": out.getvalue()}


def test_the_readme_is_within_its_limits() -> None:
    assert len(README.split()) <= 900
    assert len(README.splitlines()) <= 180
    assert len(blocks("mermaid")) == 1


def test_the_algorithm_has_twelve_lines_and_the_operator_six() -> None:
    first, *_, last = blocks("python")
    assert len(f"@algorithm{first.partition('@algorithm')[2]}".partition("\n\n")[0].splitlines()) == 12
    assert len(last.splitlines()) == 6


def test_the_diff_and_the_picture_are_printed_by_the_code(page: dict[str, Any]) -> None:
    assert blocks("text") == [page["printed"]] == [f"{page['graph'].diff(page['grpo'])}\n"]
    assert blocks("mermaid") == [f"{page['grpo'].mermaid()}\n"]


def test_the_graphs_of_the_readme_pass_every_rule(page: dict[str, Any]) -> None:
    assert [page[name].check(prompts=32) for name in ("graph", "grpo", "shorter")] == [[], [], []]


def test_the_errors_shown_are_those_of_the_code(page: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    [session] = blocks("pycon")
    steps = re.findall(r"^>>> (.*)\n(.*)\n", session, re.MULTILINE)
    assert len(steps) == 3 and session.count("\n") == 6
    for code, shown in steps:
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                exec(code, page)
        except Exception as error:
            printed.write(f"{type(error).__module__}.{type(error).__name__}: {error}\n")
        assert printed.getvalue() == f"{shown}\n"


@pytest.mark.parametrize("side", ["-", "+"])
def test_both_sides_of_each_diff_run(side: str, page: dict[str, Any]) -> None:
    [diff] = blocks("diff")
    public = {name: getattr(module, name) for module in (flowrl, flowrl.backends) for name in module.__all__}
    names = page | public
    exec("".join(f"{line[1:]}\n" for line in diff.splitlines() if line[0] in (" ", side)), names)
    job = names["job"]
    assert isinstance(job, Job) and {*job.graph.bindings} == {"actor", "ref", "rollout"}
    assert job.graph.to_dict()["nodes"] == page["grpo"].to_dict()["nodes"]
    assert (side == "+") == ("processes of Colocate" in str(job.plan()))


def test_the_table_has_every_algorithm_and_every_engine() -> None:
    *families, engines, gpus = section("What there is").strip().splitlines()[2:]
    names = [name for row in families for name in re.findall(r"`(\w+)`", row)]
    assert sorted(names) == sorted(flowrl.graphs.__all__)
    assert all(hasattr(flowrl.backends, name) for name in re.findall(r"`(\w+)`", engines))
    assert "**GPU: untested**" in gpus
    page = (ROOT / "docs" / "evidence" / "learning.md").read_text(encoding="utf-8")
    for row in families:
        names = re.findall(r"`(\w+)`", row)
        measured = sum(f"| `{name}` |" in page for name in names)
        assert ("measured" in row) == (measured > 0) and (not measured or f"{measured} of {len(names)} " in row), row


def test_the_pictures_are_drawn_by_the_code(page: dict[str, Any]) -> None:
    folder = ROOT / "docs" / "pictures"
    assert (folder / "ppo.svg").read_text(encoding="utf-8") == PICTURES["banner"](page["graph"])
    shown = re.findall(r'(?:src|srcset)="docs/pictures/([\w-]+)\.svg"', README)
    assert shown == ["ppo-dark", "ppo", "quick-dark", "quick"]
    for name in ("ppo", "quick"):
        light = (folder / f"{name}.svg").read_text(encoding="utf-8")
        assert (folder / f"{name}-dark.svg").read_text(encoding="utf-8") == PICTURES["dark"](light)


def test_the_banner_shows_every_node(page: dict[str, Any]) -> None:
    assert {*PICTURES["PPO"]} == {*page["graph"].nodes}
    assert len({*PICTURES["PPO"].values()}) == len(PICTURES["PPO"])


def test_the_curve_shows_the_stored_run_of_the_quick_demo() -> None:
    drawn = (ROOT / "docs" / "pictures" / "quick.svg").read_text(encoding="utf-8")
    heights = [float(y) for y in re.findall(r'<circle cx="[\d.]+" cy="([\d.]+)"', drawn)]
    zero, one = (float(y) for y in (re.findall(r'<path d="M52 ([\d.]+)H616', drawn)[i] for i in (0, -1)))
    shares = [(zero - y) / (zero - one) for y in heights[:5]]
    assert f"from {shares[0]:.0%} to {shares[-1]:.0%}".replace("%", " %") in README
