"""`grpo`: a group baseline instead of a critic, and an optional KL loss."""

from __future__ import annotations

from flowrl.graphs import grpo
from flowrl.operators import GroupAdvantage, KLLoss, PPOClip
from tests.support.kernel import exact


def test_every_parameter_reaches_its_operator() -> None:
    graph = grpo(exact, n=3, temperature=0.7, max_new_tokens=5, kl_coef=0.5, clip=0.3, ppo_epochs=2, mini_batch=6)
    assert graph["repeat"].operator.n == 3
    generate = graph["generate"].operator
    assert (generate.temperature, generate.max_new_tokens) == (0.7, 5)
    update = graph["update_actor"].operator
    assert (update.ppo_epochs, update.mini_batch) == (2, 6)
    assert (update.loss, update.kl) == (PPOClip(0.3), KLLoss("k3", 0.5))
    assert graph["group_advantage"].operator == GroupAdvantage()


def test_grpo_has_no_critic() -> None:
    graph = grpo(exact)
    assert set(graph.roles()) == {"rollout", "actor", "ref"}
    assert graph.check(prompts=1) == []


def test_without_kl_there_is_no_reference() -> None:
    graph = grpo(exact, kl_coef=0.0)
    assert graph["update_actor"].operator.kl is None
    assert set(graph.roles()) == {"rollout", "actor"}
    assert "ref_log_prob" not in graph.nodes
