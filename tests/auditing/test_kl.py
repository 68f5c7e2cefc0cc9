"""The gradients of KL terms on-policy (Tang & Munos 2025, arXiv:2506.09477), against independent sums."""

from __future__ import annotations

import numpy as np
import pytest

from flowrl import After, AuditTask, Graph, audit
from flowrl.auditing.gradient_error import EXACT
from flowrl.auditing.record import Audit
from flowrl.graphs import grpo, rloo
from flowrl.operators import KLLoss, KLShape
from flowrl.operators.advantages.per_token import Estimator
from tests.auditing.listed import ONE, Array, Listed, listed, unread

COEF = 0.3
STEP = AuditTask(prompts=1, tokens=2, steps=1)


def in_loss(estimator: Estimator, aggregation: str = "seq-mean-token-sum", ratio: bool = False) -> Graph:
    """Dr. GRPO's advantage with a KL term in the loss."""
    changed = {"group_advantage.normalize_std": False, "update_actor.aggregation": aggregation}
    return grpo(unread).edit(set={**changed, "update_actor.kl": KLLoss(estimator, COEF, ratio)})


def audited(graph: Graph, task: AuditTask = ONE) -> Audit:
    return audit(graph, task, n=2, explain=False)


def of_kl(found: Audit) -> Array:
    """The expected gradient of the KL term alone: of all, less that of the loss, whose scale is known (1 - 1/2)."""
    one = listed(found.task)
    return found.expected[0].numpy() - 0.5 * one.reward()


def pair(task: AuditTask) -> tuple[Listed, Listed]:
    """The policy and the reference."""
    ref = Listed(task, task.near("scorer ref").logits[0], lambda response: 0.0)
    return listed(task), ref


def by_token(task: AuditTask, estimate: dict[str, float]) -> Array:
    """``-E[sum_t f(d_t) grad log pi(a_t)]`` with ``f(d) = d`` and ``f(d) = 1 - exp(-d)`` weighed by `estimate`."""
    policy, ref = pair(task)
    total = np.zeros_like(policy.policy)
    for response, p in zip(policy.responses, policy.probability, strict=True):
        log_ratio = np.subtract(policy.log_probs(response), ref.log_probs(response))
        for d, pull in zip(log_ratio, policy.pulls(response), strict=True):
            total -= p * (estimate["reverse"] * d + estimate["forward"] * (1 - np.exp(-d))) * pull
    return COEF * total


def test_k1_in_the_loss_has_an_expected_gradient_of_zero() -> None:
    found = audited(in_loss("k1"))
    assert found.parts["kl"].follows_nothing
    np.testing.assert_allclose(of_kl(found), 0.0, atol=1e-6)
    assert "KL in the loss follows nothing" in str(found)
    assert found.biased  # since KL is stated, and not followed


@pytest.mark.parametrize(
    ("estimator", "name", "weights"),
    [
        ("k2", "KL(actor || ref) token by token", {"reverse": 1.0, "forward": 0.0}),
        ("k3", "KL(ref || actor) token by token", {"reverse": 0.0, "forward": 1.0}),
    ],
)
@pytest.mark.parametrize("task", [ONE, STEP], ids=["several tokens", "one token"])
def test_k2_and_k3_have_the_gradients_of_token_level_divergences(
    estimator: Estimator, name: str, weights: dict[str, float], task: AuditTask
) -> None:
    found = audited(in_loss(estimator), task)
    np.testing.assert_allclose(of_kl(found), by_token(task, weights), atol=1e-6)
    assert found.kl_follows[name].value == pytest.approx(1.0, abs=EXACT)
    assert f"KL in the loss follows {name}" in str(found).replace("\n  ", " ") or task is STEP
    whole = found.kl_follows["KL(actor || ref)"].value  # of whole responses, which is more than token by token
    assert (whole > 1 - EXACT) is (estimator == "k2" and task is STEP)


