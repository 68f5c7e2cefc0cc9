"""Function operators, schedules, conditional nodes and skipped steps are bit-equal on Ray and in one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flowrl import After, PromptData, Training, Validation, operator
from flowrl import columns as c
from flowrl.backends import TorchRollout
from flowrl.distributed.place import Colocate, Split
from flowrl.operators import SyncReference
from tests.on_ray.parity.test_parity import numbers
from tests.on_ray.process_leaks import leaves_nothing
from tests.run.engine.test_over_time import scheduled_job
from tests.run.engine.test_skips import GATES
from tests.run.engine.test_skips import job as skipping_job
from tests.support.jobs import job_of

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900), pytest.mark.usefixtures("cluster")]


def local_operator() -> Any:
    """A local class, which other processes cannot import."""

    @operator
    def local(advantages: c.Advantages, *, factor: float = 1.0) -> c.Advantages:
        return advantages * factor

    return local


def test_a_run_on_ray_is_bit_equal_to_one_process(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    job = scheduled_job(tiny).edit(insert={"local": After("whiten", local_operator()(factor=0.5))})
    data = PromptData(prompts_file)
    training = Training(
        job, data, steps=4, prompts=3, validation=Validation(data, every=2), folder=str(tmp_path / "local")
    )
    local = training.run()
    with leaves_nothing():
        remote = replace(training, job=replace(job, place=Colocate(1)), folder=str(tmp_path / "ray")).run()
    assert numbers(local.metrics) == numbers(remote.metrics)
    assert numbers(local.validations) == numbers(remote.validations)
    assert [step["step"] for step in remote.metrics if "actor/grad_norm" in step] == [3]
    assert [step["clock/step"] for step in remote.metrics] == [0, 1, 2, 3]


def test_steps_that_a_gate_skips_are_those_of_one_process(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    made = skipping_job(tiny, GATES["collect"])
    training = Training(made, PromptData(prompts_file), steps=5, prompts=1, folder=str(tmp_path / "local"))
    local = training.run()
    remote = replace(training, job=replace(made, place=Colocate(1)), folder=str(tmp_path / "ray")).run()
    assert numbers(local.metrics) == numbers(remote.metrics)
    assert {step["gate/skipped"] for step in remote.metrics} == {0.0, 1.0}


def test_a_reference_follows_a_policy_of_another_process(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    made = job_of("grpo", tiny, n=2).edit(
        insert={"reference": After("update_actor", SyncReference(alpha=0.5))},
        bind={"rollout": TorchRollout(tiny, device="cpu")},
    )
    training = Training(made, PromptData(prompts_file), steps=3, prompts=2, folder=str(tmp_path / "local"))
    local = training.run()
    remote = replace(training, job=replace(made, place=Split(train=1, rollout=1)), folder=str(tmp_path / "ray")).run()
    first, second = numbers(local.metrics), numbers(remote.metrics)
    assert all(one["ref/version"] == step for step, one in enumerate(second, start=1))
    for one, other in zip(first, second, strict=True):
        assert other["kl/ref"] == pytest.approx(one["kl/ref"], rel=1e-4, abs=1e-7)
