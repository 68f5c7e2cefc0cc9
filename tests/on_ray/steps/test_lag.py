"""Generation with a lag on Ray: the numbers of one process, overlap, and processes that die with steps in flight."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flowrl import After, PromptData, Training
from flowrl.backends import AdamW, TorchRollout
from flowrl.distributed.faults.faults import HostDiedError
from flowrl.distributed.hosts import hosts
from flowrl.distributed.place import Split
from flowrl.graph import Graph
from flowrl.graphs import ppo
from flowrl.operators import Collect, RolloutCorrection, Spread
from flowrl.records import Receipt
from flowrl.run.engine.timeline import Span, Timeline
from tests.on_ray.faults.test_faults import batch, process_of
from tests.on_ray.parity.test_parity import numbers
from tests.on_ray.process_leaks import ends, leaves_nothing, process_ids
from tests.on_ray.toys import Desk, ToyRollout, ToyRolloutEngine, assert_same_numbers, toy_job
from tests.support.jobs import job_of
from tests.support.rewards import digits

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900), pytest.mark.usefixtures("cluster")]

CORRECTION = RolloutCorrection("token", "truncate", high=2.0)
TOY = ppo(digits, n=2, max_new_tokens=6).edit(lag=2, insert={"correction": After("whiten", CORRECTION)})


def deterministic(run: Any) -> list[dict[str, float]]:
    """`numbers` without the number of waiting batches, which depends on timing."""
    return [{key: n for key, n in one.items() if key != "queue/filled"} for one in numbers(run.metrics)]


@pytest.mark.parametrize("collects", [False, True])
def test_a_run_with_lag_is_bit_equal_to_one_process_and_overlaps_generation_and_training(
    collects: bool, tiny: str, prompts_file: str, tmp_path: Path
) -> None:
    inserted: dict[str, Any] = {"correction": After("group_advantage", CORRECTION)}
    if collects:
        inserted["collect"] = After("reward", Collect(Spread(), groups=3, rounds=8))
    job = job_of("grpo", tiny, optimizer=AdamW(lr=1e-3)).edit(
        lag=2, insert=inserted, bind={"rollout": TorchRollout(tiny, device="cpu")}
    )
    training = Training(job, PromptData(prompts_file), steps=5, prompts=4, folder=str(tmp_path / "local"))
    local = training.run()
    with leaves_nothing():
        remote = replace(training, job=replace(job, place=Split(1, 1)), folder=str(tmp_path / "ray")).run()
    assert deterministic(local) == deterministic(remote)
    assert [line["queue/age_max"] for line in local.metrics] == [0, 1, 2, 2, 2]
    spans = Timeline.load(remote.folder / "trace.json").spans
    assert any(overlap(sampled, trained) for sampled, trained in pairs(spans))


def pairs(spans: list[Span]) -> Iterator[tuple[Span, Span]]:
    """Pairs of generation for a later step, and training."""
    for trained in (span for span in spans if span.name in ("update_actor", "old_log_prob", "reward")):
        for sampled in (span for span in spans if span.name == "generate"):
            assert sampled.step is not None and trained.step is not None
            if sampled.step > trained.step:
                yield sampled, trained


def overlap(one: Span, other: Span) -> bool:
    return one.start < other.end and other.start < one.end


def run_toy(graph: Graph, steps: int, executor: Any, on_node: Any = lambda name: None) -> list[dict[str, float]]:
    executor.sync()
    results = executor.run(lambda step: batch(), range(steps), lag=graph.lag.versions, on_node=on_node)
    return [result.metrics.compute() for result in results]


def test_dead_processes_are_rebuilt_and_each_row_is_sampled_with_the_same_weights(tiny: str, tmp_path: Path) -> None:
    steps, roles = 8, ["actor", "rollout", "critic", None]
    with toy_job(TOY, tmp_path / "local", tiny).open(seed=5) as executor:
        expected = run_toy(TOY, steps, executor)
    job = toy_job(TOY, tmp_path / "ray", tiny, place=Split(2, 1, restart="role"))
    launched, killed = 0, list[int]()

    with leaves_nothing() as processes, job.open(seed=5) as executor:

        def kill(name: str) -> None:
            nonlocal launched
            launched += 1
            if launched % 23 == 0 and roles:
                killed.append(process_of(executor, roles.pop(0)))
                os.kill(killed[-1], signal.SIGKILL)
                assert ends(killed[-1])

        found = run_toy(TOY, steps, executor, kill)
        processes += [*killed, *process_ids(executor).values()]
    assert not roles
    for one, other in zip(found, expected, strict=True):
        assert_same_numbers(one, other)


class CountingEngine(ToyRolloutEngine):
    """Its receipts have the number of its sync in place of seconds."""

    syncs = 0

    def sync(self, source: Any) -> Receipt:
        self.syncs += 1
        self.receipt = super().sync(source)._replace(seconds=float(self.syncs))
        return self.receipt


class Counting(ToyRollout):
    def build(self, context: Any) -> CountingEngine:
        return CountingEngine("rollout", self, context)


def test_results_before_a_failover_are_discarded(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Receipts and columns of surviving hosts, which are delayed until the lost process is rebuilt.

    First the reference is lost while the engine receives weights; then the engine, which has just generated, as the
    driver fetches its columns while others run.
    """
    monkeypatch.setattr(hosts, "GRACE_SECONDS", 2)  # a delayed host does not respond
    graph, steps = TOY.edit(lag=1), 5
    with toy_job(graph, tmp_path / "local", tiny).open(seed=5) as executor:
        expected = run_toy(graph, steps, executor)
    desk, held_calls = Desk(str(tmp_path / "ray")), list[str]()
    job = toy_job(graph, desk.folder, tiny, place=Split(2, 1, restart="role"))
    job = job.edit(bind={"rollout": Counting(desk=str(desk.folder), folder=tiny)})
    with leaves_nothing() as processes, job.open(seed=5) as executor:
        runner, ids = executor.runner, process_ids(executor)
        recover, secure, launch = runner.recover, runner.secure, runner.launch
        [engine], [ref] = map(runner.hosts.ranks, ("rollout", "ref"))

        def lose(host: Any) -> None:
            os.kill(ids[host], signal.SIGKILL)
            assert ends(ids[host])
            raise HostDiedError("its result is lost", host)

        def launched(task: Any) -> None:
            held_before = len(held_calls)
            if (task.node.name, task.step) == [("sync", 0), ("ref_log_prob", 2), None][held_before]:
                held_calls.append(["rollout.sync", "ref.log_probs"][held_before])
                desk.hold(held_calls[-1])
            launch(task)
            if held_before == 0 and held_calls:
                lose(ref)

        def secured(node: Any, outputs: Any) -> Any:
            if len(held_calls) == 2 and node.name == "generate" and not ends(ids[engine], 0):
                lose(engine)
            return secure(node, outputs)

        def recovered(error: Any) -> None:
            recover(error)
            desk.release(held_calls[-1])

        executor.sync()
        for name, patch in {"recover": recovered, "secure": secured, "launch": launched}.items():
            monkeypatch.setattr(runner, name, patch)
        found = list(executor.run(lambda step: batch(), range(steps), lag=1))
        processes += [*ids.values(), *process_ids(executor).values()]
    assert held_calls == ["rollout.sync", "ref.log_probs"]
    for one, other in zip(found, expected, strict=True):
        assert_same_numbers(one.metrics.compute(), other)
    syncs = [event["what"] for event in desk.events() if event["what"] == "sync"]
    receipt = found[0].values["sync"]["receipt"]
    assert receipt.seconds == 4, "the first sync, the delayed one, that of the recovery, and the step's"
    assert len(syncs) >= 4 + steps
