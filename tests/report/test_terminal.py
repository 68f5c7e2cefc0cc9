"""The terminal: what it shows, on a terminal and in a log file."""

from __future__ import annotations

import functools
import io
import math
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console

from flowrl import DemoData, PromptData, Terminal, Training, Validation
from flowrl.backends import SGD, TorchTrainer
from flowrl.errors import NodeError
from flowrl.graphs import sft
from tests.support.jobs import job_of
from tests.support.rows.prompt_files import write_jsonl
from tests.support.runs import fails_at, train


@pytest.mark.parametrize("terminal", [False, True])
def test_the_terminal_shows_node_reward_and_kl(tiny: str, prompts_file: str, tmp_path: Path, terminal: bool) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=140, soft_wrap=not terminal)
    validation = Validation(PromptData(prompts_file), every=2)
    run = train(job_of("ppo", tiny), prompts_file, tmp_path, [Terminal(console, bar=console)], validation=validation)
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
    reporter = Terminal(bar=Console(file=out, force_terminal=True, width=140))
    reporter.start("ppo", 5, tmp_path, 1)
    assert "1/5" in out.getvalue()
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
    reporter = Terminal(bar=Console(file=io.StringIO(), force_terminal=True))
    with pytest.raises(NodeError):
        train(job_of("grpo", tiny, fails_at(0, ValueError("no"))), prompts_file, tmp_path, [reporter])
    assert reporter.progress is None


@pytest.mark.parametrize(
    ("reported", "shown"),
    [
        ({"reward/mean": 0.5, "kl/ref": 0.25, "actor/pg_loss": 3.0}, "reward 0.500 KL 0.250"),
        ({"actor/pg_loss": 1.5, "actor/grad_norm": 2.0}, "loss 1.500"),
        ({"actor/dpo_accuracy": 0.75, "actor/pg_loss": 0.5}, "accuracy 0.750 loss 0.500"),
        ({"actor/orpo_accuracy": 0.75, "actor/pg_loss": 0.5}, "accuracy 0.750 loss 0.500"),
        ({"reward_model/accuracy": 0.75, "reward_model/loss": 0.5}, "accuracy 0.750 loss 0.500"),
        ({"actor/divergence": 0.125}, "divergence 0.125"),
    ],
)
def test_the_line_depends_on_what_the_graph_trains(tmp_path: Path, reported: dict[str, float], shown: str) -> None:
    assert first_line(Terminal, reported, tmp_path) == f"step 1/9 {shown}"


def test_the_line_has_the_metrics_that_were_asked_for(tmp_path: Path) -> None:
    reported = {"reward/mean": 0.5, "actor/grad_norm": 2.0}
    make = functools.partial(Terminal, metrics=["actor/grad_norm"])
    assert first_line(make, reported, tmp_path) == "step 1/9 actor/grad_norm 2.000"
    make = functools.partial(Terminal, metrics=["reward/maen"])
    assert "reports no reward/maen" in first_line(make, reported, tmp_path)
    assert "did you mean 'reward/mean'?" in first_line(make, reported, tmp_path)


def first_line(make: Callable[[Console], Terminal], reported: dict[str, float], folder: Path) -> str:
    """What a terminal prints of the first step of a run, with single spaces."""
    out = io.StringIO()
    terminal = make(Console(file=out, width=200, soft_wrap=True))
    terminal.start("graph", 9, folder, 0)
    terminal.step(1, reported)
    terminal.end(None)
    return " ".join(out.getvalue().splitlines()[1].split())


def test_a_validation_without_a_mean_shows_all_its_metrics() -> None:
    out = io.StringIO()
    terminal = Terminal(Console(file=out, width=200, soft_wrap=True))
    terminal.start("graph", 9, Path("run"), 0)
    terminal.validation(0, {"val/reward_model/accuracy": 0.5, "val/reward_model/margin": -0.25})
    terminal.validation(0, {"val/reward/mean": 0.5, "val/reward/max": 1.0})
    _, pairs, rewards = (" ".join(line.split()) for line in out.getvalue().splitlines())
    assert pairs == "step 0/9 val/reward_model/accuracy 0.500 val/reward_model/margin -0.250"
    assert rewards == "step 0/9 val/reward/mean 0.500"


def test_a_supervised_graph_shows_its_loss(tiny: str, tmp_path: Path) -> None:
    demos = write_jsonl(tmp_path / "demos.jsonl", [{"prompt": "a", "response": "b"}] * 2)
    out = io.StringIO()
    job = sft(mini_batch=2).bind(actor=TorchTrainer(tiny, SGD(lr=0.1)))
    training = Training(job, DemoData(demos), steps=1, prompts=2, folder=str(tmp_path / "run"), save_model=False)
    metrics = training.run([Terminal(Console(file=out, width=200))]).metrics[0]
    assert f"loss {metrics['actor/pg_loss']:.3f}" in out.getvalue()


@pytest.mark.parametrize("piped", [False, True])
def test_the_bar_is_on_stderr_and_the_lines_on_stdout(tmp_path: Path, piped: bool) -> None:
    out, bar = io.StringIO(), io.StringIO()
    lines = Console(file=out, width=140, force_terminal=not piped)
    terminal = Terminal(lines, bar=Console(file=bar, width=140, force_terminal=True))
    terminal.start("graph", 4, tmp_path, 0)
    terminal.step(1, {"reward/mean": 0.5})
    terminal.validation(1, {"val/reward/mean": 0.25})
    terminal.end(None)
    assert "remaining" in bar.getvalue() and "graph: 4 steps" in out.getvalue()
    assert ("val/reward/mean 0.250" in out.getvalue()) == piped  # else above the bar
    assert ("val/reward/mean 0.250" in bar.getvalue()) != piped


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
