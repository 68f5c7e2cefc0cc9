"""Group baselines against loops in float64 Python, enumeration, cases by hand, and ragged masks with holes."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flowrl.errors import ParameterError
from flowrl.operators.advantages.groups import (
    GPGAdvantage,
    GroupAdvantage,
    OPOAdvantage,
    PassAtKAdvantage,
    RLOOAdvantage,
    group_advantage,
)
from tests.nightly import examples
from tests.operators.advantages.ragged import NAN, masks, numbers
from tests.support.errors import raises

Groups = dict[str, dict[int, float]]
"""By group, the score of each of its rows that has one."""


def scored(rewards: Tensor, mask: Tensor, uid: np.ndarray) -> Groups:
    groups: Groups = {}
    for row in range(len(uid)):
        if mask[row].any():
            groups.setdefault(uid[row], {})[row] = math.fsum(float(x) for x in rewards[row][mask[row]])
    return groups


def on_tokens(advantages: dict[int, float], mask: Tensor) -> Tensor:
    rows = [[advantages.get(row, 0.0) if on else 0.0 for on in mask[row].tolist()] for row in range(len(mask))]
    return torch.tensor(rows, dtype=torch.float64)


def rloo(groups: Groups, mask: Tensor) -> dict[int, float]:
    return {
        row: score - statistics.fmean(others) if (others := [s for o, s in peers.items() if o != row]) else 0.0
        for peers in groups.values()
        for row, score in peers.items()
    }


def opo(groups: Groups, mask: Tensor, leave_one_out: bool) -> dict[int, float]:
    found = {}
    for peers in groups.values():
        for row, score in peers.items():
            used = [r for r in peers if not (leave_one_out and r == row)]
            lengths = [int(mask[r].sum()) for r in used]
            weighed = sum(n * peers[r] for n, r in zip(lengths, used, strict=True))
            found[row] = score - weighed / sum(lengths) if len(peers) > 1 else 0.0
    return found


def gpg(groups: Groups, mask: Tensor) -> dict[int, float]:
    flat = [row for peers in groups.values() if len(set(peers.values())) == 1 for row in peers]
    rows = sum(map(len, groups.values()))
    alpha = rows / max(1, rows - len(flat))
    return {
        row: 0.0 if row in flat else alpha * (score - statistics.fmean(peers.values()))
        for peers in groups.values()
        for row, score in peers.items()
    }


def pass_at_k(groups: Groups, k: int) -> dict[int, float]:
    """Every set of k rows, one by one."""
    found = {}
    for peers in groups.values():
        sets = {rows: float(any(peers[r] > 0.5 for r in rows)) for rows in itertools.combinations(peers, k)}
        mean, std = statistics.fmean(sets.values()), statistics.pstdev(sets.values())
        for row in peers:
            mine = [score - mean for rows, score in sets.items() if row in rows]
            found[row] = statistics.fmean(mine) / std if std > 0 else 0.0
    return found


def shuffled(half: Tensor, random: object) -> tuple[Tensor, np.ndarray]:
    """Three rows a group, in any order."""
    mask = torch.cat([half, half.flip(0), half.roll(1, 0)])
    uid = np.array([f"p{i % len(half)}" for i in range(len(mask))], dtype=object)
    random.shuffle(uid)  # type: ignore[attr-defined]
    return mask, uid


def group_by_loops(
    rewards: Tensor, mask: Tensor, uid: np.ndarray, normalize_std: bool, eps: float
) -> list[list[float]]:
    scores = {row: math.fsum(float(x) for x in rewards[row][mask[row]]) for row in range(len(uid)) if mask[row].any()}
    out = [[0.0] * mask.shape[1] for _ in uid]
    for row, score in scores.items():
        peers = [s for other, s in scores.items() if uid[other] == uid[row]]
        value = score - statistics.fmean(peers)
        if normalize_std:
            value /= (statistics.stdev(peers) if len(peers) > 1 else 0.0) + eps
        out[row] = [value if on else 0.0 for on in mask[row].tolist()]
    return out


class TestGroupAdvantage:
    @examples(100)
    @given(masks(), st.integers(0, 2**31), st.booleans(), st.randoms(use_true_random=False))
    def test_group_advantages_equal_loops_over_groups(
        self, half: Tensor, seed: int, normalize_std: bool, random: object
    ) -> None:
        mask = torch.cat([half, half.flip(0), half.roll(1, 0)])
        uid = np.array([f"p{i % len(half)}" for i in range(len(mask))], dtype=object)
        random.shuffle(uid)  # type: ignore[attr-defined]
        rewards = numbers(mask, seed)
        found = group_advantage(rewards, mask, uid, normalize_std, eps=1e-3)
        expected = torch.tensor(group_by_loops(rewards, mask, uid, normalize_std, 1e-3), dtype=torch.float64)
        torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-4)
        assert found.dtype == torch.float32

    def test_group_advantages_equal_a_worked_example(self) -> None:
        # Group a has scores 1 and 0: mean 1/2, sample std sqrt(1/2), so ±1/sqrt(2). Group b has 3, 1, 2: std 1.
        rewards = torch.tensor([[0.0, 1.0], [1.0, 2.0], [0.0, 0.0], [1.0, 0.0], [0.0, 2.0]])
        mask = torch.tensor([[True, True], [True, True], [True, False], [True, False], [True, True]])
        uid = np.array(["a", "b", "a", "b", "b"], dtype=object)
        r = 0.5**0.5
        expected = torch.tensor([[r, r], [1.0, 1.0], [-r, 0.0], [-1.0, 0.0], [0.0, 0.0]])
        torch.testing.assert_close(group_advantage(rewards, mask, uid), expected, atol=3e-6, rtol=0)
        without = torch.tensor([[0.5, 0.5], [1.0, 1.0], [-0.5, 0.0], [-1.0, 0.0], [0.0, 0.0]])
        assert group_advantage(rewards, mask, uid, normalize_std=False).tolist() == without.tolist()

    @pytest.mark.parametrize("score", [0.1, 1 / 3, -0.7, 1e6 + 0.3])
    @pytest.mark.parametrize("size", [2, 3, 7, 64])
    def test_equal_scores_give_exactly_zero(self, score: float, size: int) -> None:
        mask = torch.ones(size, 4, dtype=torch.bool)
        rewards = torch.zeros(size, 4)
        rewards[:, -1] = score
        assert (group_advantage(rewards, mask, np.array(["p"] * size, dtype=object)) == 0).all()

    def test_a_row_without_tokens_is_excluded_from_its_group(self) -> None:
        rewards = torch.tensor([[1.0], [0.0], [NAN]])
        mask = torch.tensor([[True], [True], [False]])
        uid = np.array(["p"] * 3, dtype=object)
        assert group_advantage(rewards, mask, uid, normalize_std=False).tolist() == [[0.5], [-0.5], [0.0]]
        r = 0.5**0.5
        assert group_advantage(rewards, mask, uid).flatten().tolist() == pytest.approx([r, -r, 0.0], abs=3e-6)

    def test_a_group_of_one_is_refused(self) -> None:
        uid = np.array(["a", "lonely", "a"], dtype=object)
        with raises("rows.small-group", uid="lonely", found=1):
            group_advantage(torch.zeros(3, 2), torch.ones(3, 2, dtype=torch.bool), uid)

    def test_a_reward_off_the_mask_and_a_short_uid_are_refused(self) -> None:
        mask = torch.tensor([[True, False]] * 2)
        with raises("reward.off-mask", row=0, token=1):
            group_advantage(torch.ones(2, 2), mask, np.array(["a", "a"], dtype=object))
        with raises("rows.shape-mismatch", expected=2, found=3):
            group_advantage(torch.zeros(2, 2), mask, np.array(["a", "a", "a"], dtype=object))
        named = np.array([None, None], dtype=object)
        named[:] = [["a"], ["a"]]
        with raises("rows.shape-mismatch", row=0, found="['a']"):
            group_advantage(torch.zeros(2, 2), mask, named)


EVERY = [GroupAdvantage(), RLOOAdvantage(), OPOAdvantage(), OPOAdvantage(True), GPGAdvantage(), PassAtKAdvantage(2)]
BY_LOOPS: list[tuple[object, Callable[[Groups, Tensor], dict[int, float]]]] = [
    (RLOOAdvantage(), rloo),
    (OPOAdvantage(), lambda groups, mask: opo(groups, mask, False)),
    (OPOAdvantage(leave_one_out=True), lambda groups, mask: opo(groups, mask, True)),
    (GPGAdvantage(), gpg),
]


class TestBaselines:
    @pytest.mark.parametrize(("operator", "by_loops"), BY_LOOPS, ids=lambda value: getattr(value, "name", ""))
    @examples(60)
    @given(half=masks(), seed=st.integers(0, 2**31), equal=st.booleans(), random=st.randoms(use_true_random=False))
    def test_baselines_equal_loops_over_groups(
        self,
        operator: object,
        by_loops: Callable[..., dict[int, float]],
        half: Tensor,
        seed: int,
        equal: bool,
        random: object,
    ) -> None:
        mask, uid = shuffled(half, random)
        rewards = numbers(mask, seed)
        if equal:  # whole rewards, so that some groups are of equal scores
            rewards = rewards.round()
        found = operator(rewards, mask, uid)  # type: ignore[operator]
        expected = on_tokens(by_loops(scored(rewards, mask, uid), mask), mask)
        torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
        assert found.dtype == torch.float32

    @pytest.mark.parametrize("operator", EVERY, ids=repr)
    @pytest.mark.parametrize("score", [0.1, 1 / 3, -0.7])
    def test_equal_scores_give_exactly_zero(self, operator: object, score: float) -> None:
        mask = torch.arange(6) < torch.tensor([[6], [1], [3], [2], [6]])
        rewards = torch.zeros(5, 6)
        rewards[:, 0] = score
        assert (operator(rewards, mask, np.array(["p"] * 5, dtype=object)) == 0).all()  # type: ignore[operator]

    @pytest.mark.parametrize("operator", EVERY, ids=repr)
    def test_nan_off_the_mask_changes_no_result_across_blocks(self, operator: object) -> None:
        """Rows are worked on in blocks; one of NaN off the mask, and blocks without, give the same numbers."""
        mask = torch.rand(600, 9, generator=torch.Generator().manual_seed(0)) < 0.7
        uid = np.array([f"p{i % 50}" for i in range(600)], dtype=object)
        clean = numbers(mask, 1, off=0.0)
        dirty = clean.masked_fill(~mask & (torch.arange(600) == 599)[:, None], NAN)
        assert torch.equal(operator(clean, mask, uid), operator(dirty, mask, uid))  # type: ignore[operator]

    @pytest.mark.parametrize("operator", EVERY, ids=repr)
    def test_single_row_groups_and_rewards_off_the_mask_are_refused(self, operator: object) -> None:
        uid = np.array(["a", "lonely", "a"], dtype=object)
        with raises("rows.small-group", uid="lonely", found=1):
            operator(torch.zeros(3, 2), torch.ones(3, 2, dtype=torch.bool), uid)  # type: ignore[operator]
        with raises("reward.off-mask", column="token_level_rewards", row=0, token=1):
            mask = torch.tensor([[True, False]] * 2)
            operator(torch.ones(2, 2), mask, np.array(["a", "a"], dtype=object))  # type: ignore[operator]
        assert "group baseline" in operator.effects  # type: ignore[attr-defined]

    def test_rloo_worked_example(self) -> None:
        # scores 1, 0, 0.5: less the means of the others, 0.25, 0.75, 0.5
        rewards, mask = torch.tensor([[1.0], [0.0], [0.5]]), torch.ones(3, 1, dtype=torch.bool)
        uid = np.array(["p"] * 3, dtype=object)
        assert RLOOAdvantage()(rewards, mask, uid).flatten().tolist() == [0.75, -0.75, 0.0]

    def test_opo_worked_example(self) -> None:
        # one token scores 1, three score 0: the baseline is 1/4 by length, and the other's score without the own
        rewards, mask = torch.tensor([[1.0, 0, 0], [0.0, 0, 0]]), torch.tensor([[True, False, False], [True] * 3])
        uid = np.array(["p"] * 2, dtype=object)
        assert OPOAdvantage()(rewards, mask, uid)[:, 0].tolist() == [0.75, -0.25]
        assert OPOAdvantage(leave_one_out=True)(rewards, mask, uid)[:, 0].tolist() == [1.0, -1.0]

    def test_gpg_rescales_for_groups_of_equal_scores(self) -> None:
        rewards, mask = torch.tensor([[1.0], [0.0], [1.0], [1.0]]), torch.ones(4, 1, dtype=torch.bool)
        uid = np.array(["a", "a", "b", "b"], dtype=object)
        assert GPGAdvantage()(rewards, mask, uid).flatten().tolist() == [1.0, -1.0, 0.0, 0.0]
        third = pytest.approx([2 / 3, -2 / 3, 0.0, 0.0])  # verl: 4 rows, of which 3 have a score
        assert GPGAdvantage("nonzero")(rewards, mask, uid).flatten().tolist() == third


class TestPassAtK:
    @examples(80)
    @given(st.lists(st.lists(st.booleans(), min_size=3, max_size=6), min_size=1, max_size=3), st.integers(1, 3))
    def test_pass_at_k_advantages_equal_the_mean_over_all_subsets(self, groups: list[list[bool]], k: int) -> None:
        flat = [(f"p{i}", right) for i, group in enumerate(groups) for right in group]
        mask = torch.ones(len(flat), 2, dtype=torch.bool)
        rewards, uid = torch.zeros(len(flat), 2), np.array([name for name, _ in flat], dtype=object)
        rewards[:, 1] = torch.tensor([float(right) for _, right in flat])
        expected = on_tokens(pass_at_k(scored(rewards, mask, uid), k), mask)
        found = PassAtKAdvantage(k)(rewards, mask, uid)
        torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)

    def test_a_group_smaller_than_k_is_refused(self) -> None:
        mask = torch.tensor([[True], [True], [True], [False]])
        uid = np.array(["a", "b", "b", "a"], dtype=object)
        with raises("rows.small-group", uid="a", expected=2, found=1):
            PassAtKAdvantage(2)(torch.zeros(4, 1), mask, uid)

    def test_parameters_out_of_range_are_refused(self) -> None:
        with pytest.raises(ParameterError, match="k=0"):
            PassAtKAdvantage(0)
