"""The page of metrics has every metric that the code reports and no other, and its healthy ranges fire no alarm."""

from __future__ import annotations

from pathlib import Path

from flowrl.run.alarms import DEFAULT, History
from tests import ROOT
from tests.docs.reference.metric_names import GENERATOR, PAGE, reported, undocumented
from tests.support.jobs import job_of
from tests.support.rewards import asks_for_digits
from tests.support.runs import lines, train

OF_EVALUATIONS = {name for name in PAGE if name.startswith("eval/")}
"""Tested by `tests/evaluation/test_evaluation.py`."""
OF_EVERY_LINE = {"step", "time", "<validation>/<metric>"}


def test_the_committed_page_equals_the_generated_one() -> None:
    assert (ROOT / "docs/reference/metrics.md").read_text(encoding="utf-8") == GENERATOR["page"](), "run `make tables`"


def test_the_page_has_every_metric_that_the_code_reports_and_no_other() -> None:
    assert {*PAGE} - OF_EVALUATIONS - OF_EVERY_LINE == reported()


def test_a_run_writes_only_metrics_of_the_page(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    train(job_of("grpo", tiny, asks_for_digits, n=4), prompts_file, tmp_path, steps=1)
    assert undocumented(lines(tmp_path / "metrics.jsonl")[-1]) == []


def test_a_metric_within_its_healthy_range_fires_no_alarm() -> None:
    for name, (low, high) in {name: entry["range"] for name, entry in PAGE.items() if "range" in entry}.items():
        for value in (low + 0.01 * (high - low), high):
            steps = [{"step": step, name: value} for step in range(1, 15)]
            ends = range(1, len(steps) + 1)
            assert not [rule for end in ends for rule in DEFAULT if rule.check(History(steps[:end]))], (name, value)


def test_every_alarm_about_a_metric_is_on_the_page() -> None:
    for end, text in GENERATOR["alarms"]():
        assert [name for name in PAGE if text in GENERATOR["fires"](name)], end


def test_every_metric_has_a_formula_and_a_unit() -> None:
    for name, entry in PAGE.items():
        assert {"formula", "unit"} <= entry.keys() <= {"formula", "unit", "healthy", "range"}, name
        assert "|" not in "".join(map(str, entry.values())), name
