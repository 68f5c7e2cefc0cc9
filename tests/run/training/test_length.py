"""Learning rates whose schedule lasts as long as the run."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest

from flowrl import After, DemoData, Training
from flowrl.backends import SGD, TorchTrainer
from flowrl.graphs import sft
from flowrl.operators import Collect, Spread
from flowrl.run.training.length import optimizer_steps
from flowrl.schedules import WSD, Constant, Cosine, Linear, Schedule
from tests.support.errors import raises
from tests.support.jobs import job_of
from tests.support.runs import described, train


def _schedule(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = described(folder)["graph"]["bindings"]["actor"]["schedule"]
    return found


def test_the_learning_rate_falls_over_the_optimizer_steps_of_the_run(
    tiny: str, prompts_file: str, tmp_path: Path
) -> None:
    trainer = {"schedule": Linear(1.0, 0.0, warmup=0.25)}
    job = job_of("grpo", tiny, trainer=trainer, optimizer=SGD(lr=0.1), n=2, mini_batch=4)
    run = train(job, prompts_file, tmp_path / "steps")  # 3 steps of 8 rows: 6 optimizer steps, 2 of them warm-up
    rates = [0.0, 0.05, 0.1, 0.075, 0.05, 0.025]  # by hand
    means = [(first + second) / 2 for first, second in zip(rates[::2], rates[1::2], strict=True)]
    assert [step["actor/lr"] for step in run.metrics] == pytest.approx(means)
    found = _schedule(tmp_path / "steps")
    assert (found["steps"], found["warmup"]) == (6, 2)
    epochs = train(job, prompts_file, tmp_path / "epochs", steps=None, epochs=1)  # 12 prompts, 4 a step
    assert [step["actor/lr"] for step in epochs.metrics] == pytest.approx(means)


def test_a_longer_resume_warns_of_its_other_schedule(
    tiny: str, prompts_file: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = job_of("grpo", tiny, trainer={"schedule": Cosine(1.0, 0.1)}, n=2)
    train(job, prompts_file, tmp_path, steps=1, checkpoint_every=1)
    with caplog.at_level(logging.WARNING):
        run = train(job, prompts_file, tmp_path, steps=4, checkpoint_every=1, resume=True)
    assert any("other backends" in text and "schedule" in text and "4" in text for text in caplog.messages)
    assert run.metrics[1]["actor/lr"] == pytest.approx(0.05 * Cosine(1.0, 0.1, steps=4).at(1))


def test_steps_in_which_the_update_does_not_run_do_not_count() -> None:
    graph = job_of("ppo", "model", critic_warmup=3, mini_batch=2, ppo_epochs=2).graph
    assert optimizer_steps(graph, "actor", steps=10, prompts=4) == 7 * 2 * 2
    assert optimizer_steps(graph, "critic", steps=10, prompts=4) == 10 * 2 * 2


@pytest.mark.parametrize("on_underfill", ["error", "train", "repeat"])
def test_a_collect_counts_as_filled(on_underfill: Any) -> None:
    collect = After("reward", Collect(Spread(), groups=6, on_underfill=on_underfill))
    graph = job_of("grpo", "model", n=4, mini_batch=4).graph.edit(insert={"collect": collect})
    assert optimizer_steps(graph, "actor", steps=10, prompts=8) == 10 * 6


def test_demonstrations_are_counted_by_epochs(tiny: str, tmp_path: Path) -> None:
    demos = tmp_path / "demos.jsonl"
    demos.write_text('{"prompt": "ab", "response": "ba"}\n' * 5)
    job = sft().bind(actor=TorchTrainer(tiny, SGD(lr=0.1), Constant(1.0, warmup=0.5), device="cpu"))
    run = Training(job, DemoData(str(demos)), epochs=2, prompts=2, folder=str(tmp_path / "run"), save_model=False).run()
    assert len(run.metrics) == 5
    assert _schedule(tmp_path / "run")["warmup"] == 3


@pytest.mark.parametrize(
    ("schedule", "found"),
    [
        (Cosine(1.0, 0.1), Cosine(1.0, 0.1, steps=40)),
        (Linear(1.0, 0.0, warmup=0.03), Linear(1.0, 0.0, steps=40, warmup=math.ceil(0.03 * 40))),
        (Linear(1.0, 0.0, steps=20, warmup=0.5), Linear(1.0, 0.0, steps=20, warmup=10)),
        (Constant(1.0, warmup=0.1), Constant(1.0, warmup=4)),
        (WSD(1.0, 0.0, decay=0.2, warmup=0.1), WSD(1.0, 0.0, steps=40, decay=8, warmup=4)),
        (Constant(1.0, warmup=7), Constant(1.0, warmup=7)),
    ],
)
def test_shares_are_rounded_up_as_in_transformers(schedule: Schedule, found: Schedule) -> None:
    assert schedule.over(40) == found


@pytest.mark.parametrize(("steps", "shares"), [(1, (0.03, 0.2)), (2, (0.5, 0.9)), (50, (0.99, 0.2))])
def test_shares_fit_into_any_run(steps: int, shares: tuple[float, float]) -> None:
    """Warm-up, rounded up, could leave no step for the decay."""
    found = WSD(1.0, 0.0, warmup=shares[0], decay=shares[1]).over(steps)
    assert found.steps == steps and found.decay >= 1 and found.warmup + found.decay <= steps
    assert found.at(steps - 1) > 0.0 == found.at(steps)


def test_a_warmup_may_be_long_before_the_run_is_known() -> None:
    schedule = Cosine(1.0, 0.1, warmup=2000)
    trainer = TorchTrainer("model", schedule=schedule)
    assert trainer.over(5000).schedule == Cosine(1.0, 0.1, steps=5000, warmup=2000)


def test_a_schedule_of_unknown_length_is_refused(tiny: str) -> None:
    job = job_of("grpo", tiny, trainer={"schedule": Cosine(1.0, 0.0)})
    with raises("parameter.unknown-length", role="actor"):
        job.build()
    with raises("parameter.unknown-length", schedule=repr(Cosine(1.0, 0.0))):
        Cosine(1.0, 0.0).at(0)
    with raises("parameter.invalid", spec="Cosine"):
        Cosine(1.0, 0.0, warmup=50).over(40)
