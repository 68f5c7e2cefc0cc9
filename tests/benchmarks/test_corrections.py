"""`benchmarks/corrections.py`: only lag and correction differ, no repeated runs, and its tables."""

from __future__ import annotations

import math
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests import ROOT


@pytest.fixture
def corrections(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import corrections

    return corrections


def test_variants_differ_only_in_lag_and_correction(corrections: ModuleType) -> None:
    plain = corrections.graph_of("none", 0)
    for lag in corrections.LAGS:
        for method in corrections.METHODS:
            graph = corrections.graph_of(method, lag)
            assert graph.lag.versions == lag and not graph.check(prompts=corrections.ROWS // corrections.GROUP)
            assert [a.rule for a in graph.allowances() if a.findings] == (["FR006"] if method == "none" and lag else [])
            assert len(graph.allowances()) == (method == "none" and lag > 0)
            changed = plain.diff(graph.edit(lag=0, allow={"FR006": None} if lag and method == "none" else {}))
            assert [*changed.added] == (["correction"] if method in corrections.WEIGHTS else [])
            assert bool(changed) == (method != "none")


def step(**metrics: float) -> dict[str, float]:
    return {"rollout/kl": 0.0, "actor/pg_clipfrac": 0.0, "rollout/logp_diff_max": 0.0, **metrics}


def test_each_point_summarizes_the_steps_since_the_previous_one(corrections: ModuleType) -> None:
    steps = [
        step(),
        step(**{"rollout/kl": 0.2, "rollout/logp_diff_max": math.log(3.0)}),
        step(**{"actor/pg_clipfrac": 0.5}),
        step(**{"rollout/logp_diff_max": math.log(7.0)}),
    ]
    accuracies = [{"step": s, "val/reward/mean": s / 10} for s in (0, 2, 4)]
    first, *others = corrections.points_of(steps, accuracies)
    assert first == {"step": 0, "accuracy": 0.0}
    assert [(point["step"], point["accuracy"]) for point in others] == [(2, 0.2), (4, 0.4)]
    assert [point["largest"] for point in others] == pytest.approx([3.0, 7.0])
    assert [point["rollout/kl"] for point in others] == [0.1, 0.0]
    assert [point["actor/pg_clipfrac"] for point in others] == [0.0, 0.25]


def result(method: str, lag: int, seed: int, *accuracies: float) -> dict[str, Any]:
    why = {"largest": 2.0 + lag + seed, "rollout/kl": lag / 10, "actor/pg_clipfrac": 0.25}
    points: list[dict[str, Any]] = [{"step": 0, "accuracy": accuracies[0]}]
    points += [{"step": 4 * i, "accuracy": x, **why} for i, x in enumerate(accuracies[1:], start=1)]
    return {"method": method, "lag": lag, "settings": {"seed": seed}, "points": points}


RESULTS = [
    result("none", 0, 0, 0.1, 0.8, 0.9),
    result("none", 0, 1, 0.1, 0.5, 0.8),
    result("none", 2, 1, 0.1, 0.7, 0.2),
    result("none", 2, 0, 0.1, 0.85, 0.4),
    result("masked", 2, 0, 0.1, 0.3, 0.6),
]


def test_tables_show_final_accuracy_and_failures(corrections: ModuleType) -> None:
    assert corrections.accuracy_table(RESULTS).splitlines() == [
        "|  | lag 0 | lag 2 |",
        "| --- | --- | --- |",
        "| `none` | 0.750 (0.650 to 0.850) | 0.537 (0.450 to 0.625) |",
        "| `masked` |  | 0.450 (0.450 to 0.450) |",
    ]
    assert corrections.reasons_table(RESULTS).splitlines()[2:] == [
        "| `none` | 0 | 8, never | 0.850 | 0.000 | 0.250 |  |  | 3 |",
        "| `none` | 2 | 4, never | 0.775 | 0.200 | 0.250 |  |  | 5 |",
        "| `masked` | 2 | never | 0.600 | 0.200 | 0.250 |  |  | 4 |",
    ]


def test_finished_runs_are_not_repeated(
    corrections: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[int, int]] = []

    def training(graph: Any, model: Path, data: Path, folder: Path, steps: int, seed: int) -> Any:
        ran.append((graph.lag.versions, seed))
        folder.mkdir()
        points = [{"step": s, "val/reward/mean": s / 20} for s in range(0, steps + 1, corrections.EVERY)]
        return SimpleNamespace(run=lambda: SimpleNamespace(metrics=[step()] * steps, validations=points))

    monkeypatch.setattr(corrections, "training", training)
    monkeypatch.setattr(corrections, "build", lambda folder, seed: folder)
    monkeypatch.setattr(corrections, "write_dataset", lambda folder: None)
    arguments = ["--methods", "none,masked", "--steps", "16", "--folder", str(tmp_path)]
    corrections.main([*arguments, "--lags", "0", "--seeds", "0"])
    assert ran == [(0, 0)] * 2
    corrections.main([*arguments, "--lags", "0,4", "--seeds", "0,1"])
    assert ran == [(0, 0)] * 2 + [(4, 0)] * 2 + [(0, 1)] * 2 + [(4, 1)] * 2
    assert "masked, lag 4, seed 1: 0.000 0.200 0.400 0.600 0.800\n" in capsys.readouterr().out
    svg = (tmp_path / "corrections.svg").read_text()
    assert all(f">{text}</text>" in svg for text in ("lag 0", "lag 4", "none", "masked", "held-out accuracy, sampled"))
    with pytest.raises(SystemExit):
        corrections.main([*arguments, "--methods", "grpo"])
    assert "there is no method 'grpo'; expected some of none, to_rollout" in capsys.readouterr().err
