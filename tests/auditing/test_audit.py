"""Tests of `audit.py`, `record.py` and `trial.py`: audits of methods with known results.

They compare zeros and identities with sums computed in this file.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from flowrl import After, AuditTask, audit
from flowrl.auditing.gradient_error import EXACT
from flowrl.graphs import dr_grpo, grpo, opo, ppo, reinforce_plus_plus, remax, rloo
from flowrl.operators import (
    GAE,
    Collect,
    DecoupledGAE,
    GroupAdvantage,
    Reinforce,
    ReturnToGo,
    RolloutCorrection,
    Spread,
)
from tests.auditing.listed import ONE, Listed, listed, unread, with_advantage
from tests.support.errors import raises

pytestmark = pytest.mark.runs

TWO = AuditTask(prompts=2)


def cause(found: object, name: str) -> float:
    """What is left of a bias without one thing."""
    return next(one.bias.value for one in found.causes if one.name == name)  # type: ignore[attr-defined]


def no_length(**settings: object) -> object:
    """GRPO whose rows weigh by the sum of their tokens."""
    return grpo(unread, kl_coef=0.0, **settings).edit(set={"update_actor.aggregation": "seq-mean-token-sum"})


# ---- unbiased


@pytest.mark.parametrize(
    ("graph", "task", "n"),
    [
        (rloo(unread), ONE, 3),
        (rloo(unread, kl_coef=0.0), AuditTask(prompts=1, tokens=2, steps=2, seed=5), 2),
        (with_advantage(ReturnToGo()), TWO, 1),
        (with_advantage(ReturnToGo()).edit(set={"update_actor.loss": Reinforce()}), AuditTask(prompts=1, seed=3), 2),
        (remax(unread), TWO, 1),
        (rloo(unread, temperature=0.5), ONE, 2),
    ],
    ids=["rloo", "rloo in another task", "reinforce", "reinforce without a ratio", "remax", "at a temperature"],
)
def test_reinforce_and_rloo_have_no_bias(graph: object, task: AuditTask, n: int) -> None:
    found = audit(graph, task, n=n)  # type: ignore[arg-type]
    assert found.exact
    assert found.whole.error.high < EXACT
    assert not found.biased
    assert not found.causes
    assert torch.allclose(found.expected, found.true, atol=1e-6)


@pytest.mark.parametrize("n", [2, 3])
def test_a_group_mean_that_includes_the_own_reward_scales_the_gradient_by_1_minus_1_over_n(n: int) -> None:
    plain = audit(no_length().edit(set={"group_advantage.normalize_std": False}), ONE, n=n)  # type: ignore[attr-defined]
    assert plain.whole.scale.value == pytest.approx(1 - 1 / n, abs=EXACT)
    assert plain.whole.bias.value < EXACT
    done_right = audit(dr_grpo(unread, max_new_tokens=64), ONE, n=n)
    assert done_right.whole.scale.value == pytest.approx((1 - 1 / n) / 64, abs=EXACT)
    assert done_right.whole.bias.value < EXACT


def test_the_expected_update_of_grpo_equals_a_sum_over_all_pairs_of_responses() -> None:
    """Two answers: tokens weigh by all tokens of the two, and rewards count by their standard deviation."""
    found, one = audit(grpo(unread, kl_coef=0.0), ONE, n=2, explain=False), listed(ONE)
    expected = np.zeros_like(one.policy)
    rows = list(zip(one.responses, one.rewards, one.probability, strict=True))
    for (first, paid, p), (second, other, q) in itertools.product(rows, repeat=2):
        deviation = abs(paid - other) / np.sqrt(2) + 1e-6
        advantage = (paid - other) / 2 / deviation
        expected += p * q * advantage * (one.pull(first) - one.pull(second)) / (len(first) + len(second))
    np.testing.assert_allclose(found.expected[0].numpy(), expected, atol=1e-6)
    np.testing.assert_allclose(found.true[0].numpy(), one.reward(), atol=1e-6)


# ---- biased, and along what


def test_grpo_division_by_the_standard_deviation_is_a_bias_with_cause_group_spread() -> None:
    found = audit(no_length(), ONE, n=2)  # type: ignore[arg-type]
    assert found.whole.bias.low > 0.01
    assert [(one.name, one.bias.high < EXACT) for one in found.causes] == [("group spread", True)]


def test_grpo_division_by_the_length_is_a_bias_with_cause_length() -> None:
    graph = grpo(unread, kl_coef=0.0).edit(
        set={"group_advantage.normalize_std": False, "update_actor.aggregation": "seq-mean-token-mean"}
    )
    found = audit(graph, ONE, n=2)
    assert found.whole.bias.low > 0.01
    assert cause(found, "length") < EXACT
    assert cause(found, "group spread") > 0.01


@pytest.mark.parametrize("seed", [0, 1])
def test_two_causes_are_also_tested_together_in_case_their_biases_cancel(seed: int) -> None:
    found = audit(grpo(unread, kl_coef=0.0), AuditTask(prompts=1, seed=seed), n=2)
    assert ("length" in [one.name for one in found.causes]) is (seed == 0)  # with seed 1 it hides the other bias
    assert cause(found, "group spread") > 0.01
    assert cause(found, "length and group spread") < EXACT


def test_token_mean_and_sequence_mean_have_equal_updates_only_for_equal_lengths() -> None:
    by_token = grpo(unread, kl_coef=0.0)
    by_row = by_token.edit(set={"update_actor.aggregation": "seq-mean-token-mean"})
    for task, equal in ((ONE, False), (AuditTask(prompts=1, ends=False, tokens=2, steps=2), True)):
        found = [audit(graph, task, n=2, explain=False).expected for graph in (by_token, by_row)]
        assert torch.allclose(*found, atol=1e-6) is equal


def test_the_opo_baseline_is_biased_unless_it_leaves_the_own_response_out() -> None:
    whole = opo(unread).edit(set={"update_actor.aggregation": "seq-mean-token-sum"})
    assert audit(whole, ONE, n=2).biased
    assert not audit(whole.edit(set={"opo_advantage.leave_one_out": True}), ONE, n=2).biased


def test_truncation_trades_bias_for_variance() -> None:
    task = AuditTask(prompts=1, mismatch=0.7)
    plain = rloo(unread, kl_coef=0.0)
    assert audit(plain, task, n=2, explain=False).biased  # the engine samples from another policy

    def corrected(high: float) -> object:
        correction = RolloutCorrection("sequence", "truncate", high=high)
        return audit(plain.edit(insert={"correction": After("rloo_advantage", correction)}), task, n=2)

    free, bound = corrected(1e6), corrected(1.0)
    assert not free.biased  # type: ignore[attr-defined]
    assert bound.biased  # type: ignore[attr-defined]
    assert cause(bound, "clip") < EXACT
    assert cause(bound, "engine mismatch") < EXACT
    assert bound.variance < free.variance  # type: ignore[attr-defined]


def test_the_bias_of_stale_samples_has_the_cause_off_policy_age() -> None:
    found = audit(rloo(unread, kl_coef=0.0), AuditTask(prompts=1, age=0.5), n=2)
    assert found.biased
    assert cause(found, "off-policy age") < EXACT
    in_a_step = AuditTask(prompts=1, tokens=2, steps=1, age=0.5)  # one token: the ratio is that of the whole answer
    wide = rloo(unread, kl_coef=0.0, clip=0.999)
    narrow = audit(rloo(unread, kl_coef=0.0, clip=0.05), in_a_step, n=2)
    assert cause(narrow, "clip") < EXACT < narrow.whole.bias.value
    assert not audit(wide.edit(set={"update_actor.loss.clip_high": 1e6}), in_a_step, n=2).biased


# ---- critics


def test_an_exact_critic_leaves_gae_unbiased_and_a_wrong_one_does_not() -> None:
    graph = ppo(unread, kl_coef=0.1).edit(drop=["whiten"], set={"update_actor.aggregation": "seq-mean-token-sum"})
    assert audit(graph, ONE, n=1).whole.error.high < EXACT
    assert audit(graph, ONE, n=1, critic="zero").biased
    assert audit(graph, ONE, n=1, critic={(0, ()): 0.3, (0, (1,)): -2.0}).biased
    whole = graph.edit(replace={"gae": GAE(lam=1.0)})
    for critic in ("zero", {(0, ()): 0.3, (0, (1,)): -2.0}):
        assert not audit(whole, ONE, n=1, critic=critic).biased
    decoupled = graph.edit(replace={"gae": DecoupledGAE(lam=1.0, critic_lam=0.5)})
    assert not audit(decoupled, ONE, n=1, critic="zero").biased


@pytest.mark.parametrize("critic", ["exakt", {(0, (7,)): 1.0}, {(3, ()): 1.0}])
def test_values_of_no_state_are_refused(critic: object) -> None:
    with raises("audit.bad-argument", parameter="critic"):
        audit(ppo(unread), ONE, n=2, critic=critic)  # type: ignore[arg-type]


# ---- variance, and what is printed


def test_the_relative_variance_equals_that_of_enumerated_samples() -> None:
    found, one = audit(with_advantage(ReturnToGo(), kl_coef=0.0), ONE, n=1), listed(ONE)
    assert found.variance == pytest.approx(1.0, abs=1e-5)  # it is plain REINFORCE
    assert audit(with_advantage(ReturnToGo(), kl_coef=0.0), ONE, n=2).variance == pytest.approx(1.0, abs=1e-5)
    assert audit(with_advantage(ReturnToGo(), kl_coef=0.0), TWO, n=1).variance == pytest.approx(1.0, abs=1e-5)
    by_hand = _variance_of_rloo(one) / _variance_of_reinforce(one)
    assert audit(rloo(unread, kl_coef=0.0), ONE, n=2).variance == pytest.approx(by_hand, abs=1e-5)
    halved = no_length().edit(set={"group_advantage.normalize_std": False})  # type: ignore[attr-defined]
    assert audit(halved, ONE, n=2).variance == pytest.approx(by_hand, abs=1e-5)  # the scale is no variance


def _variance_of_reinforce(one: Listed) -> float:
    """From two answers."""
    rows = zip(one.responses, one.rewards, one.probability, strict=True)
    second = sum(p * np.square(paid * one.pull(response)).sum() for response, paid, p in rows)
    return float((second - np.square(one.reward()).sum()) / 2)


def _variance_of_rloo(one: Listed) -> float:
    """From two answers, which are each other's baseline."""
    rows = list(zip(one.responses, one.rewards, one.probability, strict=True))
    second = 0.0
    for (first, paid, p), (other, got, q) in itertools.product(rows, repeat=2):
        sample = (paid - got) * (one.pull(first) - one.pull(other)) / 2
        second += p * q * float(np.square(sample).sum())
    return second - float(np.square(one.reward()).sum())


