"""`explain` of operators: the formula, evaluated, is the number that the operator wrote.

Algorithms of the shelf are tested on recorded runs, see `tests/look/steps/test_derivation.py`; these are the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from flowrl import Operator
from flowrl.core.operators.session import Cell
from flowrl.operators import (
    GAE,
    GDPOAdvantage,
    NormalizeReward,
    OptimalTokenBaseline,
    RolloutCorrection,
    TurnGAE,
    TurnGroupAdvantage,
    WeighRewards,
)
from flowrl.operators.explains import Explains, exact

ROWS, WIDTH = 6, 7
DRAWS = torch.Generator().manual_seed(3)
MASK = torch.arange(WIDTH)[None, :] < torch.tensor([7, 3, 5, 1, 0, 4])[:, None]
MASK[0, 2] = False  # the text of an environment


def drawn(of_tokens: bool = True) -> torch.Tensor:
    """Numbers on the mask: on all tokens, or on the last one."""
    numbers = torch.randn(ROWS, WIDTH, generator=DRAWS)
    last = MASK & (MASK.cumsum(-1) == MASK.sum(-1, keepdim=True))
    return torch.where(MASK if of_tokens else last, numbers, 0.0)


COLUMNS: dict[str, Any] = {
    "response_mask": MASK,
    "uid": np.array(["a", "a", "a", "b", "b", "b"], dtype=object),
    "turn_ids": torch.tensor([0, 0, 0, 1, 1, 2, 2]).expand(ROWS, WIDTH),
    "values": drawn(),
    "advantages": drawn(),
    "old_log_probs": -drawn().abs(),
    "rollout_log_probs": -drawn().abs(),
    "logit_norms": drawn().abs(),
    "token_level_scores": drawn(of_tokens=False),
    "token_level_rewards": drawn(of_tokens=False),
    "right": drawn(of_tokens=False),
    "form": drawn(of_tokens=False),
}
WEIGHTS = {"right": 1.0, "form": -0.3}


@pytest.mark.parametrize(
    "operator",
    [
        NormalizeReward(),
        NormalizeReward(over="batch", shift_mean=False),
        WeighRewards(WEIGHTS),
        WeighRewards(WEIGHTS, gates={"form": "right"}, passed=0.0),
        GDPOAdvantage(WEIGHTS),
        GDPOAdvantage(WEIGHTS, normalize_std=False),
        OptimalTokenBaseline(),
        GAE(gamma=0.9, lam=0.8),
        TurnGAE(gamma=0.9, lam=0.8),
        TurnGroupAdvantage(),
        TurnGroupAdvantage(gamma=0.5, normalize_std=False),
        RolloutCorrection(),
        RolloutCorrection("sequence", "mask", high=3.0, normalize=True),
        RolloutCorrection("k3", "reject", high=0.5),
    ],
    ids=str,
)
def test_the_formula_gives_the_number(operator: Operator) -> None:
    assert isinstance(operator, Explains)
    names = [place.name for place in operator.signature.fields]
    inputs = {name: COLUMNS[name] for name in names}
    if isinstance(operator, NormalizeReward):
        operator.__dict__["moments"] = Cell([4.0, 0.5, 2.0])
    notes = [operator.explain(row, inputs, outputs_of(operator, inputs)) for row in range(ROWS)]
    assert notes[4] == ""  # no token
    for row, note in enumerate(notes):
        written = {exact(value) for column in outputs_of(operator, inputs).values() for value in column[row]}
        written |= {exact(column[row].sum()) for column in outputs_of(operator, inputs).values()}
        for line in note.splitlines():
            *_, formula, number = line.partition(";")[0].split(" = ")
            assert eval(formula) == pytest.approx(float(number), rel=1e-4, abs=1e-5), line
            assert number in written
    assert sum(map(bool, notes)) == 5


def outputs_of(operator: Operator, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """What the operator writes, from the state that it is explained with."""
    if isinstance(operator, NormalizeReward):
        before = list(operator.moments.value)
    found = operator(**inputs)
    if isinstance(operator, NormalizeReward):
        operator.moments.value = before
    names = list(operator.signature.outputs)
    return dict(zip(names, found if isinstance(found, tuple) else [found], strict=True))
