"""`benchmarks/house.py`: which lines it counts, and that it finds what is there twice."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest

from tests import ROOT


@pytest.fixture
def house(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("house")


def test_line_counts_exclude_imports_comments_and_docstrings(house: ModuleType) -> None:
    head = '"""What\n\nit is."""\n\nfrom a import (\n    b,\n)\n'
    source = head + '\n# why\ndef f():\n    """Does it."""\n    return """\n\n"""\n'
    assert house.lines_of(source) == (4, 4)


def test_longest_repeat_searches_within_and_across_files(house: ModuleType) -> None:
    run = "x = 1\n\ny = 2\nz = 3\n"
    other = "def f():\n    x = 1\n    y = 2\n    z = 3\n"
    assert house.longest_repeat({"a.py": f"{run}w = 4\n", "b.py": other}) == (3, "a.py:1 = b.py:2")
    assert house.longest_repeat({"a.py": f"{run}w = 4\n{run}"}) == (3, "a.py:1 = a.py:6")
    assert house.longest_repeat({"a.py": "x = 1\n", "b.py": "y = 1\n"}) == (0, "")
