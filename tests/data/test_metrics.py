"""Metrics: parts merge into what one process over all rows would have reported."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowrl.data.metrics import Metric, Metrics, of_ranks
from tests.support.errors import raises

parts = st.lists(st.lists(st.integers(-1000, 1000), max_size=5), min_size=1, max_size=6)


def report(values: list[int]) -> Metrics:
    metrics = Metrics()
    metrics.mean("mean", sum(values), len(values))
    metrics.sum("sum", sum(values))
    if values:
        metrics.min("min", min(values))
        metrics.max("max", torch.tensor(float(max(values))))
    return metrics


@given(parts)
def test_merging_is_exact_in_any_grouping(split: list[list[int]]) -> None:
    values = [v for part in split for v in part]
    whole = report(values).compute()
    left, right = Metrics(), Metrics()
    for part in split:
        left.merge(report(part))
    for part in reversed(split):
        grouped = report(part)
        grouped.merge(right)
        right = grouped
    for merged in (left.compute(), right.compute()):
        assert merged.keys() == whole.keys()
        assert all(math.isclose(merged[k], whole[k]) or (math.isnan(merged[k]) and math.isnan(whole[k])) for k in whole)
    if values:
        assert whole == {"mean": sum(values) / len(values), "sum": sum(values), "min": min(values), "max": max(values)}


def test_means_are_weighted_by_count() -> None:
    metrics = Metrics()
    metrics.mean("loss", 1.0, 1)
    metrics.mean("loss", torch.tensor(9.0), torch.tensor(9))
    metrics.mean("plain", 0.25)
    assert metrics.compute() == {"loss": 1.0, "plain": 0.25}
    assert metrics["loss"] == Metric("mean", 10.0, 10.0)


def test_a_mean_without_values_is_nan() -> None:
    metrics = Metrics()
    metrics.mean("loss", 0.0, 0)
    assert math.isnan(metrics.compute()["loss"])
    metrics.mean("loss", 2.0, 1)
    assert metrics.compute() == {"loss": 2.0}


@pytest.mark.parametrize(("reduction", "values", "expected"), [("min", (3, 1, 2), 1.0), ("max", (1, 3, 2), 3.0)])
def test_minimum_and_maximum(reduction: str, values: tuple[int, ...], expected: float) -> None:
    metrics = Metrics()
    for value in values:
        getattr(metrics, reduction)("x", value)
    assert metrics.compute() == {"x": expected}


def test_mixed_reductions_of_one_metric_are_refused() -> None:
    metrics = Metrics()
    metrics.sum("x", 1)
    with raises("metrics.mixed-reductions", metric="x", reductions=("sum", "mean")):
        metrics.mean("x", 1)


def test_metrics_are_a_picklable_mapping() -> None:
    metrics = report([1, 2, 6])
    assert list(metrics) == ["mean", "sum", "min", "max"]
    assert len(metrics) == 4
    assert repr(metrics) == "Metrics({'mean': 3.0, 'sum': 9.0, 'min': 1.0, 'max': 6.0})"
    for other in (pickle.loads(pickle.dumps(metrics)), copy.deepcopy(metrics)):
        assert dict(other) == dict(metrics)
    other = copy.deepcopy(metrics)
    other.sum("sum", 1)
    assert metrics.compute()["sum"] == 9.0


def test_columns_of_ranks_join_their_rows_also_after_pickling() -> None:
    values = torch.arange(8.0).view(4, 2)
    reports = []
    for rows in ([2, 0], [1, 3]):
        report = Metrics()
        report.column("update/entropies", torch.tensor(rows), values[rows])
        reports.append(pickle.loads(pickle.dumps(report)))
    for replicated in (False, True):
        numbers, of_tokens = of_ranks(reports, replicated).columns["update/entropies"]
        assert sorted(numbers.tolist()) == [0, 1, 2, 3] and torch.equal(of_tokens, values[numbers])
    assert len(reports[0].columns["update/entropies"][0]) == 2
    numbers, of_tokens = of_ranks([reports[0], reports[0], reports[1]], True).columns["update/entropies"]
    assert sorted(numbers.tolist()) == [0, 1, 2, 3] and torch.equal(of_tokens, values[numbers])


def test_metrics_of_replicated_rows_count_once_across_ranks() -> None:
    """Two ranks of a node are given the same rows: the operator's own numbers are the same on both, an engine's are
    parts. Where each rank has its own rows, all are parts. The same holds after pickling."""
    reports = []
    for rank in range(2):
        engine, own = Metrics(), Metrics()
        engine.sum("actor/rows", 3 + rank)
        engine.max("actor/longest", 10 * rank)
        own.sum("sync/bytes", 100)
        own.mean("kl/ref", 6.0, 3)
        own.merge(engine)
        reports.append(pickle.loads(pickle.dumps(own)))
    once, parts = of_ranks(reports, replicated=True), of_ranks(reports, replicated=False)
    assert once.compute() == {"sync/bytes": 100, "kl/ref": 2.0, "actor/rows": 7, "actor/longest": 10}
    assert once["kl/ref"].weight == 3
    assert parts.compute() == once.compute() | {"sync/bytes": 200}
    assert reports[0].compute()["actor/rows"] == 3
