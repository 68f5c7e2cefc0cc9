"""Tests of `advantages.py`, `losses.py`, `reinforce.py` and others: algorithms pass the rules and train.

Each differs from its neighbor only by what its paper changes.
"""

from __future__ import annotations

import math

import pytest
import torch

from flowrl import graphs
from flowrl.graph import Graph
from flowrl.operators import DPO, GroupAdvantage, KLLoss, PPOClip
from tests.docs.reference.metric_names import undocumented
from tests.support.errors import raises
from tests.support.jobs import PROMPTS, job_of, weights_of
from tests.support.kernel import exact
from tests.support.rewards import asks_for_digits, digits
from tests.support.runs import walk

pytestmark = pytest.mark.runs

OFFLINE = {"dpo", "ipo", "kto", "orpo", "reward_model", "sft", "simpo"}
APART = {"distill", "distill_full", "distill_top", "grpo_sft", *OFFLINE}
"""They take no reward function, or data of another kind: see `test_distill`, `test_sft`, `test_preferences` and
`test_reward_model`."""
EVERY = [getattr(graphs, name) for name in graphs.__all__ if name not in APART]
every = pytest.mark.parametrize("algorithm", EVERY, ids=lambda algorithm: algorithm.__name__)


@every
def test_every_algorithm_passes_the_rules_and_has_its_name(algorithm: object) -> None:
    graph: Graph = algorithm(exact)  # type: ignore[operator]
    assert graph.check(prompts=8) == []
    assert graph.name == algorithm.__name__  # type: ignore[attr-defined]


SETTINGS: dict[str, dict[str, int]] = {"dapo": {"groups": 1, "max_new_tokens": 20}, "vapo": {"critic_warmup": 1}}
"""Further settings with which an algorithm learns from three prompts in three steps."""


@every
def test_every_algorithm_trains_three_steps(algorithm: object, tiny: str) -> None:
    name = algorithm.__name__  # type: ignore[attr-defined]
    job = job_of(name, tiny, asks_for_digits, n=5, **SETTINGS.get(name, {}))
    engines = job.build(0)
    steps, before = walk(job.graph, **engines), weights_of(engines["actor"])
    steps.sync()
    for step in range(3):
        metrics = steps.step(PROMPTS, step).metrics.compute()
        assert all(math.isfinite(value) for value in metrics.values())
        assert undocumented(metrics) == []
    assert any(not torch.equal(before[name], after) for name, after in weights_of(engines["actor"]).items())


def changed(graph: Graph, neighbor: Graph) -> list[str]:
    """What a graph changes against its neighbor, line by line."""
    return str(neighbor.diff(graph)).splitlines()[1:]


def test_rloo_differs_from_ppo_by_its_advantage() -> None:
    assert changed(graphs.rloo(exact, n=1, kl_coef=0.001), graphs.ppo(exact)) == [
        "+ rloo_advantage: RLOOAdvantage()  <- kl_shape, generate, repeat",
        "- gae: GAE()  (in its place: rloo_advantage)",
        "- whiten: Whiten()  (in its place: rloo_advantage)",
        "- update_critic: UpdateCritic()",
        "- value: Value()  (nothing reads it any more)",
        "~ update_actor.aggregation: 'token-mean' -> 'seq-mean-token-sum'",
        "~ update_actor <- advantages: whiten.advantages -> rloo_advantage.advantages",
    ]


def test_remax_adds_a_greedy_baseline() -> None:
    assert changed(graphs.remax(exact, max_new_tokens=7), graphs.reinforce_plus_plus(exact, max_new_tokens=7)) == [
        "+ greedy: Generate(temperature=0.0, max_new_tokens=7)  <- repeat",
        "+ greedy_reward: Reward(fn=tests.support.kernel:exact)  <- repeat, greedy",
        "+ row_score: RowScore()  <- greedy_reward, greedy",
        "+ subtract_baseline: SubtractBaseline()  <- return_to_go, generate, row_score",
        "- whiten: Whiten()  (in its place: subtract_baseline)",
        "~ update_actor.aggregation: 'token-mean' -> 'seq-mean-token-sum'",
        "~ update_actor <- advantages: whiten.advantages -> subtract_baseline.advantages",
    ]


