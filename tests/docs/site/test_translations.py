"""The Chinese of Start, Tutorial and Concepts is complete, in the glossary's words, with the same names and numbers.

``make docs`` refuses texts of these pages that have no translation; here are the catalogs and the README's twin.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT

CATALOGS = sorted((ROOT / "docs" / "locales").rglob("*.po"))
GLOSSARY = (ROOT / "docs" / "locales" / "README.md").read_text(encoding="utf-8").partition("|---|---|\n")[2]
TERMS = sorted(re.findall(r"^\| (.+) \| (.+) \|$", GLOSSARY, re.MULTILINE), key=lambda term: -len(term[0]))
ENGLISH, CHINESE = (ROOT / "README.md").read_text(encoding="utf-8"), (ROOT / "README.zh.md").read_text(encoding="utf-8")


def exact(text: str) -> Counter[str]:
    """What both languages must have: code, targets of links, and numbers outside of both."""
    parts = re.findall(r"`[^`]+`|\]\([^)\s]*\)", text)
    rest = re.sub(r"`[^`]+`|\]\([^)\s]*\)", "", text)
    return Counter([*parts, *re.findall(r"\d+(?:\.\d+)?", rest)])


def read(catalog: Path) -> list[Any]:
    pofile = pytest.importorskip("babel.messages.pofile", reason="needs pip install 'flowrl[docs]'")
    with catalog.open("rb") as file:
        return [message for message in pofile.read_po(file) if message.id]


def other_terms(english: str, chinese: str) -> list[tuple[str, str]]:
    """The terms of the glossary in an English text, outside code and targets, whose translation the other one lacks."""
    rest, found = re.sub(r"`[^`]+`|\]\([^)\s]*\)", " ", english), []
    for term, translations in TERMS:  # the longest first: a ratio in an importance ratio is not one of its own
        words = "|".join(map(re.escape, term.split(", ")))
        rest, times = re.subn(rf"\b(?:{words})(?:e?s)?\b", " ", rest, flags=re.IGNORECASE)
        if times and not any(word in chinese for word in translations.split(" / ")):
            found.append((term, translations))
    return found


@pytest.mark.parametrize("catalog", CATALOGS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_text_is_translated_with_its_code_links_and_numbers(catalog: Path) -> None:
    messages = read(catalog)
    assert messages
    assert [message.id for message in messages if message.fuzzy or not message.string] == []
    assert [message.id for message in messages if exact(message.id) != exact(message.string)] == []


@pytest.mark.parametrize("catalog", CATALOGS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_term_is_translated_as_in_the_glossary(catalog: Path) -> None:
    found = [(message.string, other_terms(message.id, message.string)) for message in read(catalog) if message.string]
    assert [(text, terms) for text, terms in found if terms] == []


@pytest.mark.parametrize(
    ("english", "chinese", "missing"),
    [
        ("Log-probs of two policies", "两个策略的对数概率", []),
        ("Importance ratios", "重要性比率", []),
        ("Importance ratios", "重要性权重", ["importance ratio"]),
        ("The [advantage](value.md) of a `reward`", "奖励", ["advantage"]),
    ],
)
def test_a_term_is_a_whole_word_outside_of_code(english: str, chinese: str, missing: list[str]) -> None:
    assert [term for term, _ in other_terms(english, chinese)] == missing


def test_the_folders_to_translate_have_a_catalog_for_every_page() -> None:
    pages = [page for name in ("start", "tutorial", "concepts") for page in (ROOT / "docs" / name).glob("*.md")]
    expected = {page.relative_to(ROOT / "docs").with_suffix("") for page in [*pages, ROOT / "docs" / "index.md"]}
    assert {path.relative_to(ROOT / "docs/locales/zh_CN/LC_MESSAGES").with_suffix("") for path in CATALOGS} == expected


def test_the_readme_and_its_twin_have_the_same_code_and_sections() -> None:
    def blocks(text: str) -> list[str]:
        return re.findall(r"^```\w*\n.*?^```$", text, re.MULTILINE | re.DOTALL)

    def names(text: str) -> set[str]:
        return set(re.findall(r"`[^`\n]+`|docs/[\w/-]+\.md", text))

    def depths(text: str) -> list[int]:
        return [
            len(marks) for marks in re.findall(r"^(#+) ", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), re.M)
        ]

    assert [re.sub(r"#.*", "", block) for block in blocks(CHINESE)] == [re.sub(r"#.*", "", b) for b in blocks(ENGLISH)]
    assert depths(CHINESE) == depths(ENGLISH)
    assert names(CHINESE) == names(ENGLISH)
