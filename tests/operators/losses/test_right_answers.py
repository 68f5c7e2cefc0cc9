"""The NLL loss on correct responses added to the policy gradient: its formula in float64, and a worked example."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flowrl.data.metrics import Metrics
from flowrl.operators import PPOClip, PPOClipNLL
from flowrl.operators.losses.objective import TokenObjective
from tests.nightly import examples
from tests.operators.advantages.ragged import numbers
from tests.support.rows.loss_rows import Rows, masks, run


@examples(60)
@given(mask=masks(), seed=st.integers(0, 2**31), data=st.data())
def test_the_loss_is_ppo_plus_the_mean_nll_of_correct_responses(mask: Tensor, seed: int, data: st.DataObject) -> None:
    """VAPO's two sums, each over its own count, of value and gradient."""
    right = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(mask), max_size=len(mask))))
    old, moved, advantages = (numbers(mask, seed + i) for i in range(3))
    new, scores = old + 0.3 * moved, torch.zeros(mask.shape)
    scores[:, 0] = torch.where(right & mask[:, 0], 1.0, -0.5).masked_fill(~mask[:, 0], torch.nan)
    batch = SimpleNamespace(old_log_probs=old, advantages=advantages, token_level_scores=scores)
    objective = TokenObjective(PPOClipNLL(PPOClip(0.2, 0.28), 0.4))
    value, gradient, metrics = run(objective, Rows(new, torch.zeros(mask.shape), batch), objective.weights(mask))

    exact = new.double().requires_grad_()
    live = right & mask[:, 0]  # a row without its first token has no score
    rows = [(exact[i][m], old[i][m].double(), advantages[i][m].double()) for i, m in enumerate(mask)]
    zero = exact[mask].sum() * 0.0
    ratios = [(torch.exp(n - o), a) for n, o, a in rows]
    policy = sum((-torch.minimum(r * a, r.clamp(0.8, 1.28) * a).sum() for r, a in ratios), zero) / max(
        1, int(mask.sum())
    )
    correct = [row[0] for row, good in zip(rows, live, strict=True) if good]
    nll = -sum((x.sum() for x in correct), zero) / max(1, sum(map(len, correct)))
    (policy + 0.4 * nll).backward()
    assert value == pytest.approx((policy + 0.4 * nll).item(), rel=1e-4, abs=1e-5)
    assert exact.grad is not None
    torch.testing.assert_close(gradient, exact.grad.float(), rtol=1e-3, atol=1e-5)
    if correct:
        assert metrics.compute()["actor/nll_loss"] == pytest.approx(nll.item(), rel=1e-5, abs=1e-6)


def test_without_correct_responses_the_loss_is_ppo() -> None:
    mask = torch.ones(2, 3, dtype=torch.bool)
    columns = [numbers(mask, seed) for seed in range(3)]
    scores = torch.tensor([[0.0, 0.0, 0.5], [0.0, 0.0, 0.0]])
    plain = PPOClip()(*columns, mask, Metrics())
    assert torch.equal(PPOClipNLL(above=0.5)(*columns, mask, scores, Metrics()), plain)
    assert not torch.equal(PPOClipNLL(above=0.4)(*columns, mask, scores, Metrics()), plain)


def test_the_ratio_can_use_rollout_log_probs() -> None:
    ports = PPOClipNLL(PPOClip(ratio_to="rollout")).signature.ports
    assert list(ports) == ["old_log_probs", "advantages", "response_mask", "token_level_scores"]
    assert ports != PPOClipNLL().signature.ports and PPOClipNLL().signature.ports.keys() == ports.keys()