def test_remax_advantages_are_returns_minus_the_greedy_score(tiny: str) -> None:
    """By the paper's formula, token by token, from the outputs of the graph's other nodes."""
    job = job_of("remax", tiny, digits, n=2, kl_coef=0.1)
    steps = walk(job.graph, **job.build(0))
    steps.sync()
    kept = steps.step(PROMPTS, 0, return_nodes=list(job.graph.nodes)).columns
    rewards, mask = kept["kl_shape"].columns["token_level_rewards"].double(), kept["generate"].columns["response_mask"]
    found = kept["subtract_baseline"].columns["advantages"]
    texts = kept["greedy"].columns["response_text"]
    assert len({digits("", text, "") for text in texts}) > 0 and len(texts) == 6
    for row, text in enumerate(texts):
        for t in range(mask.shape[1]):
            expected = float(rewards[row, t:].sum()) - digits("", text, "") if mask[row, t] else 0.0
            assert float(found[row, t]) == pytest.approx(expected, abs=1e-6)


def test_reinforce_plus_plus_has_no_critic_and_these_parameters() -> None:
    graph = graphs.reinforce_plus_plus(exact, gamma=0.5, kl_coef=0.25, clip=0.3, mini_batch=2)
    assert set(graph.roles()) == {"rollout", "actor", "ref"}
    assert graph["return_to_go"].operator.gamma == 0.5
    assert graph["kl_shape"].operator.coef == 0.25
    assert graph["update_actor"].operator.loss == PPOClip(0.3) and graph["update_actor"].operator.mini_batch == 2
    assert graph["update_actor"].inputs == graphs.ppo(exact)["update_actor"].inputs  # it reads what was whitened


def test_reinforce_plus_plus_baseline_has_a_group_mean_and_k2_loss() -> None:
    graph = graphs.reinforce_plus_plus_baseline(exact, n=3, kl_coef=0.5, clip=0.3)
    assert graph["group_advantage"].operator == GroupAdvantage(normalize_std=False)
    update = graph["update_actor"].operator
    assert (update.loss, update.kl) == (PPOClip(0.3), KLLoss("k2", 0.5))
    assert "whiten" in graph.nodes and graph["repeat"].operator.n == 3


def test_dr_grpo_divides_neither_by_deviation_nor_by_length() -> None:
    graph = graphs.dr_grpo(exact, max_new_tokens=7, clip=0.3)
    update = graph["update_actor"].operator
    assert (update.loss, update.aggregation, update.norm) == (PPOClip(0.3), "seq-mean-token-sum-norm", 7)
    assert graph["group_advantage"].operator == GroupAdvantage(normalize_std=False)
    assert graph["generate"].operator.max_new_tokens == 7
    assert "ref" not in graph.roles()


@pytest.mark.parametrize("name", ["opo", "gpg", "pass_at_k"])
def test_variants_of_grpo_replace_only_the_advantage(name: str) -> None:
    settings = {} if name == "pass_at_k" else {"kl_coef": 0.0}
    lines = changed(getattr(graphs, name)(exact), graphs.grpo(exact, **settings))
    assert (
        len(lines) == 3
        and lines[0].startswith(f"+ {name}_advantage: ")
        and lines[1].startswith("- group_advantage: GroupAdvantage()")
    )


def test_an_unknown_setting_is_refused() -> None:
    with raises("algorithm.bad-call", algorithm="rloo", parameter="temprature"):
        graphs.rloo(exact, temprature=1.0)


@pytest.mark.parametrize(
    ("algorithm", "given", "ours"),
    [
        ("grpo", "num_generations", "TRL's num_generations is n here"),
        ("grpo", "max_completion_length", "TRL's max_completion_length is max_new_tokens here"),
        ("rloo", "beta", "TRL's beta is kl_coef here"),
        ("grpo", "epsilon", "TRL's epsilon is clip here"),
        ("dapo", "epsilon_high", "TRL's epsilon_high is clip_high here"),
        ("ppo", "num_iterations", "TRL's num_iterations is ppo_epochs here"),
        ("ppo", "rollout_n", "verl's rollout_n is n here"),
        ("ppo", "kl_loss_coef", "verl's kl_loss_coef is kl_coef here"),
        ("grpo", "clip_ratio", "verl's clip_ratio is clip here"),
        ("grpo", "max_response_length", "verl's max_response_length is max_new_tokens here"),
        ("grpo", "n_samples_per_prompt", "OpenRLHF's n_samples_per_prompt is n here"),
        ("ppo", "init_kl_coef", "OpenRLHF's init_kl_coef is kl_coef here"),
        ("grpo", "eps_clip", "OpenRLHF's eps_clip is clip here"),
        ("grpo", "generate_max_len", "OpenRLHF's generate_max_len is max_new_tokens here"),
    ],
)
def test_names_of_other_libraries_are_translated(algorithm: str, given: str, ours: str) -> None:
    with raises("algorithm.bad-call", algorithm=algorithm) as error:
        getattr(graphs, algorithm)(exact, **{given: 1})
    assert f"({ours})" in error.value.message


