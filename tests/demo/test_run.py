"""The demonstration as a whole: its graphs keep every rule, and it tells, draws and returns what was learned."""

from __future__ import annotations

import io
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

from flowrl.demo import run as demo
from flowrl.demo.model import build
from flowrl.run.training import Run


def test_the_graphs_keep_every_rule() -> None:
    for graph in demo.graphs():
        rows_per_prompt = graph["repeat"].operator.rows_factor
        assert graph.check(prompts=demo.ROWS // rows_per_prompt) == []


def test_the_demo_trains_both_graphs_and_shows_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "build", partial(build, steps=2))
    monkeypatch.setattr(demo, "ROWS", 32)
    out = io.StringIO()
    runs = demo.run_demo(Console(file=out, width=160), tmp_path, steps=1, seed=5)
    assert {name: run.folder for name, run in runs.items()} == {
        name: tmp_path / "001" / name for name in ("grpo", "ppo")
    }
    assert all(len(run.metrics) == 1 and len(run.validations) == 2 for run in runs.values())
    assert (tmp_path / "001" / "curves.png").read_bytes().startswith(b"\x89PNG")
    shown = out.getvalue()
    for text in ("flowchart TD", "grpo -> ppo", "grpo before", "ppo after", "accuracy"):
        assert text in shown


def test_answers_are_shown_as_they_are(tmp_path: Path) -> None:
    """Brackets are no markup of the terminal's."""
    line = '{"step": %d, "prompt": [{"content": "1+[b]"}], "response": "[/] 95", "score": %d}\n'
    (tmp_path / "predictions.jsonl").write_text(line % (0, 0) + line % (100, 1))
    out = io.StringIO()
    demo._show_samples(Console(file=out, width=160), {"grpo": Run(tmp_path, [], [], {})})
    assert out.getvalue().count("[/] 95") == 2
    assert "1+[b]" in out.getvalue()
