"""`MismatchResponses` and `KTOBaseline`, by hand, and as TRL pairs a batch."""

from __future__ import annotations

import pytest
import torch

from flowrl.data.metrics import Metrics
from flowrl.operators import KTOBaseline, MismatchResponses
from flowrl.records import RolloutBatch
from tests.support.errors import raises
from tests.support.jobs import prompt_batch, rollout_batch


def batch() -> RolloutBatch:
    return rollout_batch(prompt_batch([[1], [2, 3], [4, 5, 6]]), [[7, 8, 9], [10], [11, 12]])


def test_each_prompt_gets_the_response_of_the_row_before() -> None:
    """TRL: ``[completion_ids[-1]] + completion_ids[:-1]``; positions count the tokens of the new sequence."""
    rows = batch()
    mixed = MismatchResponses()(rows)
    sequences = [ids[mask].tolist() for ids, mask in zip(mixed.input_ids, mixed.attention_mask, strict=True)]
    assert sequences == [[1, 11, 12], [2, 3, 7, 8, 9], [4, 5, 6, 10]]
    places = [p[mask].tolist() for p, mask in zip(mixed.position_ids, mixed.attention_mask, strict=True)]
    assert places == [list(range(len(ids))) for ids in sequences]
    assert mixed.response_mask.sum(1).tolist() == [2, 3, 1]
    assert torch.equal(mixed.temperature, rows.temperature)


def test_a_single_row_is_refused() -> None:
    with raises("rows.one-row", node="mismatch_responses", expected=2):
        MismatchResponses()(rollout_batch(prompt_batch([[1]]), [[7]]))


@pytest.mark.parametrize(("shift", "expected"), [(1.0, 2.0), (-1.0, 0.0)])
def test_the_baseline_is_the_mean_ratio_of_rows_and_not_negative(shift: float, expected: float) -> None:
    """Rows of 3, 1 and 2 tokens whose log-probs are `shift` above the reference: ``max(0, shift * 6 / 3)``."""
    mask, metrics = batch().response_mask, Metrics()
    old = torch.where(mask, shift - 0.5, torch.nan)
    found = KTOBaseline()(old, torch.where(mask, -0.5, torch.nan), mask, metrics=metrics)
    assert found.tolist() == [expected] * 3 and metrics.compute()["kto/baseline"] == expected
