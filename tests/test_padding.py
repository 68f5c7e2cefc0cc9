"""Padding, and `RolloutBatch.of` (`records.py`), against rows written by hand and against torch."""

from __future__ import annotations

import torch
from torch.nn.utils.rnn import pad_sequence

from flowrl.padding import assemble, pad_left, pad_right, positions
from flowrl.records import RolloutBatch
from tests.support.errors import raises


def test_rows_are_padded_as_torch_pads_them() -> None:
    rows = [[5, 6, 7], [8], [], [9, 4]]
    ids, mask = pad_right(rows, 1)
    expected = pad_sequence([torch.tensor(row, dtype=torch.int64) for row in rows], True, 1)
    assert torch.equal(ids, expected) and mask.sum(1).tolist() == [3, 1, 0, 2]
    ids, mask = pad_left(rows, 1)
    assert ids.tolist() == [[5, 6, 7], [1, 1, 8], [1, 1, 1], [1, 9, 4]]
    assert mask.tolist() == [[True] * 3, [False, False, True], [False] * 3, [False, True, True]]
    assert pad_right([], 0)[0].shape == (0, 0)


def test_prompts_and_responses_are_joined_with_positions_over_what_is_attended() -> None:
    prompts, responses = pad_left([[2, 3], [4]], 0), pad_right([[5], [6, 7]], 0)
    ids, mask, places = assemble(*prompts, *responses)
    assert ids.tolist() == [[2, 3, 5, 0], [0, 4, 6, 7]]
    assert mask.tolist() == [[True, True, True, False], [False, True, True, True]]
    assert places.tolist() == [[0, 1, 2, 2], [0, 0, 1, 2]]
    assert torch.equal(positions(mask), places)


def test_a_rollout_of_ragged_rows_has_the_columns_written_by_hand() -> None:
    """The second row has two tokens of an environment, which are read but not sampled."""
    rows = RolloutBatch.of(
        [[2, 3], [4]],
        [[5], [6, 7, 8]],
        log_probs=[[-0.5], [-1.0, 0.0, 0.0]],
        sampled=[[True], [True, False, False]],
        texts=["a", "b"],
        temperature=0.7,
        policy_version=3,
    )
    assert rows.prompts.tolist() == [[2, 3], [0, 4]] and rows.responses.tolist() == [[5, 0, 0], [6, 7, 8]]
    assert rows.input_ids.tolist() == [[2, 3, 5, 0, 0], [0, 4, 6, 7, 8]]
    assert rows.attention_mask.tolist() == [[True, True, True, False, False], [False, True, True, True, True]]
    assert rows.position_ids.tolist() == [[0, 1, 2, 2, 2], [0, 0, 1, 2, 3]]
    assert rows.response_mask.tolist() == [[True, False, False], [True, False, False]]
    assert rows.rollout_log_probs.tolist() == [[-0.5, 0.0, 0.0], [-1.0, 0.0, 0.0]]
    assert rows.token_version.tolist() == [[3, -1, -1], [3, -1, -1]] and rows.policy_version.tolist() == [3, 3]
    assert rows.temperature.tolist() == [torch.tensor(0.7)] * 2 and rows.response_text.tolist() == ["a", "b"]


def test_what_is_unknown_of_a_rollout_is_not_invented() -> None:
    rows = RolloutBatch.of([[1]], [[2, 3]])
    assert rows.rollout_log_probs.isnan().all() and rows.response_text.tolist() == [None]
    assert rows.policy_version.tolist() == [-1]


def test_rows_of_other_numbers_are_refused() -> None:
    with raises("rows.unequal", column="prompts", expected=2, found=1):
        RolloutBatch.of([[1]], [[2], [3]])
    with raises("rows.unequal", column="log_probs", row=1, expected=2, found=1):
        RolloutBatch.of([[1], [1]], [[2], [3, 4]], log_probs=[[0.0], [0.0]])
    with raises("tokenizer.empty-prompt", row=1):
        RolloutBatch.of([[1], []], [[2], [3]])
