"""Tests of the steps whose update a gate skips: `in_flight.py`, `execution_graph.py` and `step_snapshot.py`.

A run with skipped steps must equal one that is given only the other steps: same weights, moments of the optimizer,
learning rate, critic and state cells.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from flowrl import After, PromptBatch
from flowrl.backends import AdamW, TorchRollout
from flowrl.core.graphs.gate import Gate
from flowrl.core.graphs.plan import Plan
from flowrl.core.operators.when import SKIPPED
from flowrl.errors import NodeError
from flowrl.graphs import grpo
from flowrl.operators import (
    Collect,
    Filter,
    Generate,
    GroupAdvantage,
    KLShape,
    NormalizeReward,
    OldLogProb,
    Repeat,
    Reward,
    RolloutCorrection,
    Spread,
    Sync,
    UpdateActor,
)
from flowrl.operators.kl import AdaptiveKL
from flowrl.run.engine.in_flight import SKIPS
from flowrl.run.engine.result import StepResult
from flowrl.run.training.job import Job
from flowrl.schedules import Cosine
from tests.nightly import nightly
from tests.run.engine.collecting import constant, half, stream_of
from tests.run.training.interrupted import equal, flat
from tests.support.errors import raises
from tests.support.jobs import job_of
from tests.support.kernel import exact
from tests.support.runs import Recorder, train, without_times

pytestmark = pytest.mark.runs

STEPS, N = 8, 3
GATES: dict[str, Any] = {
    "filter": Filter(Spread(), on_underfill="skip"),
    "collect": Collect(Spread(), groups=1, rounds=2, on_underfill="skip"),
}


def job(folder: str, gate: Gate, reward: Any = half) -> Job:
    """PPO with an adaptive KL coefficient behind the gate and a running standard deviation before it."""
    trainer = {"schedule": Cosine(1.0, 0.0, steps=2 * STEPS, warmup=3)}
    made = job_of("ppo", folder, reward, optimizer=AdamW(lr=2e-3), trainer=trainer, n=N)
    return made.edit(
        replace={"kl_shape": KLShape(AdaptiveKL(target=0.01, horizon=20, coef=0.1))},
        insert={"scale": After("reward", NormalizeReward()), "gate": After("reward", gate)},
    )


def ahead(made: Job, folder: str, lag: int) -> Job:
    correction = {"correction": After("whiten", RolloutCorrection("token", "truncate", high=2.0))}
    own = {"rollout": TorchRollout(folder, device="cpu")}
    return made.edit(bind=own, insert=correction, lag=lag) if lag else made


def odd(result: StepResult) -> bool:
    return all(int(truth) % 2 for truth in result.columns["repeat"]["ground_truth"])


def weights(engines: Any) -> dict[str, Any]:
    return flat({role: engines[role].state_dict() for role in ("actor", "critic")})


def assert_equal(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a.keys() == b.keys() and [name for name in a if not equal(a[name], b[name])] == []


def skipped(results: Sequence[StepResult], gate: str = "gate") -> list[bool]:
    return [bool(result.metrics[f"{gate}/skipped"].value) for result in results]


@pytest.mark.parametrize("name", GATES)
def test_a_skipped_step_changes_nothing_but_the_data(name: str, tiny: str, prompts_file: str) -> None:
    with job(tiny, GATES[name]).open() as steps:
        steps.sync()
        stream = stream_of(tiny, prompts_file)
        nodes = ("repeat", "gate")
        results = list(steps.run(lambda s: stream.next(1), range(STEPS), return_nodes=nodes, more=stream.next))
        expected, state = weights(steps.runner.engines), {**steps.state}
    skips = skipped(results)
    assert True in skips[:-1] and False in skips[skips.index(True) :]
    assert skips == [odd(result) for result in results]
    never = {"update_actor", "update_critic", "sync", "kl_shape", "gae", "value"}
    for result, skip in zip(results, skips, strict=True):
        assert never.isdisjoint(result.seconds) if skip else never <= result.seconds.keys()
    assert state.pop(SKIPS) == len(skips) - 1 - max(i for i, skip in enumerate(skips) if not skip)

    # the same steps without the skipped ones, by a gate that never skips
    without = {"filter": Filter(Spread()), "collect": Collect(Spread(), groups=1, rounds=2)}[name]
    with job(tiny, without).open() as steps:
        steps.sync()
        stream = stream_of(tiny, prompts_file)
        for step, result in enumerate(results):
            rounds = [stream.next(1) for _ in range(int(getattr(result.metrics.get("gate/rounds"), "value", 1)))]
            if not skips[step]:
                draw = functools.partial(lambda _, left: next(left), left=iter(rounds))
                list(steps.run(draw, range(step, step + 1), more=draw))
        assert_equal(expected, weights(steps.runner.engines))
        assert state == steps.state and {"scale.moments", "kl_shape.beta"} < state.keys()


def test_with_a_lag_rows_have_the_version_of_the_updates_before(tiny: str, prompts_file: str) -> None:
    made = ahead(job(tiny, GATES["filter"]), tiny, 2)
    with made.open() as steps:
        steps.sync()
        stream = stream_of(tiny, prompts_file)
        nodes = ("repeat", "generate")
        results = list(steps.run(lambda s: stream.next(1), range(STEPS), lag=2, return_nodes=nodes))
    skips = skipped(results)
    assert True in skips and skips == [odd(result) for result in results]
    for step, result in enumerate(results):
        updates = skips[: max(0, step - 2)].count(False)
        assert set(result.columns["generate"]["policy_version"].tolist()) == {updates}


def at_skip(metrics: Sequence[Any]) -> int:
    """A skipped step between others, counted from 0."""
    skips = [step["gate/skipped"] for step in metrics]
    return next(i for i, skip in enumerate(skips) if i and skip and not skips[i - 1])


class Killer(Recorder):
    """Ends the run when the metrics of a step are written, before its checkpoint."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == self.at:
            raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("gate", "lag", "later"),
    [("filter", 0, 0), ("collect", 1, 1), nightly("filter", 1, 0), nightly("collect", 0, 1)],
)
def test_a_run_killed_at_a_skipped_step_or_the_next_resumes_to_the_same_numbers(
    gate: str, lag: int, later: int, tiny: str, prompts_file: str, tmp_path: Path
) -> None:
    made = ahead(job(tiny, GATES[gate]), tiny, lag)
    settings: dict[str, Any] = {"prompts": 1, "steps": STEPS, "checkpoint_every": 1}
    whole = train(made, prompts_file, tmp_path / "whole", **settings)
    skip = at_skip(whole.metrics)
    with pytest.raises(KeyboardInterrupt):
        train(made, prompts_file, tmp_path / "killed", [Killer(skip + 1 + later)], **settings)
    resumed = train(made, prompts_file, tmp_path / "killed", resume=True, **settings)
    assert without_times(list(resumed.metrics)) == without_times(list(whole.metrics))
    assert_equal(weights(resumed.engines), weights(whole.engines))
    found = [pq.read_table(path)["fate"].to_pylist() for path in sorted((whole.folder / "rows").glob("step-*"))]
    expected = [{"gate"} if step["gate/skipped"] else {"trained", "gate"} for step in whole.metrics]
    assert all(set(fates) <= fate for fates, fate in zip(found, expected, strict=True))


