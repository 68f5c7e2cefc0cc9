"""Tests of `policy_losses.py` and `preferences.py`: which losses are proportional to the advantages, by numbers.

A correction multiplies the advantages by weights. This weights the loss if the loss of each token (or row) is
proportional to its own advantages and depends on no others; FR019 reads what each loss declares.
"""

from __future__ import annotations

import inspect

import pytest
import torch

import flowrl.operators
from flowrl import After, AuditTask, audit
from flowrl.core.operators.effects import Effect
from flowrl.core.operators.loss import Loss
from flowrl.data.keys import Key
from flowrl.data.metrics import Metrics
from flowrl.graphs import gmpo, grpo, rloo, vapo
from flowrl.operators import DRO, ClipCov, KLCov, PPOClip, RolloutCorrection
from tests.rules.findings import fixed, found, the_message

LOSSES = [
    loss
    for _, loss in inspect.getmembers(flowrl.operators, inspect.isclass)
    if issubclass(loss, Loss) and loss is not Loss and "advantages" in inspect.signature(loss.__call__).parameters
]
ROWS, TOKENS = 6, 40


def proportional(loss: type[Loss], per_token: bool, seed: int) -> bool:
    """Whether weights on the advantages are the same weights on the loss and on its gradient, in random rows."""
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> torch.Tensor:
        return scale * torch.randn(ROWS, TOKENS, generator=generator)

    log_probs = normal(2.0) - 3.0
    columns = {
        "old_log_probs": log_probs + normal(0.3),
        "ref_log_prob": log_probs + normal(0.3),
        "response_mask": torch.ones(ROWS, TOKENS, dtype=torch.bool),
        "token_level_scores": torch.rand(ROWS, TOKENS, generator=generator),
    }
    advantages = normal(1.0) if per_token else normal(1.0)[:, :1].expand(ROWS, TOKENS)
    weights = torch.rand(ROWS, TOKENS if per_token else 1, generator=generator) * 2.0
    weights[::2, ::3] = 0.0

    def of(advantages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = log_probs.clone().requires_grad_()
        each = loss().of({"log_probs": x, "advantages": advantages, **columns}, Metrics(), Key.of(seed))
        each = each if each.ndim == 2 else each[:, None].expand(ROWS, TOKENS) / TOKENS
        return each.detach(), torch.autograd.grad(each.sum(), x)[0]

    return all(
        torch.allclose(weighted, weights * plain, rtol=1e-4, atol=1e-5)
        for weighted, plain in zip(of(weights * advantages), of(advantages), strict=True)
    )


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_every_loss_declares_which_weights_on_its_advantages_are_weights_on_its_loss(loss: type[Loss]) -> None:
    by_row, by_token = (all(proportional(loss, each, seed) for seed in range(3)) for each in (False, True))
    assert (Effect.NONLINEAR in loss().effects) is not by_row
    assert (Effect.ADVANTAGE_PER_ROW in loss().effects) is (by_row and not by_token)


def test_the_losses_of_flowrl_are_of_all_three_kinds() -> None:
    declared = [loss().effects & {Effect.NONLINEAR, Effect.ADVANTAGE_PER_ROW} for loss in LOSSES]
    assert len(LOSSES) == 11
    assert [declared.count(one) for one in (set(), {Effect.ADVANTAGE_PER_ROW}, {Effect.NONLINEAR})] == [6, 1, 4]


def exact(data_source: str, solution_str: str, ground_truth: str, extra_info: object = None) -> float:
    return float(solution_str == ground_truth)


@pytest.mark.parametrize("loss", [KLCov(), ClipCov(), DRO()], ids=lambda loss: type(loss).__name__)
@pytest.mark.parametrize("correction", ["truncate", "mask", "veto"])
def test_a_correction_of_a_loss_that_is_not_linear_is_refused(loss: Loss, correction: str) -> None:
    graph = grpo(exact).edit(
        set={"update_actor.loss": loss, "update_actor.kl": None, "update_actor.aggregation": "seq-mean-token-mean"},
        insert={"correction": After("group_advantage", RolloutCorrection.preset(correction))},
    )
    assert found(graph) == [("FR019", "update_actor")]
    assert f"{type(loss).__name__} is not linear in the advantages" in the_message(graph, "FR019")
    assert found(fixed(graph)) == []
    assert found(graph.edit(set={"update_actor.loss": PPOClip()})) == []


def test_a_lag_with_such_a_loss_is_not_answered_by_a_correction() -> None:
    graph = vapo(exact).edit(lag=1)
    assert found(graph) == [("FR006", "generate")]
    assert found(fixed(graph)) == []
    assert found(gmpo(exact).edit(insert={"correction": After("group_advantage", RolloutCorrection("sequence"))})) == []


@pytest.mark.parametrize(("steps", "bias"), [(1, 0.0), (2, 0.202)])
def test_an_unclipped_ratio_to_the_engine_is_unbiased_for_one_token_only(steps: int, bias: float) -> None:
    """The weight of a token does not correct for the tokens before it; a weight per sequence does."""
    loss = PPOClip(clip_low=1 - 1e-9, clip_high=1e6, ratio_to="rollout")
    by_token = rloo(exact, kl_coef=0.0).edit(
        set={"update_actor.loss": loss}, wire={"update_actor.old_log_probs": "generate.rollout_log_probs"}
    )
    correction = After("rloo_advantage", RolloutCorrection("sequence", "truncate", high=1e6))
    by_sequence = rloo(exact, kl_coef=0.0).edit(insert={"correction": correction})
    task = AuditTask(steps=steps, mismatch=0.5)
    assert audit(by_token, task, n=2, explain=False).whole.bias.value == pytest.approx(bias, abs=5e-4)
    assert audit(by_sequence, task, n=2, explain=False).whole.bias.value < 1e-5
