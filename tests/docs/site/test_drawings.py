"""The pictures of the concepts (docs/drawings): each is on its page, drawn by the code, and can be translated."""

from __future__ import annotations

import importlib
import json
import re
import runpy
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from tests import ROOT

PICTURES = runpy.run_path(str(ROOT / "docs" / "pictures.py"))
DRAWN = list(PICTURES["draw_all"]())
NAMES = [name for name, language, _ in DRAWN if not language]


@pytest.mark.parametrize(("name", "language", "svg"), DRAWN, ids=[f"{name}{language}" for name, language, _ in DRAWN])
def test_a_picture_is_the_one_that_the_code_draws(name: str, language: str, svg: str) -> None:
    folder = ROOT / "docs" / "pictures"
    again = "run `python docs/pictures.py`"
    assert (folder / f"{name}{language}.svg").read_text(encoding="utf-8") == svg, again
    assert (folder / f"{name}-dark{language}.svg").read_text(encoding="utf-8") == PICTURES["dark"](svg), again


def test_every_concept_has_one_picture_of_its_own() -> None:
    pages = sorted(page for page in (ROOT / "docs" / "concepts").glob("*.md") if page.stem != "index")
    assert [page.stem for page in pages] == sorted(NAMES)
    for page in pages:
        shown = re.findall(r'(?:src|srcset)="\.\./pictures/([\w-]+)\.svg"', page.read_text(encoding="utf-8"))
        assert shown == [f"{page.stem}-dark", page.stem]


def _translated(text: str, tables: Mapping[str, Iterable[str]], folder: Path) -> Path:
    """Translate these texts of each picture by `text`; returns the folder of all languages."""
    lines = [
        f"[{name}]\n" + "".join(f"{json.dumps(key)} = {text!r}\n" for key in keys) for name, keys in tables.items()
    ]
    file = folder / "xx" / "pictures.toml"
    file.parent.mkdir()
    file.write_text("".join(lines), encoding="utf-8")
    return folder


def _english(name: str) -> set[str]:
    """The texts of a picture that are translated."""
    return {*importlib.import_module(f"drawings.{name.replace('-', '_')}").TEXTS.values()}


def test_a_translation_replaces_every_text_but_code(tmp_path: Path) -> None:
    locales = _translated("译", {name: _english(name) for name in NAMES}, tmp_path)
    drawn = {name: svg for name, language, svg in PICTURES["draw_all"](locales) if language == ".xx"}
    assert [*drawn] == NAMES
    for name, svg in drawn.items():
        shown = {*re.findall(r"<(?:text|title)\b[^>]*>(.*?)</", svg)}
        assert "译" in shown
        assert not shown & {line for text in _english(name) for line in text.split("\n")}


def test_a_text_without_a_translation_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        list(PICTURES["draw_all"](_translated("行", {"handshake": ["rows"]}, tmp_path)))


@pytest.mark.parametrize(
    ("text", "fits"), [("rollout", True), ("rollout engine", False), ("采样引擎", True), ("采样采样采样", False)]
)
def test_a_text_that_may_leave_its_box_is_refused(text: str, fits: bool) -> None:
    sheet = importlib.import_module("drawings.sheet").Sheet("a box", 100)
    if fits:
        sheet.box(10, 10, 80, 40, text)
        return
    with pytest.raises(ValueError, match=text):
        sheet.box(10, 10, 80, 40, text)
