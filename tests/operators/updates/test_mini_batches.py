"""Mini-batches of whole groups, and the batches that losses over groups or batches get."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flowrl import Key, Metrics
from flowrl import columns as c
from flowrl.backends import SGD, TorchTrainer
from flowrl.core.operators.loss import Loss, Unit
from flowrl.operators import DPO, UpdateActor
from flowrl.operators.updates.mini_batches import mini_batch_rows
from tests.support.errors import raises
from tests.support.jobs import prompt_batch, rollout_batch, weights_of

KEY = Key.of(0)


def names(*groups: str) -> np.ndarray:
    return np.array(groups, dtype=object)


@given(groups=st.integers(1, 6), size=st.integers(1, 4), each=st.integers(1, 3), seed=st.integers(0, 2**32))
def test_groups_stay_in_one_mini_batch(groups: int, size: int, each: int, seed: int) -> None:
    uid = names(*(str(row % groups) for row in range(groups * size)))
    if groups % each:
        return
    batches = mini_batch_rows(len(uid), each * size, 2, Key.of(seed), uid)
    assert len(batches) == 2 * groups // each
    for index in batches:
        of_batch = [uid[row] for row in index]
        assert all(of_batch.count(group) == size for group in of_batch)
    for epoch in (batches[: groups // each], batches[groups // each :]):
        assert sorted(torch.cat(epoch).tolist()) == list(range(len(uid)))


def test_groups_are_shuffled() -> None:
    uid = names(*"aabbccddee")
    orders = {tuple(torch.cat(mini_batch_rows(10, 2, 1, Key.of(seed), uid)).tolist()) for seed in range(20)}
    assert len(orders) > 10


def test_a_mini_batch_that_cuts_a_group_is_refused_with_a_valid_size() -> None:
    with raises("update.invalid-mini-batch", given=2, rows=8) as error:
        mini_batch_rows(8, 2, 1, KEY, names(*"abababab"))
    assert "mini_batch=4, or None" in error.value.message
    assert len(mini_batch_rows(8, 4, 1, KEY, names(*"abababab"))) == 2


class Seen(Loss):
    """Keeps the rows that it is given: their first advantage is their number."""

    rows: ClassVar[list[list[int]]] = []

    def __call__(self, log_probs: c.LogProbs, advantages: c.Advantages, uid: c.Uid) -> Tensor:
        assert len(log_probs) == len(advantages) == len(uid)
        assert all(int(name) == int(row) // 2 for name, row in zip(uid, advantages[:, 0], strict=True))
        self.rows.append(advantages[:, 0].int().tolist())
        return -log_probs


class SeenGroups(Seen):
    unit: ClassVar[Unit] = "group"


class SeenBatches(Seen):
    unit: ClassVar[Unit] = "batch"


def trained(tiny: str, loss: Loss, **settings: Any) -> tuple[list[list[int]], dict[str, Tensor]]:
    rollout: Any = rollout_batch(
        prompt_batch([[1 + row, 2, 3] for row in range(8)]), [[4, 5, 6 + row] for row in range(8)]
    )
    actor = TorchTrainer(tiny, optimizer=SGD(lr=0.1), device="cpu", max_tokens=13).build(SimpleNamespace(seed=0))  # type: ignore[arg-type]
    advantages = torch.arange(8.0)[:, None].expand(rollout.response_mask.shape).clone()
    uid = names(*(str(row // 2) for row in range(8)))
    columns = {name: {"advantages": advantages, "uid": uid}.get(name) for name in loss.signature.ports}
    Seen.rows.clear()
    UpdateActor(loss, actor=actor, **settings)(rollout, key=KEY, metrics=Metrics(), **columns)
    return list(Seen.rows), weights_of(actor)


def test_a_row_loss_is_called_per_micro_batch(tiny: str) -> None:
    seen, _ = trained(tiny, Seen())
    assert seen == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize("loss", [SeenGroups(), SeenBatches()])
def test_a_group_or_batch_loss_is_called_once_per_mini_batch(tiny: str, loss: Loss) -> None:
    assert trained(tiny, loss)[0] == [list(range(8))]
    halves, _ = trained(tiny, loss, mini_batch=4)
    assert sorted(halves[0] + halves[1]) == list(range(8))
    if loss.unit == "group":
        assert all({row // 2 for row in half} == {row // 2 for row in half if row % 2} for half in halves)


@pytest.mark.parametrize("kind", [SeenGroups, SeenBatches])
def test_a_group_or_batch_loss_has_the_gradient_of_micro_batches(tiny: str, kind: type[Loss]) -> None:
    _, straight = trained(tiny, Seen(), aggregation="seq-mean-token-sum", entropy=0.1)
    _, at_once = trained(tiny, kind(), aggregation="seq-mean-token-sum", entropy=0.1)
    for name, weight in straight.items():
        assert (at_once[name] - weight).norm() <= 1e-6 * weight.norm(), name


def test_a_row_without_tokens_stays_with_its_group(tiny: str) -> None:
    """It is shorter than the other, and alone in a micro-batch that need not run."""
    rollout: Any = rollout_batch(prompt_batch([[1, 2, 3]] * 2), [[], [4, 5, 6, 7, 8, 9, 10]])
    actor = TorchTrainer(tiny, device="cpu", max_tokens=13).build(SimpleNamespace(seed=0))  # type: ignore[arg-type]
    advantages = torch.arange(2.0)[:, None].expand(rollout.response_mask.shape).clone()
    Seen.rows.clear()
    UpdateActor(SeenGroups(), actor=actor)(rollout, advantages=advantages, uid=names("0", "0"), key=KEY)
    assert Seen.rows == [[0, 1]]


def test_pairs_stay_in_one_mini_batch(tiny: str) -> None:
    with raises("update.invalid-mini-batch", given=1):
        trained(tiny, SeenGroups(), mini_batch=1)
    assert DPO.unit == "group"
