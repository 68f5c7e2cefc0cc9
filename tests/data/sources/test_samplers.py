"""Samplers: draws against a transcription of the paper, and positions as their complete state."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.data.keys import Key
from flowrl.data.sources.samplers import ByDifficulty, InOrder, Order, ReplaySampler, Sampler, Shuffled
from flowrl.errors import DataError, ParameterError
from tests.nightly import examples
from tests.support.errors import raises

SAMPLERS = [
    Shuffled(),
    InOrder(),
    ByDifficulty(),
    ByDifficulty(0.2, decay=0.9, best=2.0),
    ReplaySampler(),
    ReplaySampler(0.5, 0.9),
]
every = pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)


def start(sampler: Sampler, rows: int, seed: int = 3) -> Order:
    return sampler.start(range(rows), Key.of(seed))


def answer(order: Order, sampler: Sampler, step: int, n: int) -> list[Any]:
    """Draw, and score the draws: row ``r`` is right in ``r`` of 10 responses."""
    sampled = order.next(n)
    if sampler.learns:
        order.learn(step, {one.row: [1.0] * one.row + [0.0] * (10 - one.row) for one in sampled})
    return sampled


@every
@examples(20)
@given(st.integers(1, 9), st.lists(st.integers(1, 12), min_size=2, max_size=7), st.integers(0, 5))
def test_restoring_a_position_restores_the_sampler(sampler: Sampler, rows: int, sizes: list[int], cut: int) -> None:
    uninterrupted, cut = start(sampler, rows), min(cut, len(sizes) - 1)
    for step, n in enumerate(sizes[:cut], start=1):
        answer(uninterrupted, sampler, step, n)
    position = json.loads(json.dumps(uninterrupted.position))
    resumed = start(sampler, rows)
    resumed.seek(position)
    assert resumed.position == uninterrupted.position and resumed.last_scored_step == uninterrupted.last_scored_step
    for step, n in enumerate(sizes[cut:], start=cut + 1):
        assert answer(resumed, sampler, step, n) == answer(uninterrupted, sampler, step, n)
    assert resumed.position == uninterrupted.position


@every
@given(st.integers(1, 7), st.lists(st.integers(1, 20), min_size=1, max_size=8))
def test_every_sampled_row_id_is_unique(sampler: Sampler, rows: int, sizes: list[int]) -> None:
    order = start(sampler, rows)
    sampled = [one for step, n in enumerate(sizes, start=1) for one in answer(order, sampler, step, n)]
    assert len(sampled) == sum(sizes) == len(set(sampled))
    assert all(0 <= one.row < rows for one in sampled)


@every
def test_invalid_positions_are_refused(sampler: Sampler) -> None:
    order = start(sampler, 9)
    for step in (1, 2, 3):
        answer(order, sampler, step, 4)
    good = order.position
    for key in good:
        for odd in (None, -1, 1.5, "3", True, [], {}, {"3": None}, {"99": [1, 1.0, 1.0]}, [99], [[0]]):
            if odd == good[key]:
                continue
            before = order.position
            try:
                order.seek({**good, key: odd})
            except DataError:
                assert order.position == before  # a refused position changes nothing
            else:  # it is another valid position
                assert order.position == {**good, key: odd}
                order.seek(good)
    for odd in (None, 3, {}, {**good, "more": 1}, {**good, "rows": 8}, {key: good[key] for key in list(good)[1:]}):
        with raises("sampler.wrong-position", rows=9):
            order.seek(odd)  # type: ignore[arg-type]


def posterior(counts: list[tuple[float, int]], decay: float) -> tuple[float, float]:
    """The two Beta parameters after these successes and totals, by the update of the paper."""
    a = b = 1.0
    for right, n in counts:
        a, b = decay * a + (1 - decay) * 1.0 + right, decay * b + (1 - decay) * 1.0 + n - right
    return a, b


def test_by_difficulty_samples_rows_nearest_to_its_target() -> None:
    """Step by step against the paper's equations."""
    sampler, key = ByDifficulty(0.4, decay=0.7), Key.of(5)
    order = sampler.start(range(10), key)
    counts: dict[int, list[tuple[float, int]]] = {row: [] for row in range(10)}
    for step in range(1, 9):
        betas = np.array([posterior(counts[row], 0.7) for row in range(10)])
        generator = np.random.Generator(np.random.Philox(key=key.derive("by difficulty", step - 1).bits))
        rates = generator.beta(betas[:, 0], betas[:, 1])
        expected = sorted(range(10), key=lambda row: abs(rates[row] - 0.4))[:3]
        sampled = [one.row for one in answer(order, sampler, step, 3)]
        assert sampled == expected
        for row in sampled:
            counts[row].append((row, 10))