@pytest.mark.parametrize(("estimator", "ratio"), [("k1+", False), ("k3+", False), ("k1", True), ("k3", True)])
def test_k2_and_kl_with_the_ratio_have_the_gradient_of_token_level_reverse_kl(
    estimator: Estimator, ratio: bool
) -> None:
    """Token by token; k2 follows it, too."""
    found = audited(in_loss(estimator, ratio=ratio))
    np.testing.assert_allclose(of_kl(found), by_token(ONE, {"reverse": 1.0, "forward": 0.0}), atol=1e-6)
    assert found.kl_follows["KL(actor || ref) token by token"].value == pytest.approx(1.0, abs=EXACT)


def test_kl_with_the_ratio_also_corrects_for_rows_of_the_old_policy() -> None:
    task = AuditTask(prompts=1, steps=1, tokens=2, age=0.5)
    cosines = [
        audited(in_loss("k3", ratio=ratio), task).kl_follows["KL(actor || ref)"].value for ratio in (True, False)
    ]
    assert cosines[0] == pytest.approx(1.0, abs=EXACT)
    assert cosines[1] < 0.999


def test_k1_in_the_loss_divided_by_the_length_is_a_length_bonus() -> None:
    """``-E[1/n grad log pi(y)]``: all that makes 1/n smaller."""
    found, one = audited(in_loss("k1", "seq-mean-token-mean")), listed(ONE)
    loss = audited(in_loss("k1", "seq-mean-token-mean").edit(set={"update_actor.kl": None}))
    bonus = (found.expected - loss.expected)[0].numpy()
    np.testing.assert_allclose(bonus, -COEF * one.of(lambda response: 1 / len(response)), atol=1e-6)
    assert float((bonus * one.of(len)).sum()) > 0


@pytest.mark.parametrize(("estimator", "biased"), [("k1", False), ("k2", True), ("k3", True)])
def test_only_k1_in_the_reward_is_unbiased(estimator: Estimator, biased: bool) -> None:
    graph = rloo(unread, kl_coef=COEF).edit(set={"kl_shape.estimator": estimator})
    assert audited(graph, AuditTask(prompts=1, tokens=2, steps=2)).biased is biased


def test_k3_in_the_reward_has_the_gradient_of_the_difference_of_both_divergences() -> None:
    policy, ref = pair(STEP)
    found = audited(rloo(unread, kl_coef=COEF).edit(set={"kl_shape.estimator": "k3"}), STEP)
    expected = policy.reward()
    for response, p in zip(policy.responses, policy.probability, strict=True):
        d = policy.log_probs(response)[0] - ref.log_probs(response)[0]
        expected -= COEF * p * (np.exp(-d) - 1 + d) * policy.pull(response)
    np.testing.assert_allclose(found.expected[0].numpy(), expected, atol=1e-6)


def test_kl_in_the_reward_is_part_of_the_objective() -> None:
    policy, ref = pair(ONE)
    found = audited(rloo(unread, kl_coef=COEF))
    assert found.objective == "expected reward - 0.3 · KL(actor || ref)"
    log_ratio = dict(
        zip(policy.responses, (sum(policy.log_probs(y)) - sum(ref.log_probs(y)) for y in policy.responses), strict=True)
    )
    true = policy.reward() - COEF * policy.of(log_ratio.__getitem__)  # the other term, E[grad log pi], is 0
    np.testing.assert_allclose(found.true[0].numpy(), true, atol=1e-6)


def test_kl_in_reward_and_loss_is_two_terms_of_the_objective() -> None:
    graph = grpo(unread).edit(
        insert={"kl_shape": After("reward", KLShape(COEF))},
        wire={"group_advantage.token_level_rewards": "kl_shape.token_level_rewards"},
    )
    assert audited(graph).objective == "expected reward - 0.3 · KL(actor || ref) - 0.001 · KL(actor || ref)"


def test_the_entropy_bonus_is_a_separate_part_of_the_audit() -> None:
    found = audited(in_loss("k2").edit(set={"update_actor.kl": None, "update_actor.entropy": 0.2}))
    assert found.objective == "expected reward + 0.2 · entropy"
    assert set(found.parts) == {"loss", "entropy"}
    step = audited(in_loss("k2").edit(set={"update_actor.kl": None, "update_actor.entropy": 0.2}), STEP)
    assert step.parts["entropy"].error.high < EXACT  # in one step there is no state to come
    assert found.parts["entropy"].biased
