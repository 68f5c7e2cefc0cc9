"""Advantages of turns against loops in float64 Python, cases by hand, and what they must agree with."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flowrl.backends import TorchRollout
from flowrl.data.metrics import Metrics
from flowrl.episodes import Chat, Row
from flowrl.errors import ParameterError
from flowrl.graphs import grpo, ppo
from flowrl.operators import GAE, Interact, KLShape, PPOClip, TurnGAE, TurnGroupAdvantage, ValueClip, Whiten
from flowrl.operators.advantages.gae import gae
from flowrl.operators.advantages.groups import group_advantage
from flowrl.operators.advantages.turns import turn_gae, turn_group_advantage
from flowrl.operators.losses.objective import TokenObjective
from flowrl.operators.reward.operator import place_scores
from flowrl.records import EpisodeBatch
from tests.nightly import examples
from tests.operators.advantages.ragged import masks, numbers
from tests.operators.engines.test_interact import CONTEXT, Echo
from tests.operators.engines.test_interact import episodes as played
from tests.support.errors import raises
from tests.support.jobs import column, job_of
from tests.support.kernel import exact
from tests.support.runs import lines, train

unit = st.floats(0, 1)


@st.composite
def episodes(draw: st.DrawFn, min_rows: int = 1) -> tuple[Tensor, Tensor]:
    """Masks, and turns that may be adjacent, have holes, or be masked entirely; values off the mask are arbitrary."""
    mask = draw(masks(min_rows=min_rows))
    ends = torch.tensor([[draw(st.booleans()) for _ in range(mask.shape[1])] for _ in range(len(mask))])
    turns = ends.long().cumsum(1)
    return mask, torch.where(mask | draw(st.booleans()), turns, -1)


def turns_of(mask: Tensor, turn_ids: Tensor, row: int) -> dict[int, list[int]]:
    """The tokens on the mask of each turn of a row."""
    found: dict[int, list[int]] = {}
    for t in range(mask.shape[1]):
        if mask[row, t]:
            found.setdefault(int(turn_ids[row, t]), []).append(t)
    return dict(sorted(found.items()))


def returns_of(rewards: Tensor, turns: dict[int, list[int]], row: int, gamma: float) -> dict[int, float]:
    """By turn, what it and all after it were paid."""
    paid = [sum(float(rewards[row, t]) for t in at) for at in turns.values()]
    return {k: sum(gamma**j * r for j, r in enumerate(paid[i:])) for i, k in enumerate(turns)}


class TestTurnGAE:
    @examples(100)
    @given(episodes(), st.integers(0, 2**31), unit, unit)
    def test_turn_gae_equals_the_sum_over_existing_turns(
        self, given_turns: tuple[Tensor, Tensor], seed: int, gamma: float, lam: float
    ) -> None:
        mask, turn_ids = given_turns
        rewards, values = numbers(mask, seed), numbers(mask, seed + 1)
        advantages, returns = turn_gae(rewards, values, mask, turn_ids, gamma, lam)
        expected, expected_returns = torch.zeros(2, *mask.shape, dtype=torch.float64)
        for row in range(len(mask)):
            turns = turns_of(mask, turn_ids, row)
            paid = [sum(float(rewards[row, t]) for t in at) for at in turns.values()]
            value = [float(values[row, at[0]]) for at in turns.values()]
            delta = [r + gamma * v2 - v for r, v, v2 in zip(paid, value, [*value, 0.0][1:], strict=True)]
            for i, at in enumerate(turns.values()):
                expected[row, at] = sum((gamma * lam) ** j * d for j, d in enumerate(delta[i:]))
                expected_returns[row, at] = expected[row, at] + value[i]
        torch.testing.assert_close(advantages.double(), expected, atol=5e-5, rtol=5e-5)
        torch.testing.assert_close(returns.double(), expected_returns, atol=5e-5, rtol=5e-5)
        assert advantages.dtype == returns.dtype == torch.float32

    def test_turn_gae_equals_a_worked_example(self) -> None:
        # Two turns with two tokens of the environment between; R = [1 + 2, 4], V = [3, 5] at their first tokens.
        mask = torch.tensor([[True, True, False, False, True, True, True, False]])
        turn_ids = torch.tensor([[0, 0, -1, -1, 1, 1, 1, -1]])
        rewards = torch.tensor([[1.0, 2.0, 0.0, 0.0, 0.0, 0.0, 4.0, 0.0]])
        nan = float("nan")
        values = torch.tensor([[3.0, 9.0, nan, 7.0, 5.0, 9.0, 9.0, nan]])
        advantages, returns = turn_gae(rewards, values, mask, turn_ids, 0.5, 0.5)
        # delta = [3 + .5*5 - 3, 4 - 5] = [2.5, -1]; A = [2.5 + .25*-1, -1]
        assert advantages.tolist() == [[2.25, 2.25, 0.0, 0.0, -1.0, -1.0, -1.0, 0.0]]
        assert returns.tolist() == [[5.25, 5.25, 0.0, 0.0, 4.0, 4.0, 4.0, 0.0]]

    def test_adjacent_responses_are_separate_turns(self) -> None:
        mask, rewards = torch.ones(1, 2, dtype=torch.bool), torch.tensor([[1.0, 2.0]])
        values = torch.tensor([[0.5, 0.25]])
        separate, _ = turn_gae(rewards, values, mask, torch.tensor([[0, 1]]), 1.0, 0.0)
        one, _ = turn_gae(rewards, values, mask, torch.tensor([[0, 0]]), 1.0, 0.0)
        assert separate.tolist() == [[0.75, 1.75]] and one.tolist() == [[2.5, 2.5]]

    @examples(30)
    @given(masks(), st.integers(0, 2**31), unit, unit)
    def test_single_token_turns_equal_token_gae(self, mask: Tensor, seed: int, gamma: float, lam: float) -> None:
        rewards, values = numbers(mask, seed), numbers(mask, seed + 1)
        each = torch.arange(mask.shape[1]).expand(mask.shape)
        for found, expected in zip(
            turn_gae(rewards, values, mask, each, gamma, lam), gae(rewards, values, mask, gamma, lam), strict=True
        ):
            assert torch.equal(found, expected)

    def test_gamma_discounts_per_turn_not_per_token(self) -> None:
        def first(length: int) -> float:
            turn_ids = torch.tensor([[0] * length + [1] * length])
            rewards = torch.zeros(1, 2 * length)
            rewards[0, -1] = 1.0
            mask = torch.ones(1, 2 * length, dtype=torch.bool)
            return float(turn_gae(rewards, torch.zeros_like(rewards), mask, turn_ids, 0.5, 1.0)[0][0, 0])

        assert first(1) == first(7) == 0.5


class TestTurnGroupAdvantage:
    @examples(100)
    @given(episodes(min_rows=4), st.integers(0, 2**31), unit, st.booleans())
    def test_turn_group_advantages_equal_the_formula(
        self, given_turns: tuple[Tensor, Tensor], seed: int, gamma: float, normalize: bool
    ) -> None:
        mask, turn_ids = given_turns
        rewards, uid = numbers(mask, seed), column(["ab"[row % 2] for row in range(len(mask))])
        found = turn_group_advantage(rewards, mask, turn_ids, uid, gamma, normalize)
        turns = [turns_of(mask, turn_ids, row) for row in range(len(mask))]
        returns = [returns_of(rewards, turns[row], row, gamma) for row in range(len(mask))]
        for row, at_turn in enumerate(turns):
            for k, at in at_turn.items():
                theirs = [returns[r][k] for r in range(len(mask)) if uid[r] == uid[row] and k in returns[r]]
                expected = returns[row][k] - statistics.fmean(theirs)
                if normalize and len(theirs) > 1:
                    expected /= statistics.stdev(theirs) + 1e-6
                assert found[row, at].tolist() == pytest.approx([expected] * len(at), abs=1e-3)
        assert (found[~mask] == 0).all() and found.dtype == torch.float32

    def test_turn_group_advantages_equal_a_worked_example(self) -> None:
        # G = [1 + 2, 2], [0 + 4, 4], [5]: means 4 of the first turns, 3 of the second.
        mask = torch.tensor([[True, False, True], [True, False, True], [True, False, False]])
        turn_ids = torch.tensor([[0, -1, 1], [0, -1, 1], [0, -1, -1]])
        rewards = torch.tensor([[1.0, 0.0, 2.0], [0.0, 0.0, 4.0], [5.0, 0.0, 0.0]])
        uid = column(["a"] * 3)
        plain = turn_group_advantage(rewards, mask, turn_ids, uid, normalize_std=False)
        assert plain.tolist() == [[-1.0, 0.0, -1.0], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]
        scaled = turn_group_advantage(rewards, mask, turn_ids, uid)
        torch.testing.assert_close(scaled[:, 0], torch.tensor([-1.0, 0.0, 1.0]), atol=1e-5, rtol=0)  # std 1
        torch.testing.assert_close(scaled[:2, 2], torch.tensor([-1.0, 1.0]) / 2**0.5, atol=1e-5, rtol=0)

    @examples(30)
    @given(masks(min_rows=2), st.integers(0, 2**31), st.booleans())
    def test_one_turn_per_row_equals_the_group_advantage(self, mask: Tensor, seed: int, normalize: bool) -> None:
        rewards, uid = numbers(mask, seed), column(["a"] * len(mask))
        found = turn_group_advantage(rewards, mask, torch.zeros(mask.shape, dtype=torch.int64), uid, 1.0, normalize)
        torch.testing.assert_close(found, group_advantage(rewards, mask, uid, normalize), atol=1e-3, rtol=1e-5)

    def test_turns_of_equal_reward_have_no_advantage(self) -> None:
        mask, turn_ids = torch.ones(3, 4, dtype=torch.bool), torch.tensor([[0, 0, 1, 1]]).expand(3, 4)
        rewards = torch.tensor([0.1, 0.0, 0.0, 0.3]).expand(3, 4)
        assert not turn_group_advantage(rewards, mask, turn_ids, column(["a"] * 3)).any()

    def test_a_turn_index_of_a_single_row_has_zero_advantage(self) -> None:
        mask, turn_ids = torch.tensor([[True, True], [True, False]]), torch.tensor([[0, 1], [0, -1]])
        rewards = torch.tensor([[0.0, 7.0], [1.0, 0.0]])
        found = turn_group_advantage(rewards, mask, turn_ids, column(["a"] * 2), normalize_std=False)
        assert found.tolist() == [[3.0, 0.0], [-3.0, 0.0]]


class TestRefusals:
    mask = torch.tensor([[True, False], [True, True]])
    turn_ids = torch.tensor([[0, -1], [0, 1]])

    def both(self, rewards: Tensor, turn_ids: Tensor, code: str, **facts: object) -> None:
        """Both functions raise the same error."""
        with raises(code, **facts) as of_gae:
            turn_gae(rewards, torch.zeros(2, 2), self.mask, turn_ids, 1.0, 0.95)
        with raises(code, **facts) as of_groups:
            turn_group_advantage(rewards, self.mask, turn_ids, column(["a", "a"]))
        assert str(of_gae.value) == str(of_groups.value)

    def test_a_reward_off_the_mask_is_refused(self) -> None:
        rewards = torch.tensor([[0.0, 2.0], [0.0, 0.0]])
        self.both(rewards, self.turn_ids, "reward.off-mask", column="token_level_rewards", row=0, token=1)

    def test_a_token_without_a_turn_is_refused(self) -> None:
        self.both(torch.zeros(2, 2), torch.tensor([[0, -1], [0, -1]]), "advantage.no-turn", row=1, token=1)

    def test_turn_ids_of_another_shape_are_refused(self) -> None:
        self.both(torch.zeros(2, 2), torch.tensor([[0], [0]]), "rows.shape-mismatch", expected=(2, 2), found=(2, 1))

    def test_values_of_another_shape_are_refused(self) -> None:
        with raises("rows.shape-mismatch", expected=(2, 2), found=(2, 1)):
            turn_gae(torch.zeros(2, 2), torch.zeros(2, 1), self.mask, self.turn_ids, 1.0, 1.0)

    @pytest.mark.parametrize("gamma", [-0.1, 1.1])
    def test_a_discount_out_of_range_is_refused(self, gamma: float) -> None:
        for operator in (TurnGAE, TurnGroupAdvantage):
            with pytest.raises(ParameterError, match="gamma="):
                operator(gamma=gamma)


def test_empty_batches_are_accepted() -> None:
    for shape in ((0, 3), (2, 0), (2, 3)):
        mask, zeros = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape)
        none = torch.full(shape, -1)
        uid = column(["a"] * len(mask))
        assert turn_gae(zeros, zeros, mask, none, 1.0, 1.0)[0].shape == shape
        assert not turn_group_advantage(zeros, mask, none, uid).any()


def test_turn_operators_replace_token_operators_by_one_edit() -> None:
    episodes: Any = {"replace": {"generate": Interact(Echo, max_turns=3)}, "drop": ["reward"]}
    by_critic = ppo(exact).edit(**episodes).edit(replace={"gae": TurnGAE()})
    by_group = grpo(exact).edit(**episodes).edit(replace={"group_advantage": TurnGroupAdvantage()})
    assert by_critic.check(prompts=4) == by_group.check(prompts=4) == []
    assert {"group baseline", "scaled"} <= by_group["turn_group_advantage"].effects
    assert "scaled" not in TurnGroupAdvantage(normalize_std=False).effects


# --- real episodes: two to three turns of a tiny policy, with what the environment says between them


@pytest.fixture(scope="module")
def batch(tiny: str) -> EpisodeBatch:
    return played(TorchRollout(tiny, frozen=True, device="cpu").build(CONTEXT), paid)[0]


async def paid(chat: Chat, row: Row) -> float:
    """Two or three answers; the second earns 0.5, and the outcome is 2 more."""
    await chat.answer()
    await chat.answer("go on")
    chat.reward(0.5)
    if int(row.row_id) % 2:
        await chat.answer("and on")
    return 2.0


def sampled(batch: EpisodeBatch) -> list[list[int]]:
    """The tokens of each row that the policy sampled."""
    return [mask.nonzero().flatten().tolist() for mask in batch.response_mask]


def test_turn_rewards_are_on_the_last_token_of_their_turn(batch: EpisodeBatch) -> None:
    for row, at in enumerate(sampled(batch)):
        ends = [t for t in at if t + 1 not in at]
        assert len(ends) == int(batch.turns[row]) == 2 + row % 2
        expected = {ends[1]: 0.5} | {ends[-1]: 2.0 + 0.5 * (ends[-1] == ends[1])}
        assert {t: float(batch.token_level_scores[row, t]) for t in expected} == expected
        assert batch.token_level_scores[row].count_nonzero() == len(expected)


def test_an_outcome_score_is_on_the_last_sampled_token(batch: EpisodeBatch) -> None:
    scores = place_scores(torch.arange(1.0, 7.0), batch.response_mask)
    assert [scores[row].nonzero().flatten().tolist() for row in range(6)] == [at[-1:] for at in sampled(batch)]


def test_turn_ids_number_the_sampled_turns(batch: EpisodeBatch) -> None:
    assert torch.equal(batch.turn_ids >= 0, batch.response_mask)
    for row, at in enumerate(sampled(batch)):
        starts = torch.tensor([t - 1 not in at for t in at])  # no two answers touch here
        assert batch.turn_ids[row, at].tolist() == (starts.cumsum(0) - 1).tolist()


def test_ppo_over_episodes_uses_only_sampled_tokens(batch: EpisodeBatch) -> None:
    """From scores to losses, in float64 over rows without their holes, which contain NaN."""
    mask = batch.response_mask
    old, ref, values, new = (numbers(mask, seed) for seed in range(4))
    rewards = KLShape(0.1)(batch.token_level_scores, old, ref, mask, metrics=Metrics())
    found = GAE(0.9, 0.8)(rewards, values, mask)
    white = Whiten()(found.advantages, mask)
    advantages, returns, losses, squares = [], [], [], []
    for row, at in enumerate(sampled(batch)):
        score, o, r, v = (x[row, at].double() for x in (batch.token_level_scores, old, ref, values))
        delta = score - 0.1 * (o - r) + 0.9 * torch.cat([v[1:], v.new_zeros(1)]) - v
        for i in range(len(at)):
            advantages.append(sum(0.72**k * float(d) for k, d in enumerate(delta[i:])))
            returns.append(advantages[-1] + float(v[i]))
    mean, std = statistics.fmean(advantages), statistics.stdev(advantages)
    expected = [(a - mean) / std for a in advantages]
    assert white[mask].tolist() == pytest.approx(expected, abs=1e-4)
    assert found.returns[mask].tolist() == pytest.approx(returns, abs=1e-4)
    for o, n, a in zip(old[mask].tolist(), new[mask].tolist(), expected, strict=True):
        ratio = math.exp(n - o)
        losses.append(max(-a * ratio, -a * min(max(ratio, 0.8), 1.2)))
    squares = [0.5 * (n - r) ** 2 for n, r in zip(new[mask].tolist(), returns, strict=True)]
    rows = SimpleNamespace(old_log_probs=old, advantages=white, values=values, returns=found.returns)
    for loss, truth in ((PPOClip(), losses), (ValueClip(clip=None), squares)):
        objective = TokenObjective(loss)
        weights = objective.weights(mask)
        assert float(objective(new, None, rows, weights, Metrics())) == pytest.approx(statistics.fmean(truth), rel=1e-4)


@pytest.mark.parametrize("credit", [GAE(), TurnGAE()])
def test_ppo_trains_policy_and_critic_on_episodes(credit: Any, tiny: str, prompts_file: str, tmp_path: Path) -> None:
    operator = Interact(Echo, max_turns=3, context=120, max_new_tokens=6)
    graph = job_of("ppo", tiny).edit(replace={"generate": operator}, drop=["reward"])
    train(graph.edit(replace={"gae": credit}), prompts_file, tmp_path / "run", steps=2)
    first, second = lines(tmp_path / "run" / "metrics.jsonl")
    assert first["critic/vpred_mean"] == 0 < second["critic/vpred_mean"]  # all rewards are positive
    assert first["critic/vf_loss"] > 0 and max(one["rollout/logp_diff_max"] for one in (first, second)) < 1e-4
