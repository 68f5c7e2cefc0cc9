"""Early stopping, the best checkpoint, and a length in epochs; resumed runs decide as uninterrupted ones.

Covers also the length and the checkpoints of `flowrl/run/training/loop.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from flowrl import INJECTED, After, Best, EarlyStopping, Metrics, Now, Operator, PromptData, Training, Validation
from flowrl import columns as c
from flowrl.backends import TorchRollout
from flowrl.operators import RolloutCorrection
from flowrl.run.validation.stopping import Value
from tests.run.training.interrupted import Stop, Stopper, checkpoints
from tests.support.errors import raises
from tests.support.jobs import job_of, weights_of
from tests.support.runs import described, lines, train, without_times

CURVE = [0.1, 0.3, 0.7, 0.6, 0.7, 0.5, 0.9, 0.2, 0.2]
"""A metric after 0, 1, 2, ... steps; its best value of the first five steps is that of step 2."""


def curve(values: list[float]) -> list[dict[str, float]]:
    return [{"step": step, "val/curve": value} for step, value in enumerate(values)]


class Curve(Operator):
    """Reports `CURVE`."""

    def __call__(
        self, token_level_scores: c.TokenLevelScores, now: Now = INJECTED, metrics: Metrics = INJECTED
    ) -> c.TokenLevelScores:
        metrics.mean("curve", CURVE[now.step])
        return token_level_scores


class TestDecisions:
    @pytest.mark.parametrize(
        ("given", "ends"),
        [
            ({"patience": 1}, 3),
            ({"patience": 3}, 5),
            ({"patience": 4}, None),
            ({"patience": 2, "min_delta": 0.45}, 4),  # 0.7 improves on 0.1, and nothing on 0.7
            ({"patience": 2, "mode": "min"}, 2),
        ],
    )
    def test_a_run_ends_after_patience_validations_without_an_improvement(self, given: Any, ends: int | None) -> None:
        stopping = EarlyStopping("val/curve", **given)
        decided = [stopping.reason(curve(CURVE[: n + 1])) is not None for n in range(7)]
        assert decided.index(True) == ends if ends is not None else not any(decided)

    def test_values_that_are_not_finite_and_other_metrics_do_not_count(self) -> None:
        worse = [*curve([0.5, float("nan"), 0.4]), {"step": 3, "other/curve": 0.1}]
        assert EarlyStopping("val/curve", patience=2).reason(worse) is None
        assert EarlyStopping("val/curve", patience=1).reason(worse) is not None

    def test_the_best_step_is_the_first_of_equal_ones_among_those_given(self) -> None:
        assert Best("val/curve").of(curve(CURVE), range(6)) == Value(2, 0.7)
        assert Best("val/curve").of(curve(CURVE), range(9)) == Value(6, 0.9)
        assert Best("val/curve", mode="min").of(curve(CURVE), range(1, 9)) == Value(7, 0.2)
        assert Best("val/curve").of([], range(9)) is None


class TestSettings:
    def test_a_length_in_steps_and_epochs_or_a_metric_that_no_validation_has_is_refused(
        self, tiny: str, prompts_file: str
    ) -> None:
        job, data = job_of("grpo", tiny), PromptData(prompts_file)
        held_out = Validation(PromptData(prompts_file), name="held")
        for given, words in (
            ({"steps": 1, "epochs": 1}, "both steps and epochs"),
            ({}, "neither steps nor epochs"),
            ({"steps": 1, "load_best_at_end": True}, "keep_best='val/reward/mean'"),
            ({"steps": 1, "keep_best": "val/reward/mean"}, "there is none; pass validation= and"),
            ({"steps": 1, "validation": held_out, "early_stopping": EarlyStopping("val/loss")}, "'held/reward/mean'"),
        ):
            with raises("parameter.invalid") as caught:
                Training(job, data, prompts=2, **given)
            assert words in caught.value.message


@pytest.mark.runs
class TestRuns:
    def settings(self, data: str, **changed: Any) -> dict[str, Any]:
        validation = Validation(PromptData(data), every=1, insert={"curve": After("reward", Curve())})
        stopping = EarlyStopping("val/curve", patience=3)
        return {"steps": 9, "validation": validation, "early_stopping": stopping, "keep_best": "val/curve"} | changed

    def test_the_best_checkpoint_outlasts_newer_ones_and_its_weights_are_saved(
        self, tiny: str, prompts_file: str, tmp_path: Path
    ) -> None:
        given = self.settings(prompts_file, checkpoint_every=1, max_checkpoints=1)
        job = job_of("grpo", tiny, n=2)
        plain = train(job, prompts_file, tmp_path / "plain", **given)
        assert [line["step"] for line in plain.metrics] == [1, 2, 3, 4, 5]
        assert checkpoints(plain.folder) == ["step-000002", "step-000005"]
        found = described(plain.folder)
        assert found["best"] == {"step": 2, "value": 0.7, "checkpoint": "checkpoints/step-000002"}
        assert "val/curve" in found["ended_early"] and found["status"] == "finished"
        loaded = train(job, prompts_file, tmp_path / "loaded", load_best_at_end=True, **given | {"save_model": True})
        at_two = train(job, prompts_file, tmp_path / "two", steps=2, validation=given["validation"])
        assert_same_weights(loaded, at_two)
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / "loaded" / "actor").state_dict()
        assert all(torch.equal(saved[name], w) for name, w in weights_of(at_two.engines["actor"]).items())

    @pytest.mark.parametrize("lag", [0, 1])
    def test_a_resumed_run_stops_and_keeps_as_an_uninterrupted_one(
        self, lag: int, tiny: str, prompts_file: str, tmp_path: Path
    ) -> None:
        given = self.settings(prompts_file, load_best_at_end=True)
        correction = {"correction": After("whiten", RolloutCorrection("token", "truncate", high=2.0))}
        job = job_of("ppo", tiny).edit(lag=lag, bind={"rollout": TorchRollout(tiny)}, insert=correction)
        whole = train(job, prompts_file, tmp_path / "whole", **given)
        assert checkpoints(whole.folder) == ["step-000001", "step-000002"]
        with pytest.raises(Stop):
            train(job, prompts_file, tmp_path / "cut", [Stopper(3, "update_actor")], **given)
        resumed = train(job, prompts_file, tmp_path / "cut", resume=True, **given)
        again = train(job, prompts_file, tmp_path / "cut", resume=True, **given)  # it is over
        for run in (resumed, again):
            assert checkpoints(run.folder) == checkpoints(whole.folder)
            assert described(run.folder)["best"] == described(whole.folder)["best"]
            first, second = (without_times(lines(one.folder / "metrics.jsonl")) for one in (run, whole))
            assert first == second
            assert_same_weights(run, whole)

    def test_a_metric_that_no_validation_reports_ends_the_run_before_its_first_step(
        self, tiny: str, prompts_file: str, tmp_path: Path
    ) -> None:
        given = self.settings(prompts_file, keep_best="val/curvy")
        with raises("run.validation", missing="val/curvy"):
            train(job_of("grpo", tiny, n=2), prompts_file, tmp_path / "run", **given)

    def test_epochs_are_as_many_steps_as_draw_every_row_that_often(
        self, tiny: str, prompts_file: str, tmp_path: Path
    ) -> None:
        """12 prompts in batches of 5: 24 draws take 5 steps."""
        job, given = job_of("grpo", tiny, n=2), {"steps": None, "prompts": 5, "checkpoint_every": 1}
        run = train(job, prompts_file, tmp_path / "two", epochs=2, **given)
        assert len(run.metrics) == 5
        recorded = described(run.folder)["training"]
        assert (recorded["steps"], recorded["epochs"]) == (5, 2)
        with raises("resume.fewer-steps", found=5, steps=3):
            train(job, prompts_file, tmp_path / "two", epochs=1, resume=True, **given)


def assert_same_weights(a: Any, b: Any) -> None:
    first, second = (weights_of(run.engines["actor"]) for run in (a, b))
    assert all(torch.equal(first[name], second[name]) for name in first)
