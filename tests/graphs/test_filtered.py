"""RAFT, PF-PPO and VAPO: their changes to PPO, and the rows that a step trains on."""

from __future__ import annotations

import pytest
import torch

from flowrl import graphs
from flowrl.core.operators.when import When
from flowrl.operators import NLL, DecoupledGAE, Filter, PPOClip, PPOClipNLL, Ranked
from tests.support.errors import raises
from tests.support.jobs import PROMPTS, job_of, weights_of
from tests.support.kernel import exact
from tests.support.rewards import digits
from tests.support.runs import walk


def test_a_filter_that_drops_nothing_is_refused() -> None:
    with raises("algorithm.too-few-responses", algorithm="raft", n=4, expected=5):
        graphs.raft(exact, best=4, n=4)
    with raises("algorithm.too-few-responses", algorithm="pf_ppo", n=2, expected=3):
        graphs.pf_ppo(exact, n=2)


def test_raft_trains_by_nll_on_the_best_responses() -> None:
    graph = graphs.raft(exact, best=2, n=4, temperature=0.7)
    assert graph["filter"].operator.predicate == Ranked(2) and graph["update_actor"].operator.loss == NLL()
    assert "group_advantage" not in graph.nodes and set(graph.roles()) == {"rollout", "actor"}
    assert graph["generate"].operator.temperature == 0.7


def test_pf_ppo_is_ppo_on_the_best_and_worst_responses_of_each_group() -> None:
    graph = graphs.pf_ppo(exact, n=6, best=2, worst=1, lam=0.9)
    assert graph["filter"].operator.predicate == Ranked(2, 1)
    added = [line for line in str(graphs.ppo(exact, n=6, lam=0.9).diff(graph)).splitlines()[1:] if line[0] != "~"]
    assert added == ["+ filter: Filter(predicate=Ranked(best=2, worst=1))  <- reward, generate, repeat"]


@pytest.mark.parametrize(("name", "kept"), [("raft", 1), ("pf_ppo", 2)])
def test_a_step_keeps_this_many_rows_per_prompt(name: str, kept: int, tiny: str) -> None:
    job = job_of(name, tiny, digits, n=4)
    steps = walk(job.graph, **job.build(0))
    steps.sync()
    result = steps.step(PROMPTS, 0, return_nodes=["reward", "filter"])
    all_scores = result.columns["reward"]["token_level_scores"].sum(1).view(3, 4)
    passed = result.columns["filter"]["response_mask"]
    assert len(passed) == 3 * kept
    if name == "pf_ppo":
        ends = torch.stack([all_scores.amax(1), all_scores.amin(1)], 1).sort(1).values
        found = result.columns["filter"]["token_level_scores"].sum(1).view(3, 2).sort(1).values
        assert torch.equal(found, ends)


def test_vapo_is_ppo_with_the_changes_of_the_paper() -> None:
    graph = graphs.vapo(exact, alpha=0.1, gamma=0.9, clip=0.1, clip_high=0.3, nll=0.2, critic_warmup=7)
    update = graph["update_actor"].operator
    assert graph["decoupled_gae"].operator == DecoupledGAE(0.9, alpha=0.1)
    assert (update.loss, update.aggregation) == (PPOClipNLL(PPOClip(0.1, 0.3), 0.2), "token-mean")
    assert graph["update_actor"].when == When(start=7) and "ref" not in graph.roles() and "kl_shape" not in graph.nodes


@pytest.mark.parametrize("name", ["ppo", "vapo", "pf_ppo"])
def test_a_critic_is_warmed_up_before_the_policy_moves(name: str, tiny: str) -> None:
    """Two steps in which the critic alone is trained, and a third in which both are."""
    job = job_of(name, tiny, digits, n=4, critic_warmup=2)
    engines = job.build(0)
    steps, actor = walk(job.graph, **engines), weights_of(engines["actor"])
    steps.sync()
    for step in range(3):
        found = steps.step(PROMPTS, step).metrics.compute()
        assert "critic/vf_loss" in found and ("actor/pg_loss" in found) == (step == 2)
        same = all(torch.equal(actor[key], now) for key, now in weights_of(engines["actor"]).items())
        assert same == (step < 2) and engines["critic"].version == step + 1


def test_warmup_0_is_plain_ppo() -> None:
    assert graphs.ppo(exact, critic_warmup=0).fingerprint() == graphs.ppo(exact).fingerprint()
    assert isinstance(graphs.pf_ppo(exact)["filter"].operator, Filter)
