"""Tests of `in_flight.py` and `nodes.py`: steps in flight with a region in rounds.

They cover what such steps collect, sample, report and join, and how they resume.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from flowrl import After, PromptBatch, When, algorithm
from flowrl.core.graphs.plan import Plan
from flowrl.data.sources.prompts import PromptStream
from flowrl.errors import NodeError
from flowrl.graph import Graph
from flowrl.graphs import grpo
from flowrl.operators import Collect, Filter, Generate, GroupAdvantage, Repeat, Reward, Spread
from flowrl.run.engine.local import local_steps
from flowrl.run.engine.result import StepResult
from flowrl.schedules import Linear
from tests.nightly import nightly
from tests.run.engine.collecting import PROMPTS, TARGET, N, collecting, constant, stream_of
from tests.support.errors import raises
from tests.support.jobs import write_prompts
from tests.support.kernel import LengthPenalty, exact
from tests.support.runs import Recorder, train, without_times

pytestmark = pytest.mark.runs


def run(job: Any, stream: PromptStream, steps: int = 3, return_nodes: Sequence[str] = ("collect",)) -> list[StepResult]:
    with job.open() as executor:
        executor.sync()
        draw = functools.partial(lambda step, n: stream.next(n), n=PROMPTS)
        return list(executor.run(draw, range(steps), return_nodes=return_nodes, more=stream.next))


def expected_groups(stream: PromptStream, steps: int) -> list[tuple[list[str], int, int, int]]:
    """The expected groups of each step, with the numbers of offered groups, rounds and surplus groups."""
    expected = []
    for _ in range(steps):
        selected: list[str] = []
        offered = rounds = surplus = 0
        while len(selected) < TARGET:
            batch = stream.next(PROMPTS if not rounds else TARGET - len(selected))
            good = [uid for uid, truth in zip(batch["uid"], batch["ground_truth"], strict=True) if not int(truth) % 2]
            surplus += max(0, len(selected) + len(good) - TARGET)
            selected += good[: TARGET - len(selected)]
            offered, rounds = offered + len(batch), rounds + 1
        expected.append((selected, offered, rounds, surplus))
    return expected


@pytest.fixture
def data(tmp_path: Path) -> str:
    return write_prompts(tmp_path / "prompts.jsonl", 40)


def test_groups_that_pass_the_gate_are_collected_in_data_order(tiny: str, data: str) -> None:
    stream, again = stream_of(tiny, data), stream_of(tiny, data)
    results, expected = run(collecting(tiny), stream), expected_groups(again, 3)
    assert stream.position == again.position
    for result, (uids, offered, rounds, surplus) in zip(results, expected, strict=True):
        collected = result.columns["collect"]
        assert collected["uid"].tolist() == [uid for uid in uids for _ in range(N)]
        found = {key: result.metrics[f"collect/{key}"].value for key in ("offered", "kept", "rounds", "surplus")}
        assert found == {"offered": offered, "kept": TARGET, "rounds": rounds, "surplus": surplus}
        assert result.metrics["reward/mean"].weight == offered * N
        assert result.metrics["reward/kept_mean"].weight == TARGET * N
        scores = collected["token_level_scores"].double().sum()
        assert result.metrics["reward/kept_mean"].value == pytest.approx(float(scores))
    assert max(rounds for *_, rounds, _ in expected) > 1


def test_nodes_downstream_of_an_idle_collector_do_not_run(tiny: str, data: str) -> None:
    stream, again = stream_of(tiny, data), stream_of(tiny, data)
    job = collecting(tiny).edit(when={"collect": When(every=2)})
    steps = local_steps(Plan(job.graph), job.build(0), 0)  # a job refuses steps in which no sink runs
    steps.sync()
    results = steps.run(lambda step: stream.next(PROMPTS), range(3), return_nodes=("collect",), more=stream.next)
    first, second, third = results
    expected = expected_groups(again, 1)
    again.next(PROMPTS)
    expected += expected_groups(again, 1)
    assert stream.position == again.position
    for result, (uids, *_) in zip((first, third), expected, strict=True):
        assert result.columns["collect"]["uid"].tolist() == [uid for uid in uids for _ in range(N)]
    assert "collect" not in second.columns
    assert set(second.seconds) == {"repeat", "generate", "reward"}
    assert second.metrics["reward/mean"].weight == PROMPTS * N


def test_a_collector_has_the_scheduled_parameters_of_its_step(tiny: str, data: str) -> None:
    job = collecting(tiny, on_underfill="train", groups=Linear(TARGET, 2, steps=2))
    results = run(job, stream_of(tiny, data))
    assert [result.metrics["collect/kept"].value for result in results] == [6, 4, 2]
    assert results[0].metrics["collect/rounds"].value > 1


def test_rows_of_several_rounds_are_joined_unchanged(tiny: str, data: str) -> None:
    """Rounds have different widths; each joined row has its prompt, response and rollout log-probs."""
    job = collecting(tiny)
    results = run(job, stream_of(tiny, data), return_nodes=("collect", "old_log_prob"))
    for result in results:
        collected, old = result.columns["collect"], result.columns["old_log_prob"]["old_log_probs"]
        width = collected["response_mask"].shape[1]
        assert collected["input_ids"].shape[1] > width
        assert torch.equal(
            collected["attention_mask"][:, -width:] | ~collected["response_mask"],
            torch.ones_like(collected["response_mask"]),
        )
        assert old == pytest.approx(collected["rollout_log_probs"], abs=1e-5)  # the model agrees with the engine


def test_dynamic_sampling_trains_three_steps(tiny: str, data: str, tmp_path: Path) -> None:
    """One edit turns GRPO into dynamic sampling."""
    job = collecting(tiny).edit(set={"update_actor.mini_batch": 8})
    finished = train(job, data, tmp_path / "run", prompts=PROMPTS)
    assert len(finished.metrics) == 3
    for step in finished.metrics:
        assert step["collect/kept"] == TARGET
        assert step["actor/grad_norm"] > 0
        assert step["reward/mean"] != step["reward/kept_mean"]


@pytest.mark.parametrize("rounds_killed", [slice(1, None, 3), nightly(slice(None))], ids=["some", "all"])
def test_a_run_killed_in_any_round_resumes_with_the_same_rows(
    rounds_killed: slice, tiny: str, data: str, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"prompts": PROMPTS, "steps": 2, "checkpoint_every": 1}
    recorder = Recorder()
    uninterrupted = train(collecting(tiny), data, tmp_path / "uninterrupted", [recorder], **settings)
    rounds = recorder.calls.count(("node", "generate"))
    assert rounds > 3

    class Killer(Recorder):
        def node(self, name: str) -> None:
            super().node(name)
            if self.calls.count(("node", "generate")) == killed and name == "reward":
                raise KeyboardInterrupt

    for killed in range(1, rounds + 1)[rounds_killed]:
        folder = tmp_path / f"killed-{killed}"
        with pytest.raises(KeyboardInterrupt):
            train(collecting(tiny), data, folder, [Killer()], **settings)
        resumed = train(collecting(tiny), data, folder, resume=True, **settings)
        assert without_times(list(resumed.metrics)) == without_times(list(uninterrupted.metrics))


# ---- too few groups


@pytest.mark.parametrize("rounds", [1, 2])
def test_on_underfill_selects_error_training_on_fewer_groups_or_repetition(rounds: int, tiny: str, data: str) -> None:
    with pytest.raises(NodeError, match=r"^collect failed in step 1: DataError: ") as caught:
        run(collecting(tiny, rounds=rounds), stream_of(tiny, data), 1)
    assert caught.value.facts["node"] == "collect"
    [fewer] = run(collecting(tiny, rounds=rounds, on_underfill="train"), stream_of(tiny, data), 1)
    few = fewer.columns["collect"]
    assert 0 < len(few) < TARGET * N
    [filled] = run(collecting(tiny, rounds=rounds, on_underfill="repeat"), stream_of(tiny, data), 1)
    full = filled.columns["collect"]
    assert len(full) == TARGET * N
    assert len(set(full["uid"])) == TARGET
    assert full[: len(few)].equal(few)
    again = full[torch.arange(len(few), len(full)) % len(full)]
    assert all("+" in uid for uid in again["uid"])
    for row in range(len(few), len(full)):
        assert torch.equal(full["input_ids"][row], few["input_ids"][row % len(few)])
        assert full["uid"][row].partition("+")[0] == few["uid"][row % len(few)]
    assert filled.metrics["collect/repeated"].value == TARGET - len(few) // N


@pytest.mark.parametrize("on_underfill", ["error", "train", "repeat"])
def test_a_step_without_any_group_is_an_error(on_underfill: str, tiny: str, data: str) -> None:
    job = collecting(tiny, constant, rounds=2, on_underfill=on_underfill)
    with pytest.raises(NodeError, match=r"^collect failed in step 1: DataError: "):
        run(job, stream_of(tiny, data), 1)


def test_a_single_step_that_needs_further_prompts_is_refused(tiny: str, data: str) -> None:
    stream = stream_of(tiny, data)
    with collecting(tiny).open() as executor:
        executor.sync()
        with raises("step.no-further-prompts", graph="grpo", node="collect"):
            executor.step(stream.next(PROMPTS), 0)


# ---- refused graphs

GRPO = grpo(exact, n=N)
COLLECT = After("reward", Collect(Spread(), groups=TARGET))


def test_mini_batch_size_is_checked_before_launch_and_the_plan_shows_the_loop() -> None:
    graph = GRPO.edit(insert={"collect": COLLECT}, set={"update_actor.mini_batch": 12})
    assert not graph.check(prompts=5)  # always 6 groups of 4
    [finding] = graph.edit(set={"update_actor.mini_batch": 16}).check(prompts=4)
    assert finding.message.startswith("mini_batch=16 does not divide the 24 rows of a step (6 prompts x 4)")
    fewer = graph.edit(set={"collect.on_underfill": "train"})
    assert [finding.rule for finding in fewer.check(prompts=5)] == ["FR004"]
    assert not fewer.edit(set={"update_actor.mini_batch": 2}).check(prompts=5)
    loop = "at most 8 times in a step, on further prompts, until collect is full:\n  repeat, generate, reward, collect"
    assert loop in str(Plan(graph))
    assert 'collect -.->|"again<br/>at most 8 rounds"| batch' in graph.mermaid()


def two_collects() -> Graph:
    return GRPO.edit(insert={"one": COLLECT, "two": After("reward", Collect(Spread(0.5), groups=2))})


@algorithm
def leaking(batch: PromptBatch) -> Any:
    prompts = Repeat(2)(batch)
    rollout = Generate()(prompts)
    scores = Reward(exact)(rollout, prompts)
    collected, passed, uid = Collect(Spread(), groups=2)(rollout, token_level_scores=scores, uid=prompts.uid)
    return GroupAdvantage()(passed, collected.response_mask, uid), LengthPenalty()(scores, rollout.response_mask)


@algorithm
def returned(batch: PromptBatch) -> Any:
    prompts = Repeat(2)(batch)
    rollout = Generate()(prompts)
    scores = Reward(exact)(rollout, prompts)
    collected, passed, uid = Collect(Spread(), groups=2)(rollout, token_level_scores=scores, uid=prompts.uid)
    return GroupAdvantage()(passed, collected.response_mask, uid), scores


def test_a_non_repeatable_region_is_refused() -> None:
    with raises("gate.several-collectors", nodes=("one", "two")):
        Plan(two_collects()).order  # noqa: B018
    with raises("gate.not-repeatable", gate="collect", node="reward"):
        Plan(returned()).order  # noqa: B018
    with raises("gate.not-repeatable", gate="collect", node="length_penalty"):
        Plan(leaking()).order  # noqa: B018
    assert Plan(GRPO.edit(insert={"filter": After("reward", Filter(Spread()))})).collector is None
