"""``flowrl look``: text (flowrl/look/page/text.py), JSON, one file and a trace; refusals.

The live page is tested in `tests/look/page`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from flowrl.run.engine.timeline import Timeline
from tests import ROOT
from tests.look.page.pages import written
from tests.support.command_line import Command, is_paragraph
from tests.support.written_run import SECONDS


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return written(tmp_path / "runs" / "mine", steps=3, texts_of=["fine", "well", "\x1b[2J\u202egone\x00"])


def test_text_for_a_terminal(command: Command, run: Path) -> None:
    result = command("look", run, "--text")
    assert result.code == 0 and "mine  finished  step 3 of 3" in result.out
    for word in ("reward/mean", "update_actor", "generate", "fine", "\\x1b[2J\\u202egone\\x00"):
        assert word in result.out
    assert not {"\x1b", "\x00", "\u202e"} & set(result.out)


def test_json_is_the_state(command: Command, run: Path) -> None:
    found = json.loads(command("look", run, "--json").out)
    assert found["runs"][0]["status"] == "finished" and found["now"]["mine"]["done"] == 3


def test_one_file(command: Command, run: Path, tmp_path: Path) -> None:
    result = command("look", run, "--to", tmp_path / "new" / "page.html")
    assert result.code == 0 and "rows of 3 of 3 steps" in result.out.replace("\n", " ")
    assert (tmp_path / "new" / "page.html").read_text().startswith("<!doctype html>")
    result = command("look", run, "--to", tmp_path / "page.html", "--rows", "none")
    assert "no prompts or responses" in result.out.replace("\n", " ")


def test_a_trace_has_all_spans(command: Command, run: Path, tmp_path: Path) -> None:
    assert command("look", run, "--trace", tmp_path / "trace.json").code == 0
    spans = Timeline.load(tmp_path / "trace.json").spans
    assert len(spans) == 3 * 7 and {span.step for span in spans} == {0, 1, 2}
    assert sum(span.seconds for span in spans if span.name == "generate") == pytest.approx(3 * SECONDS["generate"])


@pytest.mark.parametrize(("option", "value"), [("--rows", "all"), ("--to", "file/a.html"), ("--trace", "file/a.json")])
def test_refusals_name_the_option(command: Command, run: Path, tmp_path: Path, option: str, value: str) -> None:
    (tmp_path / "file").touch()
    result = command("look", run, option, value)
    assert result.code == 2 and is_paragraph(result) and option in result.err


LINES = re.findall(
    r"^flowrl (look .*?) +#", (ROOT / "docs" / "how-to" / "look.md").read_text(encoding="utf-8"), re.MULTILINE
)


@pytest.mark.parametrize("line", [line for line in LINES if "--" in line])
def test_the_commands_of_the_docs(command: Command, run: Path, tmp_path: Path, line: str) -> None:
    (tmp_path / "runs" / "grpo-001").symlink_to(run)
    result = command(*line.split())
    assert result.code == 0 and result.out


def test_a_folder_without_a_run_is_refused(command: Command, tmp_path: Path) -> None:
    result = command("look", tmp_path, "--text")
    assert result.code == 2 and is_paragraph(result) and "holds no run" in result.err
