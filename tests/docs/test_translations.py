"""The Chinese of Start, Tutorial and Concepts is complete, and says nothing about other names, links or numbers.

``make docs`` refuses texts of these pages that have no translation; here are the catalogs and the README's twin.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from tests import ROOT

CATALOGS = sorted((ROOT / "docs" / "locales").rglob("*.po"))
ENGLISH, CHINESE = (ROOT / "README.md").read_text(encoding="utf-8"), (ROOT / "README.zh.md").read_text(encoding="utf-8")


def exact(text: str) -> Counter[str]:
    """What both languages must have: code, targets of links, and numbers outside of both."""
    parts = re.findall(r"`[^`]+`|\]\([^)\s]*\)", text)
    rest = re.sub(r"`[^`]+`|\]\([^)\s]*\)", "", text)
    return Counter([*parts, *re.findall(r"\d+(?:\.\d+)?", rest)])


@pytest.mark.parametrize("catalog", CATALOGS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_text_is_translated_with_its_code_links_and_numbers(catalog: Path) -> None:
    pofile = pytest.importorskip("babel.messages.pofile", reason="needs pip install 'flowrl[docs]'")
    with catalog.open("rb") as file:
        messages = [message for message in pofile.read_po(file) if message.id]
    assert messages
    assert [message.id for message in messages if message.fuzzy or not message.string] == []
    assert [message.id for message in messages if exact(message.id) != exact(message.string)] == []


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
