"""Runs side by side: `compare.py`, `comparison.py`, `paired.py`; rows of a metric: `flowrl/look/rows/blame.py`."""

from __future__ import annotations

import json
import shutil
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import flowrl
from flowrl import PromptData, Validation
from flowrl.backends import SGD
from flowrl.look.comparing.compare import compare
from flowrl.look.comparing.paired import sign_test
from tests.support.errors import raises
from tests.support.jobs import job_of
from tests.support.runs import train


@pytest.fixture(scope="module")
def runs(tiny: str, prompts_file: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two seeds of GRPO, and one run with another learning rate."""
    folder = tmp_path_factory.mktemp("runs")
    validation = Validation(PromptData(prompts_file), every=3, changes={"repeat.n": 1})
    for name, seed, lr in (("a-0", 0, 1e-2), ("a-1", 1, 1e-2), ("b-0", 0, 1.0)):
        job = job_of("grpo", tiny, optimizer=SGD(lr=lr))
        train(job, prompts_file, folder / name, validation=validation, seed=seed)
    return folder


def edited(folder: Path, name: str, to: Path, metrics: Mapping[str, float]) -> Path:
    """A copy of a run with other metrics in its last step."""
    shutil.copytree(folder / name, to)
    lines = [json.loads(line) for line in (to / "metrics.jsonl").read_text().splitlines()]
    lines = [line | metrics if line.get("step") == 3 and "timing/step" in line else line for line in lines]
    (to / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return to


class TestSides:
    def test_seeds_of_one_configuration_are_one_side_and_what_differs_is_named(self, runs: Path) -> None:
        found = compare([str(runs / "a-*"), str(runs / "b-*")])
        assert [[run.name for run in side.runs] for side in found.sides] == [["a-0", "a-1"], ["b-0"]]
        assert found.differences == {"actor.optimizer.lr": (0.01, 1.0)}
        assert found.graphs is not None and "lr" in str(found.graphs)

    def test_a_curve_is_a_band_over_the_seeds(self, runs: Path) -> None:
        points = compare([str(runs / "*")]).curves("reward/mean", "tokens").to_pylist()
        values = [flowrl.open(runs / name).metrics["reward/mean"].to_pylist() for name in ("a-0", "a-1")]
        first = points[0]
        assert (first["side"], first["step"], first["runs"]) == ("A", 1, 2)
        assert (first["low"], first["high"]) == (min(v[0] for v in values), max(v[0] for v in values))
        assert [p["tokens"] for p in points[:3]] == sorted(p["tokens"] for p in points[:3])
        assert len(points) == 6

    def test_the_basis_says_what_so_many_runs_can_tell(self, runs: Path, tmp_path: Path) -> None:
        assert "two checkpoints, not two methods" in compare([runs / "a-0", runs / "b-0"]).basis
        assert "same configuration" in compare([runs / "a-0", runs / "a-1"]).basis
        assert compare([runs / "a-0", runs / "b-0"]).interval("reward/mean") is None

    def test_three_seeds_a_side_give_the_interval_of_welch(self, runs: Path, tmp_path: Path) -> None:
        sides = {"a-0": [0.1, 0.2, 0.3], "b-0": [0.5, 0.9, 1.0]}
        paths = [
            edited(runs, name, tmp_path / f"{name}-{value}", {"reward/mean": value, "kl/ref": 0.0})
            for name, values in sides.items()
            for value in values
        ]
        finals = [
            [statistics.fmean(flowrl.open(p).metrics["reward/mean"].to_pylist()) for p in some]
            for some in (paths[:3], paths[3:])
        ]
        change, low, high = compare(paths).interval("reward/mean") or (0, 0, 0)
        errors = [statistics.variance(values) / 3 for values in finals]
        freedom = sum(errors) ** 2 / sum(error**2 / 2 for error in errors)
        quantile = {2: 4.303, 3: 3.182, 4: 2.776}[int(freedom)]  # of Student's t, from a table
        assert change == pytest.approx(statistics.fmean(finals[1]) - statistics.fmean(finals[0]))
        assert (high - low) / 2 == pytest.approx(quantile * sum(errors) ** 0.5)

    def test_folders_without_runs_are_refused(self, tmp_path: Path) -> None:
        for pattern in (str(tmp_path / "x-*"), str(tmp_path / "x")):
            with raises("look.no-run"):
                compare([pattern])


class TestPairs:
    def test_held_out_responses_are_paired_by_prompt(self, runs: Path, tmp_path: Path) -> None:
        shutil.copytree(runs / "a-0", tmp_path / "a")
        rows = flowrl.open(runs / "b-0").predictions
        scores = [0.0, 1.0, *[row["score"] for row in rows if row["step"] == 3][2:]]
        self.write(runs, tmp_path / "b", "b-0", scores, rows)
        self.write(runs, tmp_path / "a2", "a-0", [1.0, 0.0, *[0.25] * 10], flowrl.open(runs / "a-0").predictions)
        found = compare([tmp_path / "a2", tmp_path / "b"]).held_out
        assert found is not None and found.steps == (3, 3) and len(found.pairs) == 12 and found.alone == 0
        expected = list(zip([1.0, 0.0, *[0.25] * 10], scores, strict=True))
        assert found.better == sum(after > before for before, after in expected)
        assert found.worse == sum(after < before for before, after in expected)
        assert found.better + found.worse + found.equal == 12
        assert {(p.before, p.after) for p in found.changed} >= {(1.0, 0.0), (0.0, 1.0)}

    def write(self, runs: Path, to: Path, name: str, scores: Sequence[float], rows: Sequence[Any]) -> None:
        """A copy of a run whose newest held-out responses have these scores."""
        shutil.copytree(runs / name, to)
        newest = [row for row in rows if row["step"] == 3]
        lines = [{**row, "score": score} for row, score in zip(newest, scores, strict=True)]
        (to / "predictions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def test_the_sign_test_is_the_exact_binomial(self) -> None:
        assert sign_test(0, 0) == 1.0 and sign_test(5, 5) == 1.0
        assert sign_test(9, 1) == pytest.approx(2 * (1 + 10) / 2**10)
        assert sign_test(1, 9) == sign_test(9, 1)


class TestBlame:
    def test_shares_add_up_to_the_metric_and_its_change(self, runs: Path) -> None:
        run = flowrl.open(runs / "b-0")
        kl = dict(zip(run.steps, run.metrics["kl/ref"].to_pylist(), strict=True))
        whole, change = run.blame("kl/ref", 3), run.blame("kl/ref", 3, against=2)
        tokens = dict(zip(run.rows(3)["row_id"].to_pylist(), run.rows(3)["response_tokens"].to_pylist(), strict=True))
        rows = whole.rows.to_pylist()
        total = sum(tokens.values())
        mean = sum(row["value"] * tokens[row["row_id"]] for row in rows) / total
        assert mean == pytest.approx(kl[3], rel=1e-4) and whole.value == kl[3]
        for row in rows[:4]:
            assert row["share"] == pytest.approx(row["value"] * tokens[row["row_id"]] / total / mean, rel=1e-4)
        for found in (whole, change):
            shares = found.rows["share"].to_pylist()
            assert sum(shares) == pytest.approx(1.0) and shares == sorted(shares, reverse=True)
            assert sum(shares[: found.half]) >= 0.5 > sum(shares[: found.half - 1])
        assert change.before == kl[2] and "tokens" in change.basis

    def test_what_no_column_holds_is_refused_with_the_metrics_that_can_be_asked(self, runs: Path) -> None:
        run = flowrl.open(runs / "a-0")
        with raises("look.invalid-query", argument="metric", found="sync/bytes"):
            run.blame("sync/bytes", 2)
        with raises("look.not-recorded", step=9):
            run.blame("kl/ref", 2, against=9)
