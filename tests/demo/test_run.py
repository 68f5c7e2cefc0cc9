"""The demonstration: its graphs pass every rule; it trains, prints, draws and returns its runs."""

from __future__ import annotations

import io
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from flowrl.demo import run as demo
from flowrl.demo.model import build
from flowrl.demo.task import write_dataset
from flowrl.run.training.loop import Run
from tests.support.errors import raises

pytestmark = pytest.mark.runs


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A demo with a briefly trained model, 100 training problems and 100 held-out problems."""

    def write_little(folder: Path, seed: int) -> tuple[Path, Path]:
        paths = write_dataset(folder, seed)
        for path in paths:
            path.write_text("".join(path.read_text().splitlines(keepends=True)[:100]))
        return paths

    monkeypatch.setattr(demo, "build", partial(build, steps=2))
    monkeypatch.setattr(demo, "write_dataset", write_little)
    return monkeypatch


def test_the_demo_graphs_pass_every_rule() -> None:
    for graph in demo.graphs():
        rows_per_prompt = graph["repeat"].operator.rows_factor
        assert graph.check(prompts=demo.ROWS // rows_per_prompt) == []


def test_the_demo_trains_and_prints_both_graphs(tmp_path: Path, small: pytest.MonkeyPatch) -> None:
    small.setattr(demo, "ROWS", 32)
    out = io.StringIO()
    runs = demo.run_demo(Console(file=out, width=160), tmp_path, steps=1, seed=5)
    assert {name: run.folder for name, run in runs.items()} == {
        name: tmp_path / "001" / name for name in ("grpo", "ppo")
    }
    assert all(len(run.metrics) == 1 and len(run.validations) == 2 for run in runs.values())
    assert (tmp_path / "001" / "curves.png").read_bytes().startswith(b"\x89PNG")
    shown = out.getvalue()
    for text in (
        "grpo -> ppo",
        "grpo before",
        "ppo after",
        "accuracy",
        "~ role rollout: TorchRollout() -> VLLM(",
    ):
        assert text in shown
    assert "flowchart" not in shown  # Mermaid text belongs in the HTML pages only
    for name, nodes in (("grpo", ["group_advantage"]), ("grpo-to-ppo", ["group_advantage", "update_critic"])):
        page = tmp_path / "001" / f"{name}.html"
        assert f"Picture: {page}" in shown
        assert all(node in page.read_text() for node in nodes) and "flowchart TD" in page.read_text()


def test_the_demo_stops_when_a_validation_reaches_the_goal(tmp_path: Path, small: pytest.MonkeyPatch) -> None:
    small.setattr(demo, "ROWS", 16)
    small.setattr(demo, "SOLVED", 0.0)
    out = io.StringIO()
    runs = demo.run_demo(Console(file=out, width=160), tmp_path, steps=50, seed=5)
    assert [len(run.metrics) for run in runs.values()] == [5, 5]
    for name in runs:
        assert f"{name} ended after step 5 of 50: a validation ended it" in out.getvalue()


def test_the_quick_demo_trains_grpo_and_writes_its_curve(tmp_path: Path, small: pytest.MonkeyPatch) -> None:
    small.setattr(demo, "ROWS", 32)
    out = io.StringIO()
    run = demo.run_quick(Console(file=out, width=160), tmp_path, steps=4, seed=5)
    assert run.folder == tmp_path / "quick" / "001" / "grpo"
    assert [record["step"] for record in run.validations] == [0, 3, 4] and len(run.metrics) == 4
    curve = ElementTree.parse(tmp_path / "quick" / "001" / "curve.svg")
    assert [text.text for text in curve.iter("{http://www.w3.org/2000/svg}text")][-2:] == [
        "held-out prompts",
        "training prompts",
    ]
    shown = out.getvalue()
    assert all(f"step {step}  " in shown for step in (0, 3, 4))
    assert f"Curve: {tmp_path / 'quick' / '001' / 'curve.svg'}" in shown


def test_the_quick_demo_and_the_demo_share_one_model(tmp_path: Path, small: pytest.MonkeyPatch) -> None:
    small.setattr(demo, "ROWS", 16)
    out = Console(file=io.StringIO())
    demo.run_quick(out, tmp_path, steps=1, seed=5)
    model = tmp_path / "model-seed5" / "model.safetensors"
    before = model.stat().st_mtime_ns
    runs = demo.run_demo(out, tmp_path, steps=1, seed=5)
    assert runs["ppo"].folder == tmp_path / "001" / "ppo" and model.stat().st_mtime_ns == before


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with raises("data.unwritable-file", path=str(tmp_path / "file")):
        demo.run_demo(Console(file=io.StringIO()), tmp_path / "file", steps=1, seed=0)


def test_brackets_in_responses_are_printed_unchanged(tmp_path: Path) -> None:
    line = '{"step": %d, "prompt": [{"content": "1+[b]"}], "response": "[/] 95", "score": %d}\n'
    (tmp_path / "predictions.jsonl").write_text(line % (0, 0) + line % (100, 1))
    out = io.StringIO()
    demo._show_samples(Console(file=out, width=160), {"grpo": Run(tmp_path, [], [], {})})
    assert out.getvalue().count("[/] 95") == 2
    assert "1+[b]" in out.getvalue()
