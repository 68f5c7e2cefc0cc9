"""Means of rows in an update, against transformers in float64 on the columns that it read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from flowrl import Key, Metrics
from flowrl.backends import SGD, TorchTrainer
from flowrl.core.operators.loss import Loss
from flowrl.operators import KLCov, PPOClip, UpdateActor
from flowrl.operators.losses.row_means import RowMeans
from tests.support.jobs import prompt_batch, rollout_batch

KEY = Key.of(0)
EMPTY = 3
ROLLOUT = rollout_batch(
    prompt_batch([[5 + i, 6 + i][: 1 + i % 2] for i in range(8)]),
    [[] if i == EMPTY else [7 + (3 * i + j) % 20 for j in range(1 + (5 * i) % 6)] for i in range(8)],
)
MASK = ROLLOUT.response_mask
NOISE = torch.Generator().manual_seed(0)
ADVANTAGES = torch.randn(MASK.shape, generator=NOISE)


def truth(folder: str) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of the responses under the saved weights: float64 ``[rows response]``."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    found = torch.zeros(2, *MASK.shape, dtype=torch.float64)
    for row, on in enumerate(MASK):
        ids, tokens = ROLLOUT.input_ids[row][ROLLOUT.attention_mask[row].bool()], int(on.sum())
        with torch.no_grad():
            logits = model(ids[None]).logits[0, len(ids) - tokens - 1 : -1]
        log_probs = logits.log_softmax(-1)
        found[0, row, on] = log_probs.gather(1, ROLLOUT.responses[row][on][:, None])[:, 0]
        found[1, row, on] = -(log_probs.exp() * log_probs).sum(-1)
    return found[0], found[1]


def update(folder: str, old: Tensor, loss: Loss, lr: float = 1e-9, **settings: Any) -> Metrics:
    """What an update reports."""
    actor: Any = TorchTrainer(folder, optimizer=SGD(lr=lr), device="cpu", max_tokens=12)
    operator, metrics = UpdateActor(loss, actor=actor.build(SimpleNamespace(seed=0)), **settings), Metrics()
    operator(ROLLOUT, old_log_probs=old, advantages=ADVANTAGES, key=KEY, metrics=metrics)
    return metrics


def means(x: Tensor) -> dict[str, float]:
    return {str(row): float(x[row][on].double().mean()) for row, on in enumerate(MASK) if on.any()}


@pytest.mark.parametrize("lr", [1e-9, 0.5])
def test_numbers_of_rows_are_those_of_the_first_pass(tiny: str, lr: float) -> None:
    """Two epochs in micro-batches: with a large step, the second pass has other entropies and clips more."""
    log_probs, entropies = truth(tiny)
    noise = 0.3 * torch.randn(MASK.shape, generator=torch.Generator().manual_seed(1))
    ratio, a = (-noise.double()).exp(), ADVANTAGES.double()
    clipped = torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.2)) > -a * ratio
    mini_batch = 2 if lr < 0.1 else None
    metrics = update(tiny, log_probs.float() + noise, PPOClip(), lr, ppo_epochs=2, mini_batch=mini_batch)
    found, (rows, of_tokens) = metrics.rows, metrics.columns["update_actor/entropies"]
    assert rows.tolist() == [row for row in range(len(MASK)) if row != EMPTY]
    torch.testing.assert_close(of_tokens, entropies[rows].float(), rtol=1e-5, atol=1e-6)
    assert found["update_actor/entropy"] == pytest.approx(means(entropies), rel=1e-5)
    assert found["update_actor/clipped"] == pytest.approx(means(clipped))
    assert max(found["update_actor/clipped"].values()) > 0
    assert str(EMPTY) not in found["update_actor/entropy"]


@pytest.mark.parametrize("loss", [PPOClip(), KLCov()])
def test_a_loss_over_mini_batches_and_one_that_does_not_clip(tiny: str, loss: Loss) -> None:
    log_probs, entropies = truth(tiny)
    found = update(tiny, log_probs.float(), loss, mini_batch=4).rows
    assert found["update_actor/entropy"] == pytest.approx(means(entropies), rel=1e-5)
    assert ("update_actor/clipped" in found) == isinstance(loss, PPOClip)


def test_the_mean_of_rows_by_tokens_is_the_metric(tiny: str) -> None:
    metrics = update(tiny, truth(tiny)[0].float(), PPOClip())
    tokens = MASK.sum(1).tolist()
    total = sum(tokens[int(row)] * value for row, value in metrics.rows["update_actor/entropy"].items())
    assert total / sum(tokens) == pytest.approx(metrics.compute()["actor/entropy"], rel=1e-6)


def test_rows_without_tokens_and_metrics_that_are_not_reported_are_left_out() -> None:
    means = RowMeans()
    on = torch.tensor([[False, True, True], [False, False, False]])
    means.add(torch.tensor([4, 1]), {"a": (torch.tensor([3.0, 0.0]), torch.tensor([2, 0]))}, on)
    means.add(torch.tensor([4]), {"a": (torch.tensor([9.0]), torch.tensor([2]))}, on[:1])
    assert means.of("a") == {4: 1.5} and means.of("b") == {}
