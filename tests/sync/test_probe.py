"""The probe by itself: what it makes of scores, whoever they are from."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flowrl.errors import SyncError
from flowrl.sync.probe import TOKENS, Scores, probe, refuse_old_weights, refuse_other_weights

COUNT = len(TOKENS) - 1


def scores(engine: float, trainer: float) -> Scores:
    """With log-probs that differ from -3 by so much."""
    return Scores((-3.0 + engine,) * COUNT, (-3.0 + trainer,) * COUNT)


class Fixed:
    """A trainer that gives these log-probs."""

    def __init__(self, log_probs: Tensor) -> None:
        self.given = log_probs

    def log_probs(self, batch: object) -> Tensor:
        return self.given[None]


class TestOtherWeights:
    def test_what_is_near_is_taken_and_told(self) -> None:
        expected = torch.linspace(-4, -1, COUNT)
        found = refuse_other_weights("X", (expected + 0.01).tolist(), Fixed(expected), 0.02)
        assert found.trainer == pytest.approx(expected.tolist())
        assert found.engine == pytest.approx((expected + 0.01).tolist())

    @pytest.mark.parametrize("off", [0.03, float("nan")])
    def test_what_is_not_is_refused(self, off: float) -> None:
        expected = torch.linspace(-4, -1, COUNT)
        with pytest.raises(SyncError, match="X and the trainer score the same 15 tokens differently"):
            refuse_other_weights("X", (expected + off).tolist(), Fixed(expected), 0.02)

    def test_its_tokens_are_one_sequence(self) -> None:
        assert probe().input_ids.tolist() == [list(TOKENS)]
        assert probe().response_mask.shape == (1, COUNT)


class TestOldWeights:
    def test_at_first_there_is_nothing_to_hold_them_against(self) -> None:
        assert refuse_old_weights("X", scores(0, 0), None, 0.02) == scores(0, 0)

    def test_who_moves_is_taken_however_little_or_much(self) -> None:
        before = scores(0, 0)
        for engine, trainer in ((1e-7, 5.0), (5.0, 0.0), (1e-3, 1e-3)):
            assert refuse_old_weights("X", scores(engine, trainer), before, 0.02) == scores(engine, trainer)

    def test_an_update_that_a_coarse_engine_cannot_show_is_taken(self) -> None:
        assert refuse_old_weights("X", scores(0, 0.019), scores(0, 0), 0.02) == scores(0, 0)

    def test_one_that_it_must_show_is_refused(self) -> None:
        with pytest.raises(SyncError, match=r"X scores 15 tokens exactly as it did before, .* moved by 0\.03 nats"):
            refuse_old_weights("X", scores(0, 0.03), scores(0, 0), 0.02)

    def test_small_updates_add_up(self) -> None:
        held: Scores | None = None
        for step in range(5):
            held = refuse_old_weights("X", scores(0, 0.0049 * step), held, 0.02)
        with pytest.raises(SyncError, match="keeps old weights"):
            refuse_old_weights("X", scores(0, 0.0049 * 5), held, 0.02)

    def test_of_an_engine_that_moves_again_they_are_counted_anew(self) -> None:
        held = refuse_old_weights("X", scores(0, 0), None, 0.02)
        held = refuse_old_weights("X", scores(0, 0.015), held, 0.02)
        held = refuse_old_weights("X", scores(0.015, 0.018), held, 0.02)
        assert refuse_old_weights("X", scores(0.015, 0.03), held, 0.02) == scores(0.015, 0.018)

    def test_tokens_of_which_one_moves_count_as_the_mean(self) -> None:
        trainer = (-2.0, *scores(0, 0).trainer[1:])  # by 1/15 on the mean
        moved = scores(0, 0)._replace(trainer=trainer)
        assert refuse_old_weights("X", moved, scores(0, 0), 0.07) == scores(0, 0)
        with pytest.raises(SyncError, match=r"by 0\.0667 nats"):
            refuse_old_weights("X", moved, scores(0, 0), 0.06)
