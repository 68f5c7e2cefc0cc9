"""Padding against rows written by hand, and against torch."""

from __future__ import annotations

import torch
from torch.nn.utils.rnn import pad_sequence

from flowrl.padding import assemble, pad_left, pad_right, positions


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
