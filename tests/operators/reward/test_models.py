"""`PreferenceAccuracy` by hand; scores of real models are in `tests/backends/torch/score/test_reward_model.py`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flowrl.data.metrics import Metrics
from flowrl.operators import PreferenceAccuracy
from tests.support.jobs import column, prompt_batch, rollout_batch


def test_accuracy_and_margin_of_pairs() -> None:
    """Leads of 2, -1 and 0.5; a tie of the given scores is no pair."""
    rows = rollout_batch(prompt_batch([[1]] * 8), [[2]] * 8)
    given = torch.tensor([[1.0], [0.0], [0.0], [1.0], [1.0], [0.0], [1.0], [1.0]])
    scores = torch.tensor([3.0, 1.0, 0.0, -1.0, 0.25, -0.25, 9.0, 0.0])
    model: Any = SimpleNamespace(rewards=lambda batch: scores)
    metrics = Metrics()
    accuracy = PreferenceAccuracy(reward_model=model)
    found = accuracy(rows, given, column([f"p{row // 2}" for row in range(8)]), metrics=metrics)
    assert metrics.compute() == pytest.approx({"reward_model/accuracy": 2 / 3, "reward_model/margin": 0.5})
    assert found.mean == pytest.approx(2 / 3)
