"""Live weight updates on Ray: the version of each token, overlap, and processes that die during an update."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flowrl import After, Lag
from flowrl.backends import AdamW, TorchRollout
from flowrl.distributed.place import Split
from flowrl.episodes import Endpoint
from flowrl.operators import Collect, Interact, RolloutCorrection, Spread
from flowrl.run.engine.result import StepResult
from flowrl.run.engine.timeline import Span
from flowrl.run.training.job import Job
from tests.on_ray.faults.test_faults import process_of
from tests.on_ray.parity.test_episodes import Longer, speaks
from tests.on_ray.process_leaks import ends, leaves_nothing, process_ids
from tests.on_ray.steps.test_lag import overlap
from tests.run.engine.collecting import PROMPTS, TARGET, N, half, stream_of
from tests.run.engine.test_lag import log_probs
from tests.support.jobs import job_of, write_prompts

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900), pytest.mark.usefixtures("cluster")]

STEPS, LAG = 8, 2


def job_with_spans(folder: str) -> Job:
    """GRPO that collects groups by their prompts local_groups, and whose generation takes longer than its training."""
    correction = After("group_advantage", RolloutCorrection("token", "truncate", high=2.0))
    job = job_of("grpo", folder, half, optimizer=AdamW(lr=2e-4), n=N)
    return job.edit(
        insert={"collect": After("reward", Collect(Spread(), groups=TARGET, rounds=8)), "correction": correction},
        set={"generate.max_new_tokens": 160, "generate.ignore_eos": True},
        bind={"rollout": TorchRollout(folder, device="cpu")},
        lag=Lag(LAG, spans=True),
    )


def collected(
    job: Job, folder: str, data: str, after: Callable[[Any, int], None], on_node: Any = lambda name: None
) -> tuple[list[StepResult], list[Span]]:
    """The results of a run; `after` is called before the first step and after each."""
    stream, found = stream_of(folder, data), list[StepResult]()
    with job.open(seed=5) as executor:
        executor.sync()
        after(executor, 0)
        settings = {"lag": LAG, "return_nodes": ["collect"], "more": stream.next, "on_node": on_node}
        for result in executor.run(lambda step: stream.next(PROMPTS), range(STEPS), **settings):
            found.append(result)
            after(executor, len(found))
        return found, executor.timeline.spans


def groups(results: list[StepResult]) -> list[list[str]]:
    return [result.columns["collect"]["uid"].tolist() for result in results]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_prompts(tmp_path_factory.mktemp("data") / "prompts.jsonl", 40)


@pytest.fixture(scope="module")
def local_groups(tiny: str, data: str) -> list[list[str]]:
    """The groups that one process trains on."""
    return groups(collected(job_with_spans(tiny), tiny, data, lambda executor, step: None)[0])


def test_each_token_was_sampled_by_its_recorded_version(
    tiny: str, data: str, local_groups: list[list[str]], tmp_path: Path
) -> None:
    def keep(executor: Any, step: int) -> None:
        executor.save_pretrained("actor", tmp_path / str(step))

    with leaves_nothing():
        found, spans = collected(replace(job_with_spans(tiny), place=Split(1, 1)), tiny, data, keep)
    assert groups(found) == local_groups
    several = sum(of_several_versions(step, result, "collect", tmp_path) for step, result in enumerate(found))
    assert several, "no weights changed during a response"
    both = [[span for span in spans if span.name == name] for name in ("sync", "generate")]
    assert any(overlap(sync, generate) for sync in both[0] for generate in both[1])


def of_several_versions(step: int, result: StepResult, node: str, folder: Path) -> int:
    """Check that each token of a node's rows was sampled with its version; returns how many rows have several.

    Args:
        folder: has the weights of each version.
    """
    columns = dict(result.columns[node].columns)
    mask, versions = columns["response_mask"], columns["token_version"]
    columns["responses"] = columns["input_ids"][:, -mask.shape[1] :]
    assert set(versions[mask].tolist()) <= set(range(max(0, step - LAG), step + 1))
    assert columns["policy_version"].tolist() == versions.masked_fill(~mask, STEPS).amin(1).tolist()
    for version in versions[mask].unique().tolist():
        sampled, of = log_probs(folder / str(version), columns), versions == version
        assert torch.allclose(columns["rollout_log_probs"][of], sampled[of], atol=5e-5)
    assert result.metrics["queue/age_max"].value == int((step - versions[mask]).max())
    return int((versions.amax(1) > columns["policy_version"]).sum())


@pytest.mark.parametrize("environment", [Longer, Endpoint(speaks)], ids=["environment", "endpoint"])
def test_each_token_of_an_episode_was_sampled_by_its_recorded_version(
    environment: Any, tiny: str, data: str, tmp_path: Path
) -> None:
    """Over three turns with replies; whether weights change during one depends on timing."""
    correction = After("group_advantage", RolloutCorrection("token", "truncate", high=2.0))
    episodes = Interact(environment, max_turns=3, context=250, max_new_tokens=40)
    job = job_of("grpo", tiny, optimizer=AdamW(lr=2e-4), n=2).edit(
        replace={"generate": episodes},
        drop=["reward"],
        insert={"correction": correction},
        bind={"rollout": TorchRollout(tiny, device="cpu")},
        lag=Lag(LAG, spans=True),
    )
    stream, steps = stream_of(tiny, data), 5
    with leaves_nothing() as processes, replace(job, place=Split(1, 1)).open(seed=5) as executor:
        processes += process_ids(executor).values()
        executor.sync()
        executor.save_pretrained("actor", tmp_path / "0")
        found = executor.run(lambda step: stream.next(PROMPTS), range(steps), lag=LAG, return_nodes=["interact"])
        for step, result in enumerate(found):
            executor.save_pretrained("actor", tmp_path / str(step + 1))
            of_several_versions(step, result, "interact", tmp_path)
            assert result.columns["interact"]["turns"].tolist() == [3] * PROMPTS * 2
    assert step + 1 == steps


def test_processes_that_die_during_a_swap_are_rebuilt_and_the_same_rows_are_trained_on(
    tiny: str, data: str, local_groups: list[list[str]]
) -> None:
    """The trainer and then the engine, each just before weights change during responses."""
    killed, syncs, running = list[int](), 0, list[Any]()

    def kill(name: str) -> None:
        nonlocal syncs
        syncs += name == "sync"
        if name == "sync" and syncs in (2, 4):
            killed.append(running[0][("actor", "rollout")[len(killed)]])
            os.kill(killed[-1], signal.SIGKILL)
            assert ends(killed[-1])

    def know(executor: Any, step: int) -> None:
        running[:] = [{role: process_of(executor, role) for role in ("actor", "rollout")}]
        processes.extend(process_ids(executor).values())

    with leaves_nothing() as processes:
        job = replace(job_with_spans(tiny), place=Split(1, 1, restart="role"))
        found, _ = collected(job, tiny, data, know, kill)
    assert len(killed) == 2
    assert groups(found) == local_groups
