"""The probe: its prompts, and the comparison of scores of engine and trainer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from flowrl.backends import TorchTrainer
from flowrl.data.text.tokenizer import ChatTokenizer
from flowrl.run.engine.build import EngineBuilder
from flowrl.sync.probe import (
    QUESTIONS,
    RESPONSE_TOKENS,
    Probe,
    Scores,
    compute_dtype,
    default_tolerance,
    questions,
    refuse_old_weights,
    refuse_other_weights,
    resolution,
)
from tests.support.errors import raises
from tests.support.models import char_tokenizer

PROBE = Probe([[5, 6, 7], [8]], [[1, 2, 3, 4], [5, 6, 7, 8]])
COUNT = 8
FINE, COARSE = torch.float32, torch.bfloat16


def scores(engine: float, trainer: float) -> Scores:
    """Scores whose log-probs differ from -3 by these amounts."""
    return Scores((-3.0 + engine,) * COUNT, (-3.0 + trainer,) * COUNT)


class Fixed:
    """A trainer with fixed log-probs."""

    def __init__(self, log_probs: Tensor) -> None:
        self.given = log_probs

    def log_probs(self, batch: object) -> Tensor:
        return self.given.view(2, 4)


class CoarseFixed(Fixed):
    """A trainer that computes in bfloat16."""

    compute_dtype = COARSE


def compared(found: Tensor, source: Fixed, tolerance: float | None = 0.02, dtype: torch.dtype = FINE) -> Scores:
    return refuse_other_weights("X", found.tolist(), dtype, PROBE, source, tolerance)


class TestQuestions:
    @pytest.mark.parametrize(("longest", "width"), [(17, 8), (31, 15), (40, RESPONSE_TOKENS), (4096, RESPONSE_TOKENS)])
    def test_probe_prompts_and_responses_fit_the_model(self, tiny: str, longest: int, width: int) -> None:
        tokenizer = ChatTokenizer(tiny)
        prompts, sampling = questions(tokenizer, longest)
        assert (sampling.max_new_tokens, sampling.temperature, sampling.ignore_eos) == (width, 1.0, True)
        whole = [tokenizer.prompt_ids([{"role": "user", "content": question}]) for question in QUESTIONS]
        assert prompts == [ids[-(longest - width - 5) :] for ids in whole]
        assert all(1 <= len(ids) <= longest - width - 5 for ids in prompts)

    def test_without_a_chat_template_probe_prompts_are_plain_text(self, tmp_path: Path) -> None:
        plain = char_tokenizer()
        plain.chat_template = None
        plain.save_pretrained(tmp_path)
        tokenizer = ChatTokenizer(str(tmp_path))
        assert questions(tokenizer, 200)[0] == [tokenizer.encode(question) for question in QUESTIONS]


class TestBatch:
    def test_prompts_are_padded_on_the_left(self) -> None:
        batch = PROBE.batch()
        assert batch.input_ids.tolist() == [[5, 6, 7, 1, 2, 3, 4], [0, 0, 8, 5, 6, 7, 8]]
        assert batch.attention_mask.long().tolist() == [[1] * 7, [0, 0, 1, 1, 1, 1, 1]]
        assert batch.position_ids[1, 2:].tolist() == [0, 1, 2, 3, 4]
        assert batch.response_mask.all() and batch.response_mask.shape == (2, 4)
        assert PROBE.rows == [[5, 6, 7, 1, 2, 3, 4], [8, 5, 6, 7, 8]]

    def test_a_trainer_scores_the_responses_row_by_row(self, tiny: str) -> None:
        trainer = TorchTrainer(tiny, device="cpu").build(EngineBuilder({}, seed=0))
        expected = []
        for row in PROBE.rows:
            log_probs = trainer.model(torch.tensor([row])).logits[0].detach().double().log_softmax(-1)
            expected += [float(log_probs[t - 1, row[t]]) for t in range(len(row) - 4, len(row))]
        assert PROBE.score(trainer) == pytest.approx(expected, abs=1e-5)


class TestOtherWeights:
    def test_scores_within_the_tolerance_are_accepted_and_returned(self) -> None:
        expected = torch.linspace(-1, 0, COUNT)
        found = compared(expected + 0.01, Fixed(expected))
        assert found.trainer == pytest.approx(expected.tolist())
        assert found.engine == pytest.approx((expected + 0.01).tolist())

    @pytest.mark.parametrize("off", [0.03, -0.03, float("nan")])
    def test_scores_beyond_the_tolerance_are_refused(self, off: float) -> None:
        expected = torch.linspace(-1, 0, COUNT)
        with raises("sync.scores-differ", engine="X", dtypes=("float32", "float32")):
            compared(expected + off, Fixed(expected))

    def test_errors_that_cancel_are_detected(self) -> None:
        expected = torch.full((COUNT,), -0.5)
        off = torch.tensor([0.3, -0.3] * (COUNT // 2))
        with raises("sync.scores-differ") as caught:
            compared(expected + off, Fixed(expected))
        assert [caught.value.facts[name] for name in ("mean", "maximum", "found")] == pytest.approx([0.3] * 3)

    def test_differences_of_unlikely_tokens_are_relative(self) -> None:
        """A difference of 0.1 counts as 0.1 at -0.5, and as 0.01 at -10; the mean of both is 0.055."""
        expected = torch.tensor([-0.5, -10.0] * (COUNT // 2))
        compared(expected + 0.1, Fixed(expected), 0.0551)
        with raises("sync.scores-differ", expected=0.0549):
            compared(expected + 0.1, Fixed(expected), 0.0549)

    def test_the_tolerance_depends_on_both_dtypes(self) -> None:
        expected = torch.full((COUNT,), -0.5)
        fine, coarse = Fixed(expected), CoarseFixed(expected)
        assert (compute_dtype(fine), compute_dtype(coarse)) == (FINE, COARSE)
        with raises("sync.scores-differ", expected=0.001):
            compared(expected + 0.01, fine, None)
        for source, dtype in ((fine, COARSE), (coarse, FINE), (coarse, COARSE), (fine, torch.float16)):
            compared(expected + 0.01, source, None, dtype)
        with raises("sync.scores-differ", dtypes=("bfloat16", "float32"), expected=0.05):
            compared(expected + 0.06, fine, None, COARSE)
        compared(expected + 0.06, fine, 0.07, COARSE)


class TestOldWeights:
    def test_the_first_scores_are_accepted(self) -> None:
        assert refuse_old_weights("X", scores(0, 0), None, 0.02) == scores(0, 0)

    def test_an_engine_whose_scores_change_is_accepted(self) -> None:
        before = scores(0, 0)
        for engine, trainer in ((1e-7, 5.0), (5.0, 0.0), (1e-3, 1e-3)):
            assert refuse_old_weights("X", scores(engine, trainer), before, 0.02) == scores(engine, trainer)

    def test_an_update_below_the_resolution_is_accepted(self) -> None:
        assert refuse_old_weights("X", scores(0, 0.019), scores(0, 0), 0.02) == scores(0, 0)

    def test_unchanged_scores_after_a_visible_update_are_refused(self) -> None:
        with raises("sync.old-weights", engine="X", followed=0.0, moved=pytest.approx(0.03)):
            refuse_old_weights("X", scores(0, 0.03), scores(0, 0), 0.02)

    def test_small_updates_add_up(self) -> None:
        previous: Scores | None = None
        for step in range(5):
            previous = refuse_old_weights("X", scores(0, 0.0049 * step), previous, 0.02)
        with raises("sync.old-weights", engine="X"):
            refuse_old_weights("X", scores(0, 0.0049 * 5), previous, 0.02)

    def test_accumulated_updates_reset_when_the_engine_changes(self) -> None:
        previous = refuse_old_weights("X", scores(0, 0), None, 0.02)
        previous = refuse_old_weights("X", scores(0, 0.015), previous, 0.02)
        previous = refuse_old_weights("X", scores(0.015, 0.018), previous, 0.02)
        assert refuse_old_weights("X", scores(0.015, 0.03), previous, 0.02) == scores(0.015, 0.018)

    @pytest.mark.parametrize("first", [True, False])
    def test_rounding_by_concurrent_requests_is_not_a_change_of_scores(self, first: bool) -> None:
        """Whether these or the previous scores were computed with concurrent requests."""
        before = scores(0, 0)._replace(concurrent=first)
        now = scores(0.0029, 0.03)._replace(concurrent=not first)
        with raises("sync.old-weights", followed=pytest.approx(0.0029)):
            refuse_old_weights("X", now, before, 0.02)
        assert refuse_old_weights("X", now, before, 0.04) == before
        followed = scores(0.0031, 0.03)._replace(concurrent=not first)
        assert refuse_old_weights("X", followed, before, 0.02) == followed

    @pytest.mark.parametrize("sign", [1, -1])
    def test_a_change_of_one_token_is_averaged_over_all_tokens(self, sign: int) -> None:
        trainer = (-3.0 + sign, *scores(0, 0).trainer[1:])  # changes the mean by 1/8
        moved = scores(0, 0)._replace(trainer=trainer)
        assert refuse_old_weights("X", moved, scores(0, 0), 0.13) == scores(0, 0)
        with raises("sync.old-weights", moved=0.125):
            refuse_old_weights("X", moved, scores(0, 0), 0.12)

    def test_changes_that_cancel_are_detected(self) -> None:
        trainer = tuple(-3.0 + (0.1 if i % 2 else -0.1) for i in range(COUNT))
        with raises("sync.old-weights", moved=pytest.approx(0.1)):
            refuse_old_weights("X", scores(0, 0)._replace(trainer=trainer), scores(0, 0), 0.02)

    def test_the_resolution_depends_on_both_dtypes(self) -> None:
        assert resolution(FINE, FINE, None) == pytest.approx(1e-5)
        assert resolution(FINE, FINE, 0.1) == pytest.approx(1e-3)
        for dtype, trainer in ((COARSE, FINE), (FINE, COARSE), (COARSE, COARSE)):
            assert resolution(dtype, trainer, None) == pytest.approx(0.02)
            assert resolution(dtype, trainer, 0.5) == pytest.approx(0.1)


def test_default_tolerances_by_dtype() -> None:
    assert default_tolerance(FINE, FINE) == 1e-3
    assert default_tolerance(COARSE, FINE) == default_tolerance(FINE, COARSE) == 0.05
