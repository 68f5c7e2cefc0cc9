"""Scheduled parameters and nodes that run in some steps, in runs and resumed runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flowrl import INJECTED, After, Metrics, Now, PromptData, Validation, When, algorithm, operator
from flowrl import columns as c
from flowrl.core.graphs.plan import Plan
from flowrl.operators import (
    GAE,
    Generate,
    KLShape,
    Mismatch,
    OldLogProb,
    PPOClip,
    RefLogProb,
    Repeat,
    Reward,
    Sync,
    UpdateActor,
    UpdateCritic,
    Value,
    Whiten,
)
from flowrl.records import PromptBatch
from flowrl.run.engine.local import local_steps
from flowrl.run.prediction.costs import Costs
from flowrl.run.prediction.prediction import predict
from flowrl.run.training.job import Job
from flowrl.schedules import Cosine, Linear
from tests.run.training.interrupted import without_times
from tests.support.errors import raises
from tests.support.jobs import PROMPTS, job_of, weights_of
from tests.support.rewards import digits
from tests.support.runs import TIMES, train

COEF, TEMPERATURE, CLIP = Linear(0.5, 0.1, steps=4), Cosine(1.2, 0.8, steps=4), Linear(0.3, 0.1, steps=4)


@operator
def clock(advantages: c.Advantages, *, scale: float = 1.0, now: Now = INJECTED, metrics: Metrics = INJECTED) -> None:
    """Log the step and a parameter."""
    metrics.max("clock/step", now.step)
    metrics.max("clock/scale", scale)


def scheduled_job(folder: str) -> Job:
    """PPO with schedules for KL coefficient and temperature, whose actor starts after the critic."""
    return job_of("ppo", folder, n=2).edit(
        set={"kl_shape.coef": COEF, "generate.temperature": TEMPERATURE, "update_actor.loss.clip_low": CLIP},
        when={"update_actor": When(every=2, start=2)},
        insert={"clock": After("gae", clock(scale=Linear(1.0, 2.0, steps=2)))},
    )


def numbers(lines: Any) -> list[dict[str, float]]:
    return [{k: v for k, v in line.items() if not k.startswith(TIMES)} for line in lines]


def test_steps_use_their_scheduled_parameters_also_after_resuming(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    data = {"steps": 6, "checkpoint_every": 3, "validation": Validation(PromptData(prompts_file), every=3)}
    uninterrupted = train(scheduled_job(tiny), prompts_file, tmp_path / "uninterrupted", **data)
    steps = uninterrupted.metrics
    assert [step["kl/coef"] for step in steps] == pytest.approx([COEF.at(k) for k in range(6)])
    assert [step["clock/step"] for step in steps] == list(range(6))
    assert [step["clock/scale"] for step in steps] == [1.0, 1.5, 2.0, 2.0, 2.0, 2.0]
    assert [step["step"] for step in steps if "actor/grad_norm" in step] == [3, 5]  # metrics count from 1
    assert [step["step"] for step in steps if "timing/sync" in step] == [3, 5]
    assert all("critic/grad_norm" in step for step in steps)

    cut = {**data, "steps": 3}
    train(scheduled_job(tiny), prompts_file, tmp_path / "cut", **cut)
    resumed = train(scheduled_job(tiny), prompts_file, tmp_path / "cut", **data, resume=True)
    assert numbers(resumed.metrics) == numbers(steps)
    # the interrupted run validated after its last step, step 3
    assert without_times(tmp_path / "cut" / "metrics.jsonl") == without_times(
        tmp_path / "uninterrupted" / "metrics.jsonl"
    )


def test_a_step_without_an_update_does_not_change_the_version(tiny: str) -> None:
    job = job_of("ppo", tiny, n=2).edit(when={"update_actor": When(every=2, start=1)})
    steps = local_steps(Plan(job.graph), job.build(3), 3)
    actor, critic = steps.runner.engines["actor"], steps.runner.engines["critic"]
    steps.sync()
    before, seen = weights_of(actor), []
    for step in range(4):
        ran: list[str] = []
        result = steps.step(PROMPTS, step, return_nodes=["generate", "update_actor"], on_node=ran.append)
        sampled = set(result.columns["generate"]["policy_version"].tolist())
        now = weights_of(actor)
        moved = any(not torch.equal(before[name], now[name]) for name in now)
        seen.append((sampled, actor.version, critic.version, moved, "sync" in result.values, "sync" in ran))
        assert ("update_actor" in result.columns) == ("update_actor" in ran) == moved
        assert ("actor/grad_norm" in result.metrics) == moved
        before = now
    assert seen == [
        ({0}, 0, 1, False, False, False),  # no sync: the engine's version does not change
        ({0}, 1, 2, True, True, True),
        ({1}, 1, 3, False, False, False),
        ({1}, 2, 4, True, True, True),
    ]


@algorithm
def lines(batch: PromptBatch) -> Any:
    """The graph of `scheduled_job`, written without edits."""
    prompts = Repeat(2)(batch)
    rollout = Generate(temperature=TEMPERATURE, max_new_tokens=6)(prompts)
    old = OldLogProb()(rollout)
    mismatch = Mismatch()(rollout.rollout_log_probs, old, rollout.response_mask)
    scores = Reward(digits)(rollout, prompts)
    rewards = KLShape(COEF)(scores, old, RefLogProb()(rollout), rollout.response_mask)
    adv = GAE()(rewards, (values := Value()(rollout)), rollout.response_mask)
    clock(scale=Linear(1.0, 2.0, steps=2))(adv.advantages)
    white = Whiten()(adv.advantages, rollout.response_mask)
    critic = UpdateCritic()(rollout, values, adv.returns)
    actor = UpdateActor(PPOClip(CLIP)).when(every=2, start=2)(rollout, old, white)
    return Sync()(actor), critic, mismatch


def test_eager_calls_and_the_executor_are_bit_equal(tiny: str) -> None:
    job = scheduled_job(tiny)
    assert not job.graph.edit(name="lines").diff(lines()).changed
    steps = local_steps(Plan(job.graph), job.build(5), 5)
    steps.sync()
    walked = [steps.step(PROMPTS, step).metrics.compute() for step in range(4)]
    by_hand = []
    with job.eager(5) as session:
        for step in range(4):
            receipt, critic, _ = lines.step(PromptBatch(**{name: PROMPTS[name] for name in PromptBatch._fields}))
            assert repr(receipt) == "<skipped>" if step != 2 else receipt.version == 1
            assert critic.version == step + 1
            merged = Metrics()
            for metrics in session.metrics.values():
                merged.merge(metrics)
            by_hand.append(merged.compute())
    assert by_hand == walked


def test_costs_of_a_run_with_conditional_nodes_predict_its_steps(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    job = scheduled_job(tiny)
    train(job, prompts_file, tmp_path / "run", steps=4)
    prediction = predict(job.graph, None, 4, Costs.of(tmp_path / "run"))
    always = predict(job.graph.edit(when={"update_actor": When()}), None, 4, Costs.of(tmp_path / "run"))
    assert prediction.seconds > 0 and "generate" in prediction.path
    assert always.busiest >= prediction.busiest


def test_a_validation_has_the_parameters_of_its_step_and_the_keys_of_step_0(tiny: str) -> None:
    job = scheduled_job(tiny)
    steps = local_steps(Plan(job.graph.edit(drop=["update_critic"])), job.build(3), 3)
    steps.sync()
    first, later = (steps.step(PROMPTS, 0, now=now, return_nodes=["generate"]) for now in (0, 1))
    assert [one.metrics["kl/coef"].compute() for one in (first, later)] == pytest.approx([0.5, 0.4])
    assert later.metrics["clock/step"].compute() == 1
    assert later.columns["generate"]["temperature"].unique().tolist() == pytest.approx([TEMPERATURE.at(1)])


def test_a_job_with_an_idle_step_is_refused(tiny: str) -> None:
    job = scheduled_job(tiny).edit(when={"generate": When(every=2)})
    with raises("graph.idle-step", step=2):
        job.refuse_unready()


def test_a_direct_call_must_pass_the_step() -> None:
    ones = torch.ones(1, 2)
    with raises("session.no-job", node="clock", parameter="now"):
        clock(ones)
    assert clock(ones, now=Now(3)) is None
