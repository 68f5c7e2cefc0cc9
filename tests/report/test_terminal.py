"""Reporters: the output of the terminal and TensorBoard, and the end of every reporter."""

from __future__ import annotations

import io
import math
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console

from flowrl import PromptData, TensorBoard, Terminal, Validation
from flowrl.errors import NodeError
from tests.support.jobs import job_of
from tests.support.runs import Recorder, described, fails_at, train


@pytest.mark.parametrize("fail_at", ["start", "step", "end"])
def test_every_started_reporter_is_ended_once(tiny: str, prompts_file: str, tmp_path: Path, fail_at: str) -> None:
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
    assert not any(word in table for word in ("fetched", "critical path", "*"))  # which do not apply to one process
    if terminal:
        assert "remaining" in shown
        assert "3/3" in shown
    else:
        assert "\x1b" not in shown
        assert [line.split()[1] for line in shown.splitlines() if "step" in line.split()[:1]] == [
            "0/3", "1/3", "2/3", "2/3", "3/3", "3/3",
        ]  # fmt: skip


def test_a_terminal_names_the_running_node(tmp_path: Path) -> None:
    out = io.StringIO()
    reporter = Terminal(Console(file=out, force_terminal=True, width=140))
    reporter.start("ppo", 5, tmp_path, 1)
    assert "1/5" in out.getvalue() and "5 steps (1 done)" in out.getvalue()
    for node in ("generate", "update_actor"):
        reporter.node(node)
        assert reporter.progress is not None
        reporter.progress.refresh()  # as its own thread does a few times a second
        assert node in out.getvalue()
    reporter.step(2, {"reward/mean": 0.25, "kl/ref": math.nan})
    reporter.end(None)
    assert "2/5" in out.getvalue()
    assert "reward 0.250  KL nan" in out.getvalue()


def test_the_terminal_is_restored_when_a_run_fails(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    reporter = Terminal(Console(file=io.StringIO(), force_terminal=True))
    with pytest.raises(NodeError):
        train(job_of("grpo", tiny, fails_at(0, ValueError("no"))), prompts_file, tmp_path, [reporter])
    assert reporter.progress is None


def test_tensorboard_gets_every_metric(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    validation = Validation(PromptData(prompts_file), every=2)
    run = train(job_of("grpo", tiny), prompts_file, tmp_path, [TensorBoard()], validation=validation)
    events = event_accumulator.EventAccumulator(str(tmp_path)).Reload()
    rewards = [(e.step, e.value) for e in events.Scalars("reward/mean")]
    assert rewards == [(m["step"], pytest.approx(m["reward/mean"])) for m in run.metrics]
    assert [e.step for e in events.Scalars("val/reward/mean")] == [0, 2, 3]
    assert set(events.Tags()["scalars"]) == ({*run.metrics[0], *run.validations[0]} - {"step"})


class TestLogFile:
    """The output is not a terminal."""

    def shown(self, seconds: float, steps: int, folder: Path, patch: pytest.MonkeyPatch, first: int = 0) -> list[str]:
        """The lines of a run with two nodes per step, each of which takes `seconds`."""
        now = [100.0]
        patch.setattr("flowrl.report.terminal.time.monotonic", lambda: now[0])
        out = io.StringIO()
        terminal = Terminal(Console(file=out, width=100, soft_wrap=True))
        terminal.start("grpo", steps, folder, first)
        for step in range(first + 1, steps + 1):
            for node in ("generate", "update_actor"):
                terminal.node(node)
                now[0] += seconds
            terminal.step(step, {"reward/mean": 0.5})
        terminal.end(None)
        return [" ".join(line.split()[1:]) for line in out.getvalue().splitlines()[1:]]

    def test_a_fast_run_logs_the_first_and_every_tenth_step(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lines = self.shown(0.01, 100, tmp_path, monkeypatch)
        assert [line.split()[0] for line in lines] == ["1/100", *(f"{n}/100" for n in range(10, 101, 10))]

    def test_a_slow_run_logs_every_30_seconds(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        lines = self.shown(8.0, 100, tmp_path, monkeypatch, first=50)
        assert lines[0] == "51/100 reward 0.500"  # at once, also if resumed
        steps = [int(line.partition("/")[0]) for line in lines]
        assert max(b - a for a, b in pairwise(steps)) == 2  # 32 seconds

    def test_a_long_step_logs_the_running_node(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.shown(40.0, 2, tmp_path, monkeypatch) == [
            "0/2 done, now update_actor", "1/2 reward 0.500", "1/2 done, now update_actor", "2/2 reward 0.500",
        ]  # fmt: skip


def test_log_lines_are_flushed_at_once(tmp_path: Path) -> None:
    """Python buffers output to a file; without a flush, `tail -f` shows lines late."""
    script = """
import os, pathlib
from flowrl import Terminal
terminal = Terminal()
terminal.start("grpo", 1000, pathlib.Path("runs"), 0)
terminal.step(1, {"reward/mean": 0.5})
os._exit(0)  # nothing is flushed
"""
    with (tmp_path / "log").open("w") as log:
        subprocess.run([sys.executable, "-c", script], stdout=log, check=True)
    first, second = (tmp_path / "log").read_text().splitlines()
    assert first == "grpo: 1000 steps, writing to runs" and second == "  step    1/1000  reward 0.500"
