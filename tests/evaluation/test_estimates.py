"""avg@n, pass@k, maj@k: cases by hand, and estimators against the enumeration of all subsets."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest

from flowrl.evaluation.estimates import Estimate, Response, as_metrics, estimates

TWO = [
    [Response(1.0, "7"), Response(0.0, "8"), Response(1.0, "7"), Response(0.0, None)],
    [Response(0.0, "1"), Response(0.0, "2"), Response(1.0, "3"), Response(0.0, "2")],
]
"""Two prompts with four responses each: two right ones and one."""


def test_every_metric_equals_the_case_by_hand() -> None:
    found = estimates(TWO, (1, 2, 4))
    assert list(found) == ["avg@4", "pass@1", "pass@2", "pass@4", "maj@2", "maj@4"]
    assert found["avg@4"].mean == pytest.approx((2 / 4 + 1 / 4) / 2)
    assert found["pass@1"].mean == pytest.approx(found["avg@4"].mean)  # of scores 0 and 1
    assert found["pass@2"].mean == pytest.approx(((1 - 1 / 6) + (1 - 3 / 6)) / 2)
    assert found["pass@4"].mean == 1.0
    # in pairs: 7 ties with 8, 7 alone; 1 ties with 2, 3 ties with 2
    assert found["maj@2"].mean == pytest.approx(((1 / 2 + 1) / 2 + (0 + 1 / 2) / 2) / 2)
    assert found["maj@4"].mean == pytest.approx((1 + 0) / 2)


def test_pass_at_k_is_the_mean_over_all_subsets_of_k_responses() -> None:
    for k in (1, 2, 3, 4):
        chosen = [list(itertools.combinations(group, k)) for group in TWO]
        passes = [[any(one.score > 0.5 for one in subset) for subset in subsets] for subsets in chosen]
        expected = statistics.mean(statistics.mean(map(float, each)) for each in passes)
        assert estimates(TWO, (k,))[f"pass@{k}"].mean == pytest.approx(expected)


def test_the_standard_error_clusters_by_prompt() -> None:
    """Miller 2024: the sum of the products of deviations within a prompt, with its correction for few prompts."""
    groups = [[Response(score, None) for score in scores] for scores in ((1, 1, 0), (0, 0, 0), (1, 0, 1), (1, 1, 1))]
    scores = [[one.score for one in group] for group in groups]
    mean = statistics.mean(score for group in scores for score in group)
    products = sum((a - mean) * (b - mean) for group in scores for a in group for b in group)
    clustered = math.sqrt(products) / 12 * math.sqrt(4 / 3)
    found = estimates(groups, ())["avg@3"]
    assert found == (pytest.approx(mean), pytest.approx(clustered))
    assert found.error > statistics.stdev(score for group in scores for score in group) / math.sqrt(12)


def test_one_prompt_has_no_standard_error() -> None:
    found = estimates(TWO[:1], (1,))["pass@1"]
    assert math.isnan(found.error) and str(found) == "0.5000"
    assert str(Estimate(0.5, 0.125)) == "0.5000 ± 0.1250"


def test_as_metrics_names_the_standard_errors() -> None:
    assert as_metrics({"pass@1": Estimate(0.5, 0.1)}, "eval") == {"eval/pass@1": 0.5, "eval/pass@1/stderr": 0.1}