def test_pending_rows_are_not_sampled_again() -> None:
    order = start(ByDifficulty(), 10)
    rounds = [{one.row for one in order.next(n)} for n in (4, 3, 3)]
    assert set.union(*rounds) == set(range(10))
    assert len({one.row for one in order.next(10)}) == 10  # all rows are pending, so all are sampled once more
    order.learn(1, {})
    first = {one.row for one in order.next(6)}
    again = start(ByDifficulty(), 10)
    again.seek(json.loads(json.dumps(order.position)))
    assert {one.row for one in again.next(4)} == set(range(10)) - first


@given(st.integers(0, 3), st.lists(st.tuples(st.integers(2, 4), st.integers(0, 3)), min_size=4, max_size=9))
def test_rows_of_later_steps_stay_pending(lag: int, sizes: list[tuple[int, int]]) -> None:
    """Batches are sampled `lag` steps ahead, further rounds of a step after those; a step's first row is masked."""
    order, pending = start(ByDifficulty(), 40), list[set[int]]()
    for step, (batch, more) in enumerate(sizes, start=1):
        while len(pending) <= lag:
            pending.append({one.row for one in order.next(batch)})
        pending[0] |= {one.row for one in order.next(more)}
        assert len(set.union(*pending)) == sum(map(len, pending))
        complete = sorted(pending.pop(0))
        order.learn(step, {row: [0.0, 1.0] for row in complete[1:]})


def test_rows_without_scores_are_sampled_again_after_their_step() -> None:
    order = start(ByDifficulty(), 6)
    first, second = ([one.row for one in order.next(3)] for _ in range(2))
    order.learn(1, {first[0]: [1.0]})
    assert {one.row for one in order.next(3)} == set(first)
    order.learn(2, {second[2]: [1.0]})
    assert {one.row for one in order.next(3)} == set(second)


def test_by_difficulty_converges_to_prompts_near_its_target() -> None:
    sampler = ByDifficulty(0.5, decay=1.0)
    order = start(sampler, 11)
    for step in range(1, 60):
        answer(order, sampler, step, 3)
    late = [one.row for step in range(60, 80) for one in answer(order, sampler, step, 3)]
    assert sum(row in (4, 5, 6) for row in late) > 0.75 * len(late)


def test_scores_outside_worst_and_best_are_clamped() -> None:
    orders = [start(ByDifficulty(worst=-1.0, best=1.0), 2) for _ in range(2)]
    for order, scores in zip(orders, ([-5.0, 0.0, 7.0], [-1.0, 0.0, 1.0]), strict=True):
        order.next(2)
        order.learn(4, {1: scores})
    assert orders[0].position == orders[1].position
    assert orders[0].position["known"]["1"][1:] == [1.0 + 1.5, 1.0 + 1.5] and orders[0].last_scored_step == 4


def test_replay_resamples_hard_rows() -> None:
    order = start(ReplaySampler(share=0.5, below=0.5, above=0.0), 20)
    first = [one.row for one in order.next(4)]
    assert len(set(first)) == 4
    hard, hopeless, easy, other = first
    order.learn(1, {hard: [0.0, 1.0, 0.0], hopeless: [0.0, 0.0], easy: [1.0, 0.0], other: [0.25]})
    second = order.next(4)
    assert [(one.row, one.draw) for one in second[2:]] == [(hard, 1), (other, 1)]
    assert not {one.row for one in second[:2]} & set(first)
    order.learn(2, {hard: [1.0], other: [0.25]})
    third = order.next(4)
    assert [(one.row, one.draw) for one in third if one.draw] == [(other, 2)]
    assert len({one.row for one in third}) == 4


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ByDifficulty(1.5), "target"),
        (lambda: ByDifficulty(decay=0.0), "decay"),
        (lambda: ByDifficulty(worst=1.0, best=1.0), "worst < best"),
        (lambda: ReplaySampler(share=1.0), "share"),
    ],
)
def test_invalid_parameters_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        make()
