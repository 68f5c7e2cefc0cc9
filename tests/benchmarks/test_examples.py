"""`benchmarks/examples.py`: the page shows the stored results, which are those of the runs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests import ROOT

KEPT = sorted((ROOT / "docs" / "curves").glob("*.json"))
SEEDS = {"cartpole": "01234", "engines": "0", "smollm2 shuffled rewards": "0"}
"""Of each arm, or of one, where it is not three."""


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import examples

    return examples


@pytest.mark.parametrize("stored", KEPT, ids=lambda kept: kept.stem)
def test_the_page_shows_the_stored_results_of_three_seeds(stored: Path, examples: ModuleType) -> None:
    curve = json.loads(stored.read_text(encoding="utf-8"))
    assert (ROOT / "examples" / curve["example"]).is_file()
    for name, arm in curve["arms"].items():
        assert "".join(arm["seeds"]) == SEEDS.get(f"{stored.stem} {name}", SEEDS.get(stored.stem, "012"))
    page = (ROOT / "docs" / curve["page"]).read_text(encoding="utf-8")
    assert f"<!-- {stored.stem} -->\n\n{examples.table(curve)}\n" in page
    assert f"](../curves/{stored.stem}.svg)" in page


@pytest.mark.parametrize("stored", KEPT, ids=lambda kept: kept.stem)
def test_plots_show_the_stored_results(stored: Path, examples: ModuleType, tmp_path: Path) -> None:
    """Lines and texts; exact positions depend on fonts and on matplotlib."""
    curve = json.loads(stored.read_text(encoding="utf-8"))
    examples.draw(curve, tmp_path / "drawn.svg")
    svg, there = ((tmp_path / "drawn.svg").read_text(), stored.with_suffix(".svg").read_text(encoding="utf-8"))
    texts = re.compile(r"<text[^>]*>([^<]*)</text>")
    assert texts.findall(svg) == texts.findall(there)


def runs(name: str, arm: str = "") -> dict[str, list[dict[str, float]]]:
    """What is kept of the runs of an example, by seed."""
    curve = json.loads((ROOT / "docs" / "curves" / f"{name}.json").read_text(encoding="utf-8"))
    found: dict[str, list[dict[str, float]]] = curve["arms"][arm]["seeds"]
    return found


def ends(name: str, key: str, arm: str = "") -> list[tuple[float, float]]:
    """A number that is shown of an example, before the first step and after the last, by seed."""
    return [(points[0][key], points[-1][key]) for points in runs(name, arm).values()]


def test_claims_of_the_page_match_the_stored_results() -> None:
    """That the policy beats simple heuristics is tested with the example."""
    page = (ROOT / "docs" / "evidence" / "examples.md").read_text(encoding="utf-8")
    assert all(before < 0.36 and after >= 0.95 for before, after in ends("triage", "val/reward/mean"))
    for engine in ("TorchRollout", "VLLM", "SGLang"):
        [(before, after)] = ends("engines", "val/reward/mean", engine)
        assert before < 0.36 and after >= 0.97
    assert all(before < 10 and after >= 475 for before, after in ends("cartpole", "val/reward/mean"))
    assert all(before < 0.45 and after > 0.8 for before, after in ends("judged", "val/truth/mean"))
    by_turn, by_episode = (
        [after for _, after in ends("guess", "val/reward/mean", f"credit by {what}")] for what in ("turn", "episode")
    )
    ahead = [f"{one - other:.2f}" for one, other in zip(by_turn, by_episode, strict=True)]
    assert ahead == ["0.13", "0.09", "0.04"] and "by 0.13, 0.09 and\n0.04 of the reward" in page
    assert [f"{sum(found) / 3:.2f}" for found in (by_turn, by_episode)] == ["1.47", "1.38"]
    grades, right = ends("judged", "val/reward/mean"), ends("judged", "val/truth/mean")
    assert all(grade > 0.98 and grade - truth > 0.08 for (_, grade), (_, truth) in zip(grades, right, strict=True))
    assert all(0 < after < before for before, after in ends("judged", "val/judge/fooled"))
    kept = runs("judged").values()
    after_ten = [next(point["val/judge/fooled"] for point in points if point["step"] == 10) for points in kept]
    grown = [points[-1]["val/judge/fooled"] > at for points, at in zip(kept, after_ten, strict=True)]
    assert sum(grown) == 2 and "for two of the seeds the fraction grows again after step 10" in page


CURVE: dict[str, Any] = {
    "example": "none.py",
    "along": {"step": "steps"},
    "shown": {"val/reward/mean": "reward", "val/caught": "caught"},
    "compared": {"val/caught": {"always": 1.0}},
    "arms": {"": {"with": {}, "seeds": {"0": [{"step": 0, "val/reward/mean": -0.25, "val/caught": 0.5}]}}},
}


def test_results_are_read_from_the_metrics_of_a_run(examples: ModuleType, tmp_path: Path) -> None:
    lines = [
        {"step": 0, "val/reward/mean": 0.12345678, "val/caught": 0.0, "val/else": 1.0},
        {"step": 1, "reward/mean": 0.5},
        {"step": 2, "val/reward/mean": 1.0, "val/caught": 1.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert examples.points_of(CURVE, tmp_path / "metrics.jsonl") == [
        {"step": 0, "val/reward/mean": 0.123457, "val/caught": 0.0},
        {"step": 2, "val/reward/mean": 1.0, "val/caught": 1.0},
    ]


def test_a_run_gets_the_settings_of_its_arm(
    examples: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "told.py").write_text(
        "import json, os, pathlib\n"
        "line = {'step': int(os.environ['SEED']), 'val/reward/mean': float(os.environ['PAID']), 'val/caught': 1.0}\n"
        "pathlib.Path('runs/one').mkdir(parents=True)\n"
        "pathlib.Path('runs/one/metrics.jsonl').write_text(json.dumps(line))\n"
    )
    monkeypatch.setattr(examples, "ROOT", tmp_path)
    curve = {**CURVE, "example": "told.py", "arms": {"paid": {"with": {"PAID": "0.5"}, "seeds": {"3": []}}}}
    points = examples.run(curve, "paid", "2", tmp_path / "run")
    assert points == [{"step": 2, "val/reward/mean": 0.5, "val/caught": 1.0}]
    examples.keep(curve, "paid", "2", points)
    assert curve["arms"]["paid"]["seeds"] == {"2": points, "3": []}


def test_a_table_is_inserted_after_its_marker(examples: ModuleType) -> None:
    table = examples.table(CURVE)
    assert table.splitlines() == [
        "| seed | reward | caught | steps |",
        "| --- | --- | --- | --- |",
        "| 0 | -0.250 → -0.250 | 0.500 → 0.500 | 0 |",
        "| always |  | 1.000 |  |",
    ]
    others = {name: {"with": {"ENGINE": name}, "seeds": CURVE["arms"][""]["seeds"]} for name in ("one", "two")}
    assert [row[:9] for row in examples.table({**CURVE, "arms": others}).splitlines()[2:4]] == [
        "| one, 0 ",
        "| two, 0 ",
    ]
    page = "# Page\n\n<!-- a -->\n\n| old |\n| --- |\n\nText.\n\n<!-- b -->\n\nMore.\n\n<!-- c -->\n"
    once = examples.written(page, "a", table)
    assert once == page.replace("| old |\n| --- |", table) == examples.written(once, "a", table)
    assert f"<!-- b -->\n\n{table}\n\nMore.\n" in examples.written(page, "b", table)
    last = examples.written(page, "c", table)
    assert last.endswith(f"\n\n<!-- c -->\n\n{table}\n") and examples.written(last, "c", table) == last
    with pytest.raises(SystemExit, match="has <!-- d --> 0 times"):
        examples.written(page, "d", table)
