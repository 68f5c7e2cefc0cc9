"""The examples with agents of others: a warm start, then three steps through an endpoint. Their packages are those of
``flowrl[dev]``; a test whose agent is not installed is skipped."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from flowrl.references import load_object
from tests import ROOT

pytestmark = pytest.mark.runs

AGENTS = ROOT / "examples" / "agents"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for the run, and variables of the agents: no requests to the internet, no files at home."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setenv("STEPS", "3")
    monkeypatch.setenv("MSWEA_GLOBAL_CONFIG_DIR", str(tmp_path / "config"))
    for name in ("LITELLM_LOCAL_MODEL_COST_MAP", "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT", "MSWEA_SILENT_STARTUP"):
        monkeypatch.setenv(name, "1")  # the example sets them, which ends with the test
    return tmp_path


def trained(example: str, tools: list[str], epochs: int) -> list[dict[str, float]]:
    """The metrics of three steps, from a model that has imitated demonstrations for a few epochs."""
    of = {
        name: load_object(f"{AGENTS / example}:{name}")
        for name in ("FOLDER", "WORDS", "demonstration", "imitate", "training")
    }
    model = of["imitate"](of["FOLDER"], of["WORDS"], tools, of["demonstration"], 0, epochs)
    assert model == of["FOLDER"] / "sft" / "actor"
    training: Any = of["training"]()
    for path in of["FOLDER"].glob("*.jsonl"):
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:100]))
    run = training.run()
    assert [metrics["step"] for metrics in run.metrics] == [1, 2, 3]
    for metrics in run.metrics:
        assert metrics["episodes/failed"] == metrics["episodes/abandoned"] == metrics["episodes/refused"] == 0
        assert metrics["rollout/logp_diff_max"] < 1e-3
    return run.metrics


def test_an_agent_of_langgraph_is_trained() -> None:
    pytest.importorskip("langgraph", reason="needs pip install langgraph langchain-openai")
    for metrics in trained("langgraph_triage.py", ["get_metrics"], epochs=2):
        valid, invalid = metrics["episodes/tool_calls"], metrics["episodes/tool_errors"]
        assert valid > 16 and valid / (valid + invalid) >= 0.5
        assert 1 < metrics["episodes/turns"] <= 3 and 0 < metrics["reward/mean"] < 1


def test_mini_swe_agent_is_trained_on_a_repository() -> None:
    pytest.importorskip("minisweagent", reason="needs pip install mini-swe-agent")
    for metrics in trained("mini_swe.py", ["bash"], epochs=2):
        answers = 64 * metrics["episodes/turns"]
        assert metrics["episodes/tool_calls"] / answers >= 0.5
        assert 2 <= metrics["episodes/turns"] <= 4 and 0 < metrics["reward/mean"] < 1