def test_a_name_without_a_parameter_here_is_not_translated() -> None:
    """SFT generates nothing."""
    with raises("algorithm.bad-call", algorithm="sft") as error:
        graphs.sft(num_generations=8)
    assert "TRL" not in error.value.message


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("rloo", "gamma"),
        ("rloo", "lam"),
        ("reinforce_plus_plus", "lam"),
        ("remax", "lam"),
        ("rloo", "critic_warmup"),
        ("reinforce_plus_plus", "critic_warmup"),
        ("remax", "critic_warmup"),
        ("raft", "clip"),
        ("raft", "kl_coef"),
        ("raft", "mini_batch"),
        ("pf_ppo", "mini_batch"),
        ("vapo", "lam"),
        ("vapo", "kl_coef"),
    ],
)
def test_an_unsupported_setting_is_refused(name: str, setting: str) -> None:
    with raises("algorithm.unsupported-setting", algorithm=name, parameter=setting):
        getattr(graphs, name)(exact, **{setting: 0.5})


def test_pass_at_k_needs_more_responses_than_k() -> None:
    with raises("algorithm.too-few-responses", algorithm="pass_at_k", n=8, expected=9):
        graphs.pass_at_k(exact, k=8)


@pytest.mark.parametrize("name", ["gpg", "opo", "otb", "dr_grpo", "dapo"])
def test_kl_coef_adds_a_kl_loss_to_algorithms_without_one(name: str) -> None:
    assert getattr(graphs, name)(exact)["update_actor"].operator.kl is None
    graph = getattr(graphs, name)(exact, kl_coef=0.5)
    assert graph["update_actor"].operator.kl == KLLoss("k3", 0.5) and "ref_log_prob" in graph.nodes


@pytest.mark.parametrize(
    ("name", "aggregation"),
    [
        ("gspo", "seq-mean-token-mean"),
        ("cispo", "token-mean"),
        ("gmpo", "seq-mean-token-mean"),
        ("sapo", "seq-mean-token-mean"),
        ("kl_cov", "token-mean"),
        ("clip_cov", "token-mean"),
        ("dppo", "token-mean"),
    ],
)
def test_variants_of_grpo_replace_only_the_loss(name: str, aggregation: str) -> None:
    graph = getattr(graphs, name)(exact)
    lines = changed(graph, graphs.grpo(exact, kl_coef=0.0))
    changed_line = lines.pop(0)
    assert changed_line.startswith("~ update_actor.loss: PPOClip(clip_low=0.2, ratio_to='old') -> ")
    assert lines == (
        [] if aggregation == "token-mean" else [f"~ update_actor.aggregation: 'token-mean' -> '{aggregation}'"]
    )
    assert getattr(graphs, name)(exact, kl_coef=0.5)["update_actor"].operator.kl == KLLoss("k3", 0.5)
    with raises("algorithm.unsupported-setting", algorithm=name, parameter="clip"):
        getattr(graphs, name)(exact, clip=0.1)


def test_online_dpo_has_pairs_and_no_advantage() -> None:
    graph = graphs.online_dpo(exact, beta=0.5)
    assert graph["update_actor"].operator.loss == DPO(0.5) and graph["repeat"].operator.n == 2
    assert "group_advantage" not in graph.nodes and "ref" in graph.roles()
    with raises("algorithm.unsupported-setting", algorithm="online_dpo", parameter="kl_coef"):
        graphs.online_dpo(exact, kl_coef=0.1)
