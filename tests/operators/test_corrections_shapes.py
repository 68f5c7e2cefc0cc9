"""Rollout correction by distance, by the mean of the batch, several in a chain, and by name."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flowrl.core.graphs.after import After
from flowrl.data.metrics import Metrics
from flowrl.graphs import grpo
from flowrl.operators import RolloutCorrection
from flowrl.operators.corrections import PRESETS, Level, Mode
from tests.nightly import examples
from tests.operators.advantages.ragged import masks, numbers
from tests.support.errors import raises
from tests.support.kernel import exact

# Ratios of 2, 1/2, 4 | 1, 1 | 3.
MASK = torch.tensor([[True, True, True], [True, True, False], [True, False, False]])
D = torch.tensor([[2.0, 0.5, 4.0], [1.0, 1.0, 1.0], [3.0, 1.0, 1.0]]).log()


def weights(correction: RolloutCorrection, d: Tensor = D, mask: Tensor = MASK) -> tuple[Tensor, dict[str, float]]:
    metrics = Metrics()
    found = correction(torch.ones(mask.shape), d, torch.zeros(mask.shape), mask, metrics=metrics)
    return found, metrics.compute()


def distance(d: list[float], level: str) -> float:
    """How far apart engine and trainer are on a row without padding; k3 is that of samples of the engine."""
    if level == "maximum":
        return math.exp(min(max(map(abs, d)), 20.0))
    return sum(x * x / 2 if level == "k2" else math.exp(min(x, 20.0)) - 1 - min(x, 20.0) for x in d) / len(d)


@pytest.mark.parametrize("level", ["maximum", "k2", "k3"])
@examples(40)
@given(mask=masks(), seed=st.integers(0, 2**31), scale=st.sampled_from([0.01, 1.0, 30.0]), high=st.floats(1e-4, 5.0))
def test_a_distance_equals_loops_over_ragged_masks(
    level: Level, mask: Tensor, seed: int, scale: float, high: float
) -> None:
    d = scale * numbers(mask, seed)
    found, metrics = weights(RolloutCorrection(level, "reject", high=high), d.nan_to_num(9.0), mask)
    far = [distance(row[on].double().tolist(), level) if on.any() else None for row, on in zip(d, mask, strict=True)]
    for row, on, x in zip(found, mask, far, strict=True):
        if x is not None and not math.isclose(x, high, rel_tol=1e-4):
            assert row[on].tolist() == [float(x <= high)] * int(on.sum())
        assert (row[~on] == 0).all()
    if known := [x for x in far if x is not None]:
        what = "ratio" if level == "maximum" else level
        assert metrics[f"rollout_corr/{what}_mean"] == pytest.approx(sum(known) / len(known), rel=2e-4, abs=1e-6)
        assert metrics[f"rollout_corr/{what}_max"] == pytest.approx(max(known), rel=2e-4, abs=1e-6)
        assert metrics[f"rollout_corr/{what}_min"] == pytest.approx(min(known), rel=2e-4, abs=1e-6)


@pytest.mark.parametrize("level", ["minimum", "maximum", "k2", "k3"])
@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_empty_rows_are_kept(level: Level, shape: tuple[int, int]) -> None:
    found, metrics = weights(
        RolloutCorrection(level, "reject", high=2.0), torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)
    )
    assert found.shape == shape and metrics == {}


@pytest.mark.parametrize(
    "parameters",
    [
        {"mode": "truncate", "level": "maximum"},
        {"mode": "mask", "level": "k2"},
        {"mode": "reject", "level": "k3", "low": 0.001},
        {"mode": "reject", "level": "k3", "high": None},
        {"mode": "reject", "normalize": True},
    ],
)
def test_invalid_settings_are_refused(parameters: dict[str, Any]) -> None:
    with raises("correction.invalid-settings", mode=parameters["mode"]):
        RolloutCorrection(**parameters)


@pytest.mark.parametrize(
    ("level", "inside", "outside"),
    [
        ("maximum", 4.01, 3.99),  # |log 4| is the largest; log 1/2 counts as log 2
        ("k2", 0.4806, 0.4802),  # (log(2)**2 + log(2)**2 + log(4)**2) / 2 / 3 = log(2)**2
        ("k3", 0.7047, 0.7045),  # (6.5 - 3 - log(4)) / 3
    ],
)
def test_rows_beyond_the_bound_are_rejected(level: Level, inside: float, outside: float) -> None:
    inner, metrics = weights(RolloutCorrection(level, "reject", high=inside), D[:2], MASK[:2])
    assert torch.equal(inner, MASK[:2].float()) and metrics["rollout_corr/bounded"] == 0
    outer, metrics = weights(RolloutCorrection(level, "reject", high=outside), D[:2], MASK[:2])
    assert outer.tolist() == [[0.0, 0.0, 0.0], [1.0, 1.0, 0.0]]
    assert metrics["rollout_corr/bounded"] == 0.5


@examples(40)
@given(masks(), st.integers(0, 2**31), st.sampled_from(["truncate", "mask"]), st.sampled_from(["token", "sequence"]))
def test_normalized_weights_differ_only_by_their_mean(mask: Tensor, seed: int, mode: Mode, level: Level) -> None:
    """Over tokens, or over rows, those of weight 0 among them."""
    d = numbers(mask, seed, off=0.0)
    plain, _ = weights(RolloutCorrection(level, mode, high=1.5), d, mask)
    found, metrics = weights(RolloutCorrection(level, mode, high=1.5, normalize=True), d, mask)
    rows = [row.double() for row, on in zip(plain, mask, strict=True) if on.any()]
    units = torch.cat([r[m] for r, m in zip(plain.double(), mask, strict=True)]) if level == "token" else None
    if units is None:
        units = torch.stack([row.max() for row in rows]) if rows else torch.zeros(0)
    mean = float(units.mean()) if len(units) else 0.0
    torch.testing.assert_close(found.double(), plain.double() / mean if mean else plain.double(), rtol=1e-5, atol=1e-7)
    if mean:
        assert metrics["rollout_corr/weight_mean"] == pytest.approx(1.0)


def test_chained_rejections_drop_rows_rejected_by_any() -> None:
    graph = grpo(exact).edit(
        insert={
            "weigh": After("group_advantage", RolloutCorrection.preset("truncate")),
            "near": After("group_advantage", RolloutCorrection("k3", "reject", high=0.6)),
            "plausible": After("group_advantage", RolloutCorrection("maximum", "reject", high=2.9)),
        }
    )
    assert graph.check(prompts=8) == []
    found = torch.ones(MASK.shape)
    for name in ("weigh", "near", "plausible"):
        found = graph[name].operator(found, D, torch.zeros(MASK.shape), MASK)
    assert found.tolist() == [[0.0, 0.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("truncate", [[2.0, 0.5, 2.0], [1.0, 1.0, 0.0], [2.0, 0.0, 0.0]]),
        ("mask", [[0.0, 0.0, 0.0], [1.0, 1.0, 0.0], [3.0, 0.0, 0.0]]),
        ("icepop", [[2.0, 0.5, 4.0], [1.0, 1.0, 0.0], [3.0, 0.0, 0.0]]),
        ("geometric", [[0.0, 0.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]),
        ("k3", [[0.0, 0.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]),
        ("veto", [[1.0, 1.0, 1.0], [1.0, 1.0, 0.0], [1.0, 0.0, 0.0]]),
        ("token_truncate", [[2.0, 0.5, 3.0], [1.0, 1.0, 0.0], [3.0, 0.0, 0.0]]),
        ("token_mask", [[2.0, 0.5, 0.0], [1.0, 1.0, 0.0], [3.0, 0.0, 0.0]]),
        ("sequence_truncate", [[3.0, 3.0, 3.0], [1.0, 1.0, 0.0], [3.0, 0.0, 0.0]]),
        ("sequence_mask", [[0.0, 0.0, 0.0], [1.0, 1.0, 0.0], [3.0, 0.0, 0.0]]),
    ],
)
def test_each_preset_has_its_documented_weights(name: str, expected: list[list[float]]) -> None:
    found, _ = weights(RolloutCorrection.preset(name), D.double().float())
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-6, atol=1e-6)


def test_every_preset_is_tested_and_unknown_ones_get_a_suggestion() -> None:
    assert len(PRESETS) == 10
    with raises("correction.invalid-settings", given="ice_pop") as error:
        RolloutCorrection.preset("ice_pop")
    assert "did you mean 'icepop'" in error.value.message
