"""Several rewards: weighted, gated, and as advantages, against loops over Python numbers."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flowrl import After, Metrics
from flowrl.errors import ParameterError
from flowrl.graph import Graph
from flowrl.graphs import gdpo, grpo
from flowrl.operators import GDPOAdvantage, GroupAdvantage, Matches, ModelReward, WeighRewards
from flowrl.operators.reward.terms import gdpo_advantage
from tests.operators.advantages.ragged import masks, numbers
from tests.support.errors import raises
from tests.support.jobs import PROMPTS, column, job_of, prompt_batch, rollout_batch
from tests.support.kernel import exact
from tests.support.rewards import digits
from tests.support.runs import walk

WEIGHTS = {"accuracy": 1.0, "format": 0.25, "length": -0.5}
GATES = {"format": "accuracy", "length": "format"}


def terms_of(mask: Tensor, seed: int) -> dict[str, Tensor]:
    return {name: numbers(mask, seed + i) for i, name in enumerate(WEIGHTS)}


@given(masks(), st.integers(0, 10**6))
def test_weighed_rewards_count_only_with_open_gates(mask: Tensor, seed: int) -> None:
    terms, metrics = terms_of(mask, seed), Metrics()
    found = WeighRewards(WEIGHTS, GATES, passed=0.2)(mask, metrics=metrics, **terms)
    assert found.dtype == torch.float32
    rows, sums = mask.tolist(), {name: [] for name in WEIGHTS}
    for i, row in enumerate(rows):
        scores = {name: sum(float(t[i, j]) for j, on in enumerate(row) if on) for name, t in terms.items()}
        for name, score in scores.items():
            sums[name] += [score] if any(row) else []
        for j, on in enumerate(row):
            expected = float(terms["accuracy"][i, j]) if on else 0.0
            if on and scores["accuracy"] > 0.2:
                expected += 0.25 * float(terms["format"][i, j])
            if on and scores["format"] > 0.2:
                expected -= 0.5 * float(terms["length"][i, j])
            assert float(found[i, j]) == pytest.approx(expected, abs=1e-5)
    if mask.any():
        logged = metrics.compute()
        for name, values in sums.items():
            assert logged[f"reward/{name}"] == pytest.approx(statistics.fmean(values), abs=1e-5)
        totals = found.sum(-1)[mask.any(-1)]
        assert logged["reward/mean"] == pytest.approx(float(totals.double().mean()), abs=1e-6)
        assert (logged["reward/min"], logged["reward/max"]) == (float(totals.min()), float(totals.max()))


def gdpo_by_hand(
    scores: Sequence[Sequence[float]],
    weights: Sequence[float],
    groups: Sequence[int],
    live: Sequence[bool],
    eps: float,
    by_std: bool,
) -> list[float]:
    """The paper's two normalizations, over lists; a row that is masked entirely is in none."""
    total = [0.0] * len(groups)
    for term, weight in zip(scores, weights, strict=True):
        for group in set(groups):
            members = [i for i, name in enumerate(groups) if name == group and live[i]]
            if len(members) < 2:
                continue
            values = [term[i] for i in members]
            mean, std = statistics.fmean(values), statistics.stdev(values)
            for i in members:
                total[i] += weight * (term[i] - mean) / (std + eps if by_std else 1.0)
    rows = [total[i] for i in range(len(groups)) if live[i]]
    if len(rows) < 2:
        return [0.0] * len(groups)
    mean, std = statistics.fmean(rows), statistics.stdev(rows)
    return [(total[i] - mean) / (std + eps) if live[i] else 0.0 for i in range(len(groups))]


@given(masks(min_rows=2), st.integers(0, 10**6), st.booleans(), st.data())
def test_gdpo_matches_the_paper(mask: Tensor, seed: int, by_std: bool, data: st.DataObject) -> None:
    cut = data.draw(st.sampled_from([0, *range(2, len(mask) - 1)]))
    groups = [int(i >= cut) for i in range(len(mask))]
    order = data.draw(st.permutations(range(len(mask))))
    groups = [groups[i] for i in order]
    terms = terms_of(mask, seed)
    found = gdpo_advantage(terms, WEIGHTS, mask, column(list(map(str, groups))), 1e-4, by_std)
    rows = mask.tolist()
    scores = [
        [sum(float(x) for x, on in zip(t[i], rows[i], strict=True) if on) for i in range(len(rows))]
        for t in terms.values()
    ]
    expected = gdpo_by_hand(scores, list(WEIGHTS.values()), groups, [any(row) for row in rows], 1e-4, by_std)
    for i, row in enumerate(rows):
        assert found[i].tolist() == pytest.approx([expected[i] if on else 0.0 for on in row], abs=2e-4)


def test_gdpo_distinguishes_rows_of_equal_reward_sums() -> None:
    """The paper's reason: of three answers, one with a rare reward and one with a frequent one."""
    mask, uid = torch.ones(4, 1, dtype=torch.bool), column(["p"] * 4)
    rare, often = torch.tensor([[1.0], [0], [0], [0]]), torch.tensor([[0.0], [1], [1], [0]])
    summed = GroupAdvantage()(rare + often, mask, uid).flatten().tolist()
    separate = GDPOAdvantage({"rare": 1.0, "often": 1.0})(mask, uid, rare=rare, often=often).flatten().tolist()
    assert summed[0] == summed[1] == summed[2]
    assert separate[0] > separate[1] == separate[2] > separate[3]
    assert sum(separate) == pytest.approx(0, abs=1e-6) and statistics.stdev(separate) == pytest.approx(1, abs=1e-5)


