"""`Feedback` reports the scores of groups and changes no column."""

from __future__ import annotations

import math

import pytest
import torch

from flowrl import After, Metrics
from flowrl.data.metrics import of_ranks
from flowrl.errors import ParameterError
from flowrl.graphs import grpo
from flowrl.operators import Feedback
from tests.support.jobs import column
from tests.support.kernel import exact

NAN = float("nan")


def reported(scores: list[list[float]], uid: list[str]) -> Metrics:
    given, metrics = torch.tensor(scores), Metrics()
    mask = ~given.isnan()
    out = Feedback()(given, mask, column(uid), metrics=metrics)
    assert torch.equal(out.isnan(), given.isnan()) and torch.equal(out[mask], given[mask])
    return metrics


def test_feedback_reports_the_scores_of_each_group() -> None:
    rows = [[0.5, 0.25], [1.0, NAN], [NAN, NAN], [2.0, NAN], [NAN, NAN]]
    metrics = reported(rows, ["a", "b", "a", "b", "c"])
    assert metrics.scores() == {"a": (0.75,), "b": (1.0, 2.0)}  # a masked row has none, and so has all of c
    assert metrics.compute() == {"feedback/differ": 0.5}
    assert reported([[1.0], [1.0]], ["a", "a"]).compute() == {"feedback/differ": 0.0}
    assert math.isnan(reported([[NAN]], ["a"]).compute()["feedback/differ"])


def test_scores_of_rounds_and_ranks_are_merged() -> None:
    parts = [reported([[1.0], [0.0]], ["a", "a"]), reported([[1.0], [1.0]], ["b", "a"])]
    whole = of_ranks(parts, replicated=False)
    assert whole.scores() == {"a": (1.0, 0.0, 1.0), "b": (1.0,)}
    assert whole.compute() == {"feedback/differ": 0.5}
    assert of_ranks(parts[:1] * 2, replicated=True).scores() == parts[0].scores()


@pytest.mark.parametrize("number_first", [True, False])
def test_scores_and_a_number_under_one_metric_name_are_refused(number_first: bool) -> None:
    metrics = Metrics()
    report = [lambda: metrics.mean("x", 1.0), lambda: metrics.groups("x", {"a": [1.0]})]
    report[not number_first]()
    with pytest.raises(ParameterError, match="'x': "):
        report[number_first]()


def test_every_reader_of_the_scores_reads_from_feedback() -> None:
    graph = grpo(exact).edit(insert={"feedback": After("reward", Feedback())})
    readers = [node.name for node in graph.nodes.values() if "reward" in node.sources]
    assert readers == ["feedback"] and graph.check() == []