def test_intervals_of_sampled_runs_contain_the_exact_numbers() -> None:
    graph = grpo(unread, kl_coef=0.0)
    exact, sampled = audit(graph, ONE, n=2, explain=False), audit(graph, ONE, n=2, limit=1, samples=150, explain=False)
    assert exact.exact
    assert not sampled.exact
    for name in ("scale", "cosine", "bias", "error", "size"):
        wide, value = getattr(sampled.whole, name), getattr(exact.whole, name).value
        assert wide.low <= value <= wide.high
        assert wide.low < wide.value < wide.high
    assert not audit(rloo(unread), ONE, n=2, limit=1, samples=150).biased
    assert "150 sampled runs, intervals of 95 %" in str(sampled)


def test_dynamic_sampling_is_audited_in_rounds_and_a_note_states_the_reduced_groups() -> None:
    graph = no_length().edit(insert={"collect": After("reward", Collect(Spread(least=0.05), groups=8))})  # type: ignore[attr-defined]
    found = audit(graph, ONE, n=2, samples=40, explain=False)
    assert not found.exact
    assert "collect collects 1 groups and not 8, in as many rounds as it takes." in found.notes


def test_the_text_of_an_audit_states_objective_bias_and_causes() -> None:
    text = str(audit(grpo(unread), ONE, n=2))
    for phrase in (
        "grpo · expected reward - 0.001 · KL(actor || ref)",
        "all 16 runs, 2 rows each: biased by",
        "times that of plain REINFORCE from as many rows",
        "remaining bias of the loss, of",
        "repeat.n is 2 and not 8.",
    ):
        assert phrase in text
    assert "all 16 runs, 2 rows each: unbiased" in str(audit(rloo(unread), ONE, n=2))
    assert max(map(len, text.splitlines())) <= 120


def test_whitening_is_audited_over_the_rows_of_a_batch() -> None:
    assert audit(reinforce_plus_plus(unread), ONE, n=2).biased


@pytest.mark.parametrize("given", [{"n": 0}, {"limit": 0}, {"samples": 1}, {"n": True}])
def test_non_integer_counts_are_refused(given: dict[str, int]) -> None:
    with raises("audit.bad-argument", parameter=next(iter(given)), found=next(iter(given.values()))):
        audit(rloo(unread), ONE, **given)  # type: ignore[arg-type]


def test_group_advantages_of_one_row_are_an_error() -> None:
    with raises("audit.node-failed") as caught:
        audit(with_advantage(GroupAdvantage()), ONE, n=1)
    assert "single row" in caught.value.message
