"""The pages of Start work as a newcomer types them, and the page of installs has every extra."""

from __future__ import annotations

import re
import tomllib
from functools import partial
from pathlib import Path

import pytest

from flowrl.demo import build
from tests import ROOT
from tests.docs.typed import Typist

START = ROOT / "docs" / "start"
PAGES = ("first-run", "first-algorithm", "first-reward")


def test_start_works_with_fast_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowrl.demo.run.build", partial(build, steps=2))
    reader = Typist(tmp_path, fast=True, in_process=("flowrl ", "python "))
    for name in PAGES:
        reader.type(START / f"{name}.md")


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_start_works_as_printed(tmp_path: Path) -> None:
    reader = Typist(tmp_path)
    for name in PAGES:
        reader.type(START / f"{name}.md")


def test_the_page_of_installs_has_every_extra_and_the_required_versions() -> None:
    page = (START / "install.md").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    rows = re.findall(r"^\| (`\w.*`) \|", page.partition("## Extras")[2], re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == {*project["optional-dependencies"]}
    versions = dict(re.findall(r"(Python|torch|transformers) (\d[\d.]*) or newer", page))
    needs = [*project["dependencies"], f"Python{project['requires-python']}"]
    for name, version in versions.items():
        [needed] = [need.partition(">=")[2] for need in needs if need.startswith(f"{name}>=")]
        assert version.rstrip(".") in (needed, needed.removesuffix(".0"))
    assert len(versions) == 3
