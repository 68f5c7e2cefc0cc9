"""`benchmarks/published_runs.py`: the committed constants and figures are those that it computes from its data."""

from __future__ import annotations

from types import ModuleType

import pytest

from flowrl.run.prediction.timing import ERRORS, FITTED
from tests import ROOT


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import published_runs

    return published_runs


def test_constants_are_fitted_on_the_half_that_is_not_held_out(published: ModuleType) -> None:
    assert published.fit() == FITTED and len(FITTED) == 4


def test_intervals_are_those_of_the_held_out_half(published: ModuleType) -> None:
    assert {stage: published.interval(published.held_out(stage)) for stage in ERRORS} == ERRORS


def test_the_docs_show_the_errors_of_both_halves(published: ModuleType) -> None:
    page = (ROOT / "docs" / "how-to" / "precision-and-memory.md").read_text(encoding="utf-8")
    for line in published.summary():
        assert f"| {' | '.join(line)} |" in page


def test_halves_share_no_model(published: ModuleType) -> None:
    runs = published.runs()
    assert {run.model for run in runs} <= published.SHAPES.keys()
    held = {run.name for stage in ERRORS for run in published.held_out(stage)}
    assert held == {run.name for run in runs if run.model in published.HELD_OUT}
    assert all(source["address"].startswith("https://") for source in published.DATA["source"])
