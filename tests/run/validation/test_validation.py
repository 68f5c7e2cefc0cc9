"""Tests of `validation.py` and `validating.py`: when a `Validation` runs, and on which graph.

A validation does not change the numbers of training.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from flowrl import INJECTED, Metrics, Operator, PromptData, State, Validation
from flowrl import columns as c
from flowrl.core.graphs.after import After
from flowrl.errors import FlowrlError, NodeError, ParameterError
from flowrl.graphs import grpo
from flowrl.operators import Interact
from flowrl.operators.rows.held_out import pass_at_k
from flowrl.run.engine.timeline import Timeline
from tests.support.errors import raises
from tests.support.jobs import job_of, weights_of, write_prompts
from tests.support.kernel import exact
from tests.support.runs import Recorder, described, lines, train, without_times


class Runs(Operator):
    """Counts its calls as a metric; does not change the scores."""

    count = State(lambda self: 0)

    def __call__(self, token_level_scores: c.TokenLevelScores, metrics: Metrics = INJECTED) -> c.TokenLevelScores:
        self.count.value += 1
        metrics.max("runs", self.count.value)
        return token_level_scores


class FailsLater(Operator):
    """Fails in its second call of a validation."""

    seen: ClassVar[list[int]] = []
    validates: bool = False

    def __call__(self, token_level_scores: c.TokenLevelScores) -> c.TokenLevelScores:
        if self.validates:
            self.seen.append(len(token_level_scores))
            if len(self.seen) == 2:
                raise RuntimeError("out of luck")
        return token_level_scores


def test_a_validation_may_have_any_name() -> None:
    """The name prefixes metrics, so it may contain slashes, colons and spaces."""
    validation = Validation(PromptData("math.jsonl"), name="val/math: hard")
    assert validation.graph(grpo(exact))["repeat"].operator.rows_factor == 1


def test_a_validation_with_environment_rewards_needs_until() -> None:
    played = grpo(None).edit(replace={"generate": Interact(tools=[pass_at_k])}, drop=["reward"])
    with raises("run.validation", validation="val", node="reward") as caught:
        Validation(PromptData("math.jsonl"), changes={}).graph(played)
    assert "Validation(..., until='interact')" in caught.value.message
    assert Validation(PromptData("math.jsonl"), changes={}, until="interact").graph(played).sinks == ("interact",)


def test_each_validation_starts_with_its_own_initial_state(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    job = job_of("grpo", tiny).edit(insert={"runs": After("reward", Runs())})
    data = PromptData(prompts_file)
    validations = (
        Validation(data, every=1, name="a", until="runs", batch=12),
        Validation(data, every=1, name="b", until="runs", batch=5),
    )
    run = train(job, prompts_file, tmp_path, validation=validations)
    assert [metrics["runs"] for metrics in run.metrics] == [1, 2, 3]
    found = [(key, value) for line in run.validations for key, value in line.items() if key.endswith("/runs")]
    assert found == [("a/runs", 1), ("b/runs", 3)] * 4


def test_an_error_in_a_validation_names_the_validation_and_step(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    job = job_of("grpo", tiny).edit(insert={"later": After("reward", FailsLater())})
    changes = {"repeat.n": 1, "later.validates": True}
    validation = Validation(PromptData(prompts_file), every=2, name="own", until="later", changes=changes)
    with pytest.raises(NodeError, match=r"^later failed in the validation 'own' after step 2: RuntimeError: out of"):
        train(job, prompts_file, tmp_path, validation=validation)
    assert [span.step for span in Timeline.load(tmp_path / "trace.json").spans if span.name == "own/later"] == [
        None
    ] * 2


@pytest.mark.parametrize(("steps", "every", "expected"), [(5, 2, [0, 2, 4, 5]), (4, 2, [0, 2, 4]), (3, 10, [0, 3])])
def test_validations_run_before_the_first_step_periodically_and_after_the_last(
    tiny: str, prompts_file: str, tmp_path: Path, steps: int, every: int, expected: list[int]
) -> None:
    reporter = Recorder()
    validation = Validation(PromptData(prompts_file), every=every, batch=5)
    run = train(job_of("grpo", tiny), prompts_file, tmp_path, [reporter], steps=steps, validation=validation)
    assert [metrics["step"] for metrics in run.validations] == expected
    assert [call[1] for call in reporter.calls if call[0] == "validation"] == expected
    assert reporter.count("step") == steps
    assert ("node", "val") in reporter.calls


def test_a_validation_on_training_prompts_is_warned_of(
    tiny: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data, held_out = write_prompts(tmp_path / "a.jsonl", 12), tmp_path / "b.jsonl"
    rows = (tmp_path / "a.jsonl").read_text().splitlines(keepends=True)
    held_out.write_text("".join([*rows[:2], rows[2].replace('"content": "', '"content": "9+')]))
    job = job_of("grpo", tiny)
    for file in (str(held_out), data):
        train(job, data, tmp_path / Path(file).stem, steps=1, validation=Validation(PromptData(file), every=9))
    shared = [message for message in caplog.messages if "are also trained on" in message]
    assert [message[:37] for message in shared] == [
        "2 of 3 prompts of the validation 'val",
        "12 of 12 prompts of the validation 'v",
    ]


def test_validation_does_not_change_training(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    greedy = Validation(PromptData(prompts_file), every=1)
    sampled = Validation(PromptData(prompts_file), every=1, name="sampled", changes={"repeat.n": 3})
    plain = train(job_of("ppo", tiny, mini_batch=2), prompts_file, tmp_path / "a")
    validated = train(job_of("ppo", tiny, mini_batch=2), prompts_file, tmp_path / "b", validation=(greedy, sampled))
    assert without_times(list(validated.metrics)) == without_times(list(plain.metrics))
    trained = weights_of(validated.engines["actor"])
    assert all(torch.equal(trained[name], w) for name, w in plain.engines["actor"].weights())
    assert len(validated.validations) == 8


def test_changes_select_greedy_or_sampled_validation(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    data = PromptData(prompts_file)
    greedy = Validation(data, name="greedy", batch=5)
    again = Validation(data, name="again", batch=12)
    sampled = Validation(data, name="sampled", changes={"repeat.n": 3, "generate.temperature": 0.7})
    job = job_of("grpo", tiny)
    train(job, prompts_file, tmp_path, steps=1, validation=(greedy, again, sampled))
    responses: dict[str, list[str]] = {"greedy": [], "again": [], "sampled": []}
    for record in lines(tmp_path / "predictions.jsonl"):
        if record["step"] == 0:
            responses[record["validation"]].append(record["response"])
    assert len(responses["greedy"]) == 12
    assert responses["greedy"] == responses["again"]  # independent of the batch size
    assert len(responses["sampled"]) == 36
    assert any(len(set(responses["sampled"][i : i + 3])) > 1 for i in range(0, 36, 3))
    graph = sampled.graph(job.graph)
    assert graph.sinks == ("reward",)
    assert set(graph.nodes) == {"batch", "repeat", "generate", "reward"}
    assert job.graph["repeat"].operator != graph["repeat"].operator  # the job's graph is unchanged


def test_initial_validations_do_not_depend_on_the_algorithm(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    validation = Validation(PromptData(prompts_file), every=1, changes={"repeat.n": 2})
    ppo = train(job_of("ppo", tiny), prompts_file, tmp_path / "a", steps=1, validation=validation)
    grpo = train(job_of("grpo", tiny), prompts_file, tmp_path / "b", steps=1, validation=validation)
    assert ppo.validations[0] == grpo.validations[0]
    assert ppo.validations[1] != grpo.validations[1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"changes": {"repeat.m": 1}}, r"set={'repeat.m': ...}\) does not name a parameter; repeat has n"),
        ({"changes": {"sampler.n": 1}}, r"names 'sampler', not a node of grpo; it has batch, repeat"),
        ({"changes": {"repeat": 1}}, r"set={'repeat': ...}\) does not name a parameter"),
        ({"changes": {"repeat.n": 0}}, r"n=0"),
        ({"until": "judge"}, r"ends at until='judge', but grpo has no node 'judge'; .*until='reward'\)"),
    ],
)
def test_an_invalid_validation_is_refused_before_a_folder_is_created(
    tiny: str, prompts_file: str, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    validation = Validation(PromptData(prompts_file), **settings)
    with pytest.raises(FlowrlError, match=message):
        train(job_of("grpo", tiny), prompts_file, tmp_path / "run", validation=validation)
    assert not (tmp_path / "run").exists()


def test_two_validations_of_one_name_are_refused(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    duplicates = (Validation(PromptData(prompts_file)), Validation(PromptData(prompts_file)))
    with pytest.raises(ParameterError, match="two validations are named 'val'"):
        train(job_of("grpo", tiny), prompts_file, tmp_path, validation=duplicates)


# ---- a goal


def test_a_run_ends_when_a_validation_reaches_its_goal(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    data = PromptData(prompts_file)
    validations = (
        Validation(data, every=2, name="low", goal=0.0),  # every reward reaches it
        Validation(data, every=5, name="rare"),
        Validation(data, every=1, name="high", goal=7.0),  # no reward reaches it
    )
    settings = {"validation": validations, "steps": 9, "checkpoint_every": 5, "save_model": True}
    run = train(job_of("grpo", tiny), prompts_file, tmp_path, **settings)
    assert [metrics["step"] for metrics in run.metrics] == [1, 2]
    names = [(line["step"], key.partition("/")[0]) for line in run.validations for key in line if "reward/mean" in key]
    assert names[3:] == [(1, "high"), (2, "low"), (2, "rare"), (2, "high")]  # all validations run after the last step
    assert described(tmp_path)["status"] == "finished" and (tmp_path / "actor" / "config.json").exists()
    again = train(job_of("grpo", tiny), prompts_file, tmp_path, resume=True, **settings)
    assert len(again.metrics) == 2  # a resumed run has reached its goal, too
    higher = {**settings, "validation": validations[1:], "steps": 4}
    longer = train(job_of("grpo", tiny), prompts_file, tmp_path, resume=True, **higher)
    assert [metrics["step"] for metrics in longer.metrics] == [1, 2, 3, 4]


def test_a_goal_without_a_reward_is_refused_before_the_first_step(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    validation = Validation(PromptData(prompts_file), until="generate", goal=0.5)
    with raises("run.validation", validation="val", missing="val/reward/mean"):
        train(job_of("grpo", tiny), prompts_file, tmp_path, validation=validation)
    assert not (tmp_path / "metrics.jsonl").exists()
