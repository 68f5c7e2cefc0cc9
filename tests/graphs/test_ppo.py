"""`ppo`: its parameters reach their operators, whose defaults it shares."""

from __future__ import annotations

from flowrl.graphs import ppo
from flowrl.operators import GAE, PPOClip
from tests.support.kernel import exact


def test_every_parameter_reaches_its_operator() -> None:
    graph = ppo(
        exact,
        n=3,
        temperature=0.7,
        max_new_tokens=5,
        kl_coef=0.5,
        gamma=0.9,
        lam=0.8,
        clip=0.3,
        ppo_epochs=2,
        mini_batch=6,
    )
    assert graph["repeat"].operator.n == 3
    generate = graph["generate"].operator
    assert (generate.temperature, generate.max_new_tokens) == (0.7, 5)
    assert graph["kl_shape"].operator.coef == 0.5
    assert graph["gae"].operator == GAE(gamma=0.9, lam=0.8)
    for update in (graph["update_actor"].operator, graph["update_critic"].operator):
        assert (update.ppo_epochs, update.mini_batch) == (2, 6)
    assert graph["update_actor"].operator.loss == PPOClip(0.3)


def test_ppo_uses_four_roles_and_returns_three_results() -> None:
    graph = ppo(exact)
    assert set(graph.roles()) == {"rollout", "actor", "ref", "critic"}
    assert set(graph.sinks) == {"sync", "update_critic", "mismatch"}
    assert graph.check(prompts=2) == []
