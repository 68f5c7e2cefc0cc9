"""The trials of a sweep: axes, a grid, sampled ranges, and a study that continues as one that was not ended.

Covers also `flowrl/app/sweep/axes.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from flowrl.app.sweep.axes import Axis, Choices, Range, axes_of, grid
from flowrl.app.sweep.study import Study, Trial
from tests.run.settings.test_changes import TRAINING
from tests.support.errors import raises

LR, N = "actor.optimizer.lr", "repeat.n"
GRID = [Choices(LR, ("1e-6", "3e-6")), Choices(N, ("2", "4"))]
RANGES = [Range(LR, 1e-7, 1e-5, True, False), Range(N, 2, 8, False, True)]
POINTS = [{LR: lr, N: n} for lr in ("1e-6", "3e-6") for n in ("2", "4")]


def study(folder: Path, axes: Sequence[Axis] = GRID, total: int | None = None, **described: object) -> Study:
    return Study(folder, axes, total, maximize=True, seed=0, described={"seeds": 1, **described})


def run(one: Study, count: int = 100) -> list[Trial]:
    """Finish some trials; one more remains running, as in a sweep that is killed."""
    found = []
    for trial in one.pending():
        if len(found) == count:
            break
        one.tell(trial, float(trial.number))
        found.append(trial)
    return found


class TestAxes:
    def test_lists_and_ranges_vary_and_single_values_are_fixed(self) -> None:
        fixed, axes = axes_of(TRAINING, {LR: "1e-6,3e-6", "seed": "3", N: "log:2..8", "generate.temperature": "0.5..1"})
        assert fixed == {"seed": "3"}
        assert axes == [
            Choices(LR, ("1e-6", "3e-6")),
            Range(N, 2.0, 8.0, log=True, integer=True),
            Range("generate.temperature", 0.5, 1.0, log=False, integer=False),
        ]
        assert axes[1].texts == ("2", "8") and axes[2].texts == ("0.5", "1.0")

    def test_commas_in_brackets_and_quotes_belong_to_a_value(self) -> None:
        _, axes = axes_of(TRAINING, {"actor.optimizer.betas": "(0.9, 0.95), (0.9, 0.99)", "generate.stop": "('a,b',)"})
        assert axes == [Choices("actor.optimizer.betas", ("(0.9, 0.95)", "(0.9, 0.99)"))]

    def test_a_grid_has_all_combinations_and_a_range_has_none(self) -> None:
        assert grid(GRID) == POINTS and grid([]) == [{}] and grid(RANGES) is None

    @pytest.mark.parametrize(
        ("path", "text", "code", "words"),
        [
            ("actor.lr", "1,2", "parameter.unknown", "did you mean actor.optimizer.lr?"),
            (LR, "1e-6,abc", "parameter.invalid", "lr='abc'"),
            (LR, "1e-6,1e-6", "cli.bad-option", "twice"),
            (LR, "1..0.5", "cli.bad-option", "smaller"),
            (N, "log:0..8", "parameter.invalid", "n=0"),
            ("generate.temperature", "log:0..1", "cli.bad-option", "logarithm"),
            (N, "2..4.5", "cli.bad-option", "integers"),
        ],
    )
    def test_what_the_training_cannot_have_is_refused(self, path: str, text: str, code: str, words: str) -> None:
        with raises(code) as caught:
            axes_of(TRAINING, {path: text})
        assert words in caught.value.message


class TestStudy:
    def test_a_grid_runs_each_point_once(self, tmp_path: Path) -> None:
        trials = run(study(tmp_path))
        assert [trial.settings for trial in trials] == POINTS
        again = study(tmp_path)
        assert run(again) == []
        assert [(trial.state, trial.value) for trial in again.trials()] == [("finished", float(i)) for i in range(4)]

    @pytest.mark.parametrize(("axes", "total"), [(GRID, None), (RANGES, 5)])
    def test_a_killed_study_continues_with_the_same_trials(
        self, axes: Sequence[Axis], total: int | None, tmp_path: Path
    ) -> None:
        whole = run(study(tmp_path / "whole", axes, total))
        first = run(study(tmp_path / "cut", axes, total), 2)
        rest = run(study(tmp_path / "cut", axes, total))
        assert [trial.number for trial in (*first, *rest)] == list(range(len(whole)))
        assert [trial.settings for trial in (*first, *rest)] == [trial.settings for trial in whole]

    def test_sampled_numbers_are_in_their_ranges(self, tmp_path: Path) -> None:
        for trial in run(study(tmp_path, RANGES, 8)):
            assert 1e-7 <= float(trial.settings[LR]) <= 1e-5 and 2 <= int(trial.settings[N]) <= 8

    def test_a_failed_trial_is_not_repeated_and_more_trials_may_follow(self, tmp_path: Path) -> None:
        one = study(tmp_path, RANGES, 2)
        one.fail(next(one.pending()))
        run(one)
        more = study(tmp_path, RANGES, 3)
        assert [trial.number for trial in run(more)] == [2]
        assert [trial.state for trial in more.trials()] == ["failed", "finished", "finished"]

    def test_no_axis_is_a_single_trial(self, tmp_path: Path) -> None:
        assert [trial.settings for trial in run(study(tmp_path, []))] == [{}]
        assert run(study(tmp_path, [])) == []

    def test_another_sweep_in_the_folder_and_a_wrong_number_of_trials_are_refused(self, tmp_path: Path) -> None:
        study(tmp_path)
        with raises("sweep.other-sweep", changed="metric"):
            study(tmp_path, metric="val/reward/mean")
        for axes, total in ((RANGES, None), (GRID, 3)):
            with raises("cli.bad-option", option="--trials"):
                study(tmp_path / "other", axes, total)
        assert not (tmp_path / "other").exists()
