"""Reporters: what the terminal and TensorBoard show of a run, and that each is ended however the run ends."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
from rich.console import Console

from flowrl import PromptData, TensorBoard, Terminal, Validation
from flowrl.errors import NodeError
from tests.jobs import job_of
from tests.runs import Recorder, described, fails_at, train


@pytest.mark.parametrize("fail_at", ["start", "step", "end"])
def test_every_reporter_that_was_started_is_ended_once(
    tiny: str, prompts_file: str, tmp_path: Path, fail_at: str
) -> None:
    first, second, third = Recorder(), Recorder(fail_at), Recorder()
    with pytest.raises(RuntimeError, match=f"fails at {fail_at}"):
        train(job_of("grpo", tiny), prompts_file, tmp_path, [first, second, third], steps=1)
    assert first.count("end") == 1
    assert second.count("end") == (fail_at != "start")
    assert third.count("start") == third.count("end") == (fail_at != "start")
    assert described(tmp_path)["status"] == "failed"


@pytest.mark.parametrize("terminal", [False, True])
def test_the_terminal_shows_node_reward_and_kl(tiny: str, prompts_file: str, tmp_path: Path, terminal: bool) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=140, soft_wrap=not terminal)
    validation = Validation(PromptData(prompts_file), every=2)
    run = train(job_of("ppo", tiny), prompts_file, tmp_path, [Terminal(console)], validation=validation)
    shown = out.getvalue()
    last = run.metrics[-1]
    assert f"reward {last['reward/mean']:.3f}" in shown
    assert f"KL {last['kl/ref']:.3f}" in shown
    assert f"val/reward/mean {run.validations[-1]['val/reward/mean']:.3f}" in shown
    assert "ppo: 3 steps" in shown
    table = shown[shown.rindex("┏") :]
    assert all(node in table for node in ("generate", "update_critic", "sync", "a step takes", "idle: this process"))
    assert not any(word in table for word in ("fetched", "critical path", "*"))  # which say nothing of one process
    if terminal:
        assert "left" in shown
        assert "3/3" in shown
    else:
        assert "\x1b" not in shown
        assert [line.split()[1] for line in shown.splitlines() if "step" in line.split()[:1]] == [
            "0/3", "1/3", "2/3", "2/3", "3/3", "3/3",
        ]  # fmt: skip


def test_a_terminal_names_the_node_that_runs_now(tmp_path: Path) -> None:
    out = io.StringIO()
    reporter = Terminal(Console(file=out, force_terminal=True, width=140))
    reporter.start("ppo", 5, tmp_path, 1)
    assert "1/5" in out.getvalue() and "5 steps, of which 1 are done" in out.getvalue()
    for node in ("generate", "update_actor"):
        reporter.node(node)
        assert reporter.progress is not None
        reporter.progress.refresh()  # which it does by itself, a few times a second
        assert node in out.getvalue()
    reporter.step(2, {"reward/mean": 0.25, "kl/ref": math.nan})
    reporter.end(None)
    assert "2/5" in out.getvalue()
    assert "reward 0.250  KL nan" in out.getvalue()


def test_the_terminal_is_left_in_order_when_a_run_fails(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    reporter = Terminal(Console(file=io.StringIO(), force_terminal=True))
    with pytest.raises(NodeError):
        train(job_of("grpo", tiny, fails_at(0, ValueError("no"))), prompts_file, tmp_path, [reporter])
    assert reporter.progress is None


def test_tensorboard_gets_every_number(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    validation = Validation(PromptData(prompts_file), every=2)
    run = train(job_of("grpo", tiny), prompts_file, tmp_path, [TensorBoard()], validation=validation)
    events = event_accumulator.EventAccumulator(str(tmp_path)).Reload()
    rewards = [(e.step, e.value) for e in events.Scalars("reward/mean")]
    assert rewards == [(m["step"], pytest.approx(m["reward/mean"])) for m in run.metrics]
    assert [e.step for e in events.Scalars("val/reward/mean")] == [0, 2, 3]
    assert set(events.Tags()["scalars"]) == ({*run.metrics[0], *run.validations[0]} - {"step"})