def test_equal_rewards_have_no_advantage() -> None:
    mask = torch.ones(4, 3, dtype=torch.bool)
    same = torch.full((4, 3), 0.1)
    assert gdpo_advantage({"a": same, "b": same}, {"a": 1.0, "b": 2.0}, mask, column(["p", "p", "q", "q"])).eq(0).all()


def test_invalid_terms_are_refused() -> None:
    with pytest.raises(ParameterError, match="invalid name of a term 'uid'"):
        WeighRewards({"uid": 1.0})
    with pytest.raises(ParameterError, match="invalid name of a term 'not so'"):
        GDPOAdvantage({"not so": 1.0})
    with pytest.raises(ParameterError, match="no terms"):
        GDPOAdvantage({})
    for gates in ({"format": "style"}, {"style": "format"}, {"format": "format"}):
        with raises("reward.invalid-settings", given=next(iter(gates.values()))):
            WeighRewards({"format": 1.0, "accuracy": 1.0}, gates)
    with raises("reward.invalid-settings", given="("):
        Matches("(")
    mask = torch.tensor([[True, False]])
    with raises("call.arguments", node="weigh_rewards", port="format"):
        WeighRewards({"format": 1.0})(mask)
    with raises("reward.off-mask", column="format", row=0, token=1):
        WeighRewards({"format": 1.0})(mask, format=torch.ones(1, 2))


def test_matches_requires_a_full_match() -> None:
    texts = np.array(["<a>\n1</a>", "<a>1</a> more", "", "<a></a>"], dtype=object)
    mask = torch.tensor([[True, True], [True, False], [True, True], [False, False]])
    assert Matches("<a>.*</a>")(texts, mask).tolist() == [[0, 1], [0, 0], [0, 0], [0, 0]]


def weighed() -> Graph:
    return grpo(digits, n=3, max_new_tokens=6, kl_coef=0.0).edit(
        insert={
            "form": After("generate", Matches(r".*\d.*")),
            "weigh_rewards": After("reward", WeighRewards({"digits": 1.0, "form": 0.5}, {"form": "digits"}, 0.2)),
        },
        wire={"weigh_rewards.digits": "reward.token_level_scores", "weigh_rewards.form": "form.token_level_scores"},
        set={"reward.log": "reward/digits"},
    )


def test_a_graph_with_several_rewards_is_serialized_edited_and_trained(tiny: str) -> None:
    graph = weighed()
    assert graph.check(prompts=3) == []
    assert Graph.from_dict(graph.to_dict()).fingerprint() == graph.fingerprint()
    heavier = graph.edit(set={"weigh_rewards.weights": {"digits": 1.0, "form": 2.0}})
    assert heavier["weigh_rewards"].operator.weights["form"] == 2.0
    job = job_of("grpo", tiny, digits, kl_coef=0.0)
    steps = walk(graph, **job.build(0))
    steps.sync()
    for step in range(3):
        result = steps.step(PROMPTS, step, return_nodes=["reward", "form", "weigh_rewards"])
        columns = result.columns
        scores = {
            name: columns[name].columns["token_level_scores"].sum(-1) for name in ("reward", "form", "weigh_rewards")
        }
        expected = scores["reward"] + 0.5 * scores["form"] * (scores["reward"] > 0.2)
        torch.testing.assert_close(scores["weigh_rewards"], expected)
        logged = result.metrics.compute()
        assert logged["reward/digits"] == pytest.approx(logged["reward/digits/mean"], abs=1e-6)
        assert logged["reward/mean"] == pytest.approx(float(expected.double().mean()), abs=1e-6)


def test_gdpo_trains_three_steps_on_two_rewards(tiny: str) -> None:
    graph = gdpo(digits, others={"right": exact}, weights={"right": 0.5}, n=3, max_new_tokens=6)
    assert graph.check(prompts=3) == []
    assert dict(graph["gdpo_advantage"].operator.weights) == {"reward": 1.0, "right": 0.5}
    steps = walk(graph, **job_of("grpo", tiny, digits, kl_coef=0.0).build(0))
    steps.sync()
    for step in range(3):
        logged = steps.step(PROMPTS, step).metrics.compute()
        assert {"reward/mean", "reward/right/mean"} <= logged.keys()


class Broken:
    """A reward model that overflows on its second row."""

    def rewards(self, batch: Any) -> Tensor:
        return torch.tensor([1.0, float("inf"), float("nan")])


def test_non_finite_reward_model_scores_are_refused() -> None:
    rows = rollout_batch(prompt_batch([[10], [11], [12]]), [[20, 21]] * 3)
    with raises("reward.not-finite", node="model_reward", row=1, found="inf"):
        ModelReward(reward_model=Broken())(rows)
    mask = torch.tensor([[True, True], [False, False], [False, False]])
    assert ModelReward(reward_model=Broken())(rows._replace(response_mask=mask)).tolist() == [[0, 1], [0, 0], [0, 0]]