def test_too_many_skipped_steps_end_the_run_also_over_resume(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    made = job(tiny, Filter(Spread(), on_underfill="skip", max_skips=3), constant)
    settings: dict[str, Any] = {"prompts": 1, "steps": 6, "checkpoint_every": 1}
    for resume in (False, True):  # the second resumes after step 3
        with pytest.raises(NodeError) as caught:
            train(made, prompts_file, tmp_path / "run", resume=resume, **settings)
        assert caught.value.code == "gate.too-many-skips"
        assert caught.value.facts == {"node": "gate", "step": 4, "expected": 3}
    allowed = made.edit(set={"gate.max_skips": 15})
    assert len(train(allowed, prompts_file, tmp_path / "allowed", **settings).metrics) == 6


def test_an_alarm_tells_of_skipped_steps(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    run = train(job(tiny, GATES["filter"], constant), prompts_file, tmp_path / "run", prompts=1, steps=6)
    text = (tmp_path / "run" / "alarms.jsonl").read_text()
    assert '"rule": "Skips' in text and "gate/skipped" in text
    assert [step["gate/skipped"] for step in run.metrics] == [1.0] * 6


def test_gates_that_would_skip_too_late_are_refused() -> None:
    graph = grpo(exact, n=N)
    skip = Filter(Spread(), on_underfill="skip")
    inner = graph.edit(insert={"one": After("reward", skip)}).edit(
        insert={"two": After("group_advantage", Collect(Spread(), groups=2))}
    )
    with raises("gate.late-skip", gate="one", node="two"):
        Plan(inner).order  # noqa: B018
    assert Plan(graph.edit(insert={"one": After("reward", skip)})).skipping == ["one"]


def test_without_a_skipping_gate_no_cell_counts_steps(tiny: str, prompts_file: str) -> None:
    stream = stream_of(tiny, prompts_file)
    with job_of("grpo", tiny, half).open() as steps:
        steps.sync()
        list(steps.run(lambda s: stream.next(2), range(1)))
        assert SKIPS not in steps.state


def test_in_an_eager_step_nothing_is_trained_and_state_returns(tiny: str, prompts_file: str) -> None:
    made = job(tiny, GATES["filter"])
    batch = stream_of(tiny, prompts_file).next(6)
    rows = [i for i, truth in enumerate(batch["ground_truth"]) if int(truth) % 2]
    with made.eager() as session:
        for step, few in enumerate((batch, batch[rows])):
            session.begin_step(step)
            before = {**session.state}
            prompts = Repeat(N)(few.to_record(PromptBatch))
            rollout = Generate(max_new_tokens=6)(prompts)
            scores = NormalizeReward()(Reward(half)(rollout, prompts), rollout.response_mask)
            version = session.engines["actor"].version
            passed, kept, uid = GATES["filter"](rollout, token_level_scores=scores, uid=prompts.uid)
            old = OldLogProb()(passed)
            advantages = GroupAdvantage()(kept, passed.response_mask, uid)
            first = UpdateActor()(passed, old_log_probs=old, advantages=advantages)
            other = UpdateActor(prior_updates=1).named("other")
            Sync()(other(rollout, old_log_probs=OldLogProb()(rollout), advantages=scores))
            assert (first is SKIPPED) == bool(step)
            assert session.engines["actor"].version == version + (0 if step else 2)
            assert session.skipped == bool(step) and (session.state == before) == bool(step)
