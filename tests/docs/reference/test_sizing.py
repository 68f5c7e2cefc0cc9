"""The page of sizes is what the prediction computes."""

from __future__ import annotations

import re
import runpy
from itertools import pairwise
from pathlib import Path

import pytest

from tests import ROOT

GENERATOR = runpy.run_path(str(ROOT / "docs" / "sizing.py"))
PAGE = (ROOT / "docs" / "reference" / "sizing.md").read_text(encoding="utf-8")


def test_the_head_and_a_cell_of_the_page_are_up_to_date(tmp_path: Path) -> None:
    assert PAGE.startswith(GENERATOR["HEAD"]), "run `make tables`"
    GENERATOR["models"]()["Qwen3-0.6B"].save_pretrained(tmp_path)
    assert f"| Qwen3-0.6B | 8 | {GENERATOR['cell'](str(tmp_path), 8, 4096)} |" in PAGE, "run `make tables`"


@pytest.mark.nightly
def test_the_committed_page_equals_the_generated_one() -> None:
    assert GENERATOR["page"]() == PAGE, "run `make tables`"


def test_a_model_fits_on_more_gpus_if_it_fits_on_fewer() -> None:
    cells = [line.split(" | ") for line in PAGE.splitlines() if re.match(r"\| \S+ \| \d", line)]
    assert {row[0].strip("| ") for row in cells} == set(GENERATOR["models"]())
    for model in GENERATOR["models"]():
        sizes = [[float(cell.strip("*| ")) for cell in row[2:]] for row in cells if row[0].strip("| ") == model]
        assert all(row == sorted(row) for row in sizes)
        for few, many in pairwise(sizes[1:]):
            assert all(wide < narrow for narrow, wide in zip(few, many, strict=True))
