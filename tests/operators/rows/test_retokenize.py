"""Tests of `retokenize.py` on its own; `tests/operators/updates/test_frozen.py` has its training."""

from __future__ import annotations

import torch

from flowrl.data.proto.column_math import objects
from flowrl.operators import Retokenize
from tests.support.errors import raises


def test_episodes_of_several_turns_are_refused(tiny: str) -> None:
    prompts = objects([[{"role": "user", "content": "1 + 1"}]] * 3)
    mask = torch.tensor([[True, True, False], [False, False, False], [True, False, True]])
    with raises("rows.several-turns", node="retokenize", row=2):
        Retokenize(tiny, max_new_tokens=3)(prompts, objects(["2"] * 3), mask, torch.zeros(3).long())
    once = Retokenize(tiny, max_new_tokens=3)(prompts[:2], objects(["2"] * 2), mask[:2], torch.zeros(2).long())
    assert once.response_mask.any(-1).all()
