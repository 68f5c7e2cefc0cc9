"""Alarms in a run, and by the same rules on its folder: `alarms.py`, `defaults.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import flowrl
from flowrl import FlowrlError, Recording
from flowrl.look.alarms import judge_run
from flowrl.run.alarms.alarms import judge
from flowrl.run.alarms.defaults import DEFAULT
from flowrl.run.alarms.history import History
from flowrl.run.alarms.rule import Check, Finding
from flowrl.run.alarms.rules import Above
from tests.support.errors import raises
from tests.support.jobs import job_of
from tests.support.rewards import fails_on_some
from tests.support.runs import described, lines, train


def third(history: History) -> str | None:
    """A rule that fires in steps 3 and 4."""
    return f"it is step {history.step}" if history.step in (3, 4) else None


def steps_of(run: flowrl.RecordedRun) -> list[int]:
    return [alarm["step"] for alarm in run.alarms]


class TestFires:
    def test_an_alarm_fires_once_until_it_clears(self) -> None:
        series = [0.1, 2.0, 2.0, 0.1, 3.0]
        histories = [History([{"step": i + 1.0, "kl/ref": v} for i, v in enumerate(series[:n])]) for n in range(1, 6)]
        found = judge([Above("kl/ref", 1.0)], "runs/a", histories)
        assert [(alarm.step, alarm.value) for alarm in found] == [(2, 2.0), (5, 3.0)]
        assert found[0].address == "runs/a@2" and found[0].command == "flowrl rows runs/a --step 2"

    def test_a_rule_that_fails_is_reported_and_the_others_are_evaluated(self) -> None:
        def broken(history: History) -> Finding:
            raise ValueError("no such metric")

        found = judge([Check(broken), Check(third)], "a", [History([{"step": 3.0}])])
        assert [alarm.message for alarm in found] == ["the rule fails: ValueError: no such metric", "it is step 3"]

    def test_a_run_writes_what_its_folder_gives_by_the_same_rules(
        self, tiny: str, prompts_file: str, tmp_path: Path
    ) -> None:
        rules = (*DEFAULT, Check(third), Above("kl/ref", -1.0), Above("response_length/mean", 0.5))
        train(job_of("grpo", tiny), prompts_file, tmp_path / "run", steps=5, alarms=rules)
        run = flowrl.open(tmp_path / "run")
        written = [{**alarm, "time": 0} for alarm in run.alarms]
        assert written == [{**vars(alarm), "time": 0} for alarm in judge_run(run, rules)]
        assert [a["step"] for a in written if a["message"].startswith("it is step")] == [3]
        length = next(a for a in written if a["metric"] == "response_length/mean")
        assert length["address"] == f"{tmp_path / 'run'}@1/generate" and "blame" in length["command"]
        assert set(length["rows"]) <= set(run.rows(1)["row_id"].to_pylist())

    def test_a_resumed_run_has_the_alarms_of_an_uninterrupted_one(
        self, tiny: str, prompts_file: str, tmp_path: Path
    ) -> None:
        settings: dict[str, Any] = {"alarms": (third,), "checkpoint_every": 1, "steps": 5}
        train(job_of("grpo", tiny), prompts_file, tmp_path / "straight", **settings)
        for steps in (3, 5):  # the alarm is on when the first start ends, so it does not fire again
            train(
                job_of("grpo", tiny),
                prompts_file,
                tmp_path / "both",
                **{**settings, "steps": steps, "resume": "or-start"},
            )
        straight, both = (flowrl.open(tmp_path / name) for name in ("straight", "both"))
        assert steps_of(straight) == steps_of(both) == [3]

    def test_errors_of_a_reward_are_an_alarm_with_their_rows(
        self, tiny: str, prompts_file: str, tmp_path: Path
    ) -> None:
        job = job_of("grpo", tiny, fails_on_some).edit(set={"reward.on_error": 0.0})
        train(job, prompts_file, tmp_path, steps=2, prompts=12)
        run = flowrl.open(tmp_path)
        (alarm,) = [alarm for alarm in run.alarms if alarm["metric"] == "reward/errors"]
        failed = [row["row_id"] for row in run.rows(1).to_pylist() if row["reward/errors"]]
        assert alarm["step"] == 1 and len(failed) == alarm["value"] == 4
        assert alarm["rows"] and set(alarm["rows"]) <= set(failed)


class TestActions:
    def test_the_columns_of_a_step_with_an_alarm_stay_with_both_neighbors(
        self, tiny: str, prompts_file: str, tmp_path: Path
    ) -> None:
        recording = Recording(recent=2, every=None)
        train(job_of("grpo", tiny), prompts_file, tmp_path, steps=7, alarms=(third,), recording=recording)
        assert flowrl.open(tmp_path).recorded_steps == [1, 2, 3, 4, 6, 7]

    def test_record_writes_texts_and_columns_while_the_alarm_is_on(
        self, tiny: str, prompts_file: str, tmp_path: Path
    ) -> None:
        recording = Recording(texts=None, columns=None)
        rules = (Check(third, action="record"),)
        train(job_of("grpo", tiny), prompts_file, tmp_path, steps=6, alarms=rules, recording=recording)
        run = flowrl.open(tmp_path)
        assert run.recorded_steps == [4, 5] and run.texts(4) and not run.texts(3) and not run.texts(6)

    def test_checkpoint_writes_a_checkpoint_after_the_step(self, tiny: str, prompts_file: str, tmp_path: Path) -> None:
        rules = (Check(third, action="checkpoint"),)
        train(job_of("grpo", tiny), prompts_file, tmp_path, steps=5, alarms=rules)
        assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000003"]

    def test_stop_ends_the_run_with_the_alarm_after_a_checkpoint(
        self, tiny: str, prompts_file: str, tmp_path: Path
    ) -> None:
        rules = (Check(third, action="stop"),)
        with raises("run.stopped-by-alarm", step=3):
            train(job_of("grpo", tiny), prompts_file, tmp_path, steps=5, alarms=rules, checkpoint_every=4)
        assert described(tmp_path)["status"] == "failed" and len(lines(tmp_path / "alarms.jsonl")) == 1
        train(job_of("grpo", tiny), prompts_file, tmp_path, steps=5, alarms=rules, checkpoint_every=4, resume=True)
        assert described(tmp_path)["status"] == "finished"

    def test_what_is_no_rule_is_refused(self, tiny: str, prompts_file: str, tmp_path: Path) -> None:
        with pytest.raises(FlowrlError):
            train(job_of("grpo", tiny), prompts_file, tmp_path, alarms=("kl/ref > 1",))


def test_healthy_tiny_runs_fire_no_default_alarm(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    for name in ("grpo", "ppo"):
        train(job_of(name, tiny), prompts_file, tmp_path / name, steps=4)
        assert not flowrl.open(tmp_path / name).alarms
        written = described(tmp_path / name)["training"]["alarms"]
        assert written[0]["$type"].endswith("NotFinite") and len(written) == len(DEFAULT)
