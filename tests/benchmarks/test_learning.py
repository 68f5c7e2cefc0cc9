"""`benchmarks/learning.py`: equal budgets for all methods, no repeated runs, and reproducible plots."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from benchmarks.harness.curves import PANELS, accuracy_table, draw
from flowrl.core.graphs.gate import Gate
from tests import ROOT


@pytest.fixture
def learning(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import learning

    return learning


def test_every_method_has_the_same_sample_and_optimizer_step_budget(learning: ModuleType) -> None:
    """As many answers a step, and as many optimizer steps out of those of them that it trains on."""
    graphs = learning.methods()
    assert {name for names in PANELS.values() for name in names} == set(graphs)
    for name, graph in graphs.items():
        prompts = learning.ROWS // graph["repeat"].rows_factor
        assert not graph.check(prompts=prompts), name
        trained = [node.operator.target_groups for node in graph.nodes.values() if isinstance(node.operator, Gate)] or [
            prompts
        ]
        rows = trained[-1] * graph["repeat"].rows_factor
        assert rows // graph["update_actor"].operator.mini_batch == learning.ROWS // learning.MINI_BATCH, name
        assert graph["update_actor"].operator.ppo_epochs == 1, name


def test_each_ablation_changes_only_what_its_name_says(learning: ModuleType) -> None:
    graphs = learning.methods()
    whole = graphs["dapo"]
    assert whole.diff(graphs["dapo_without_dynamic_sampling"]).removed == ("collect",)
    changed = [str(whole.diff(graphs[f"dapo_without_{part}"])) for part in ("clip_higher", "token_mean")]
    assert [re.findall(r"^[~+-] (\S+):", text, re.MULTILINE) for text in changed] == [
        ["update_actor.loss.clip_high"],
        ["update_actor.aggregation"],
    ]


class Ran:
    """A fake training that counts its runs and improves by a tenth with every validation."""

    def __init__(self) -> None:
        self.runs: list[tuple[str, int, int]] = []

    def __call__(self, graph: Any, model: Path, data: Path, folder: Path, steps: int, seed: int) -> Any:
        self.runs.append((graph.name, steps, seed))
        folder.mkdir()
        keys = ("val/reward/mean", "val/reward/thinks", "val/response_length/mean")
        points = [{"step": s, **dict.fromkeys(keys, 0.1 + s / 80 + seed / 100)} for s in range(0, steps + 1, 8)]
        metrics = [{"collect/offered": 40.0} if "collect" in graph.nodes else {}] * steps
        return SimpleNamespace(run=lambda: SimpleNamespace(metrics=metrics, validations=points))


@pytest.fixture
def ran(learning: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Ran:
    ran = Ran()
    monkeypatch.setattr(learning, "training", ran)
    monkeypatch.setattr(learning, "build", lambda folder, seed, **start: folder)
    monkeypatch.setattr(learning, "write_dataset", lambda folder, digits: None)
    return ran


def test_finished_runs_are_not_repeated(
    learning: ModuleType, ran: Ran, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*arguments: str) -> list[tuple[str, int, int]]:
        before = len(ran.runs)
        learning.main([*arguments, "--folder", str(tmp_path)])
        return ran.runs[before:]

    tmp_path.joinpath("running").mkdir()  # of a run that was killed
    assert run("--methods", "grpo,dapo", "--seeds", "0", "--steps", "16") == [("grpo", 16, 0), ("dapo", 16, 0)]
    assert json.loads((tmp_path / "dapo-0.json").read_text())["points"][-1]["answers"] == 16 * 40 * 8
    assert run("--methods", "grpo,dapo", "--seeds", "0,1", "--steps", "16") == [("grpo", 16, 1), ("dapo", 16, 1)]
    assert run("--methods", "grpo", "--seeds", "1", "--steps", "8") == []  # a longer one began like this
    assert "grpo, seed 1: 0.110 0.210\n" in capsys.readouterr().out
    assert run("--methods", "grpo", "--seeds", "1", "--steps", "24") == [("grpo", 24, 1)]
    monkeypatch.setattr(learning, "LEARNING_RATE", 1e-3)
    assert run("--methods", "grpo", "--seeds", "1", "--steps", "24") == [("grpo", 24, 1)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "grpo,dpo"], "there is no method 'dpo'; expected some of ppo, "),
        (["--steps", "20"], "--steps 20 does not end with a validation; expected a multiple of 8."),
        (["--steps", "0"], "--steps 0 does not end with a validation"),
    ],
)
def test_invalid_arguments_are_refused(
    learning: ModuleType, ran: Ran, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        learning.main(arguments)
    assert message in capsys.readouterr().err and not ran.runs


def result(method: str, seed: int, *accuracies: float) -> dict[str, Any]:
    points = [{"step": 8 * i, "answers": 2048 * i, "accuracy": value} for i, value in enumerate(accuracies)]
    return {"method": method, "settings": {"seed": seed}, "points": points}


RESULTS = [
    result("grpo", 0, 0.0, 0.2, 0.5, 0.6),
    result("grpo", 1, 0.1, 0.3, 0.6, 0.7),
    result("rloo", 1, 0.1, 0.4, 0.5, 0.9),
    result("rloo", 0, 0.0, 0.2, 0.3, 0.5),
]


def test_differences_are_paired_by_seed() -> None:
    assert accuracy_table(RESULTS, against="grpo").splitlines()[2:] == [
        "| `grpo` | 0.550 (0.500 to 0.600) | 0.650 (0.600 to 0.700) |  | 6,144 |",
        "| `rloo` | 0.400 (0.300 to 0.500) | 0.700 (0.500 to 0.900) | +0.050 (-0.100 to +0.200) | 6,144 |",
    ]


def test_the_plot_is_labeled_and_reproducible(tmp_path: Path) -> None:
    draw(RESULTS, tmp_path / "a.svg", against="grpo")
    draw(RESULTS, tmp_path / "b.svg", against="grpo")
    drawn = (tmp_path / "a.svg").read_text()
    assert drawn == (tmp_path / "b.svg").read_text()
    shown = (
        "baselines and advantages",
        "losses",
        "grpo",
        "rloo",
        "difference to grpo",
        "answers sampled, in thousands",
    )
    assert all(f">{text}</text>" in drawn for text in shown)
