"""Processes that die, hang or raise during a step: the errors, the cleanup, and the recovery."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
import torch.distributed as dist
from ray.exceptions import ObjectLostError

from flowrl.distributed.faults.faults import Failure, HostDiedError, chain, result_of
from flowrl.distributed.place import Colocate, Split
from flowrl.errors import BindError, EngineError, NodeError, SyncError
from flowrl.graphs import grpo, ppo
from tests.on_ray.process_leaks import ends, leaves_nothing, process_ids
from tests.on_ray.toys import Desk, ToyTrainer, ToyTrainerEngine, assert_same_numbers, kill_blocked, toy_job
from tests.support.errors import raises
from tests.support.jobs import prompt_batch, proto
from tests.support.rewards import digits

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]

PROMPTS = [[11, 12], [13], [14, 15, 16, 17, 18]]
GRAPH = ppo(digits, n=2, max_new_tokens=6)
# The role in whose process each node runs; None is the general host.
HOME = {
    "repeat": None,
    "generate": "rollout",
    "old_log_prob": "actor",
    "mismatch": None,
    "ref_log_prob": "ref",
    "value": "critic",
    "reward": None,
    "gae": None,
    "update_critic": "critic",
    "update_actor": "actor",
    "sync": "rollout",
}


def batch() -> Any:
    return proto(prompt_batch(PROMPTS))


def process_of(executor: Any, role: str | None, rank: int = 0) -> int:
    plan = next((p for p in executor.runner.hosts.processes if role in p.roles and p.rank == rank), None)
    return process_ids(executor)[plan]


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """flowrl's warnings, without those that Ray logs at any time."""
    return [record.getMessage() for record in caplog.records if record.name.startswith("flowrl.")]


def kill_at(executor: Any, node: str, role: str | None) -> Callable[[str], None]:
    """SIGKILL the process of a role as a node starts, once; by then the process is gone."""
    armed = [True]

    def on_node(name: str) -> None:
        if name == node and armed:
            armed.clear()
            pid = process_of(executor, role)
            os.kill(pid, signal.SIGKILL)
            assert ends(pid)

    return on_node


def uninterrupted(folder: Path, tiny: str, steps: int, graph: Any = GRAPH) -> tuple[list[dict[str, float]], str]:
    with toy_job(graph, folder, tiny).open(seed=5) as executor:
        executor.sync()
        results = [executor.step(batch(), step) for step in range(steps)]
    return [result.metrics.compute() for result in results], results[-1].values["sync"]["receipt"].digest


@pytest.mark.timeout(900)
def test_every_role_is_rebuilt_and_no_row_trained_twice(
    tiny: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each node loses its process as it starts; then during calls, between steps, twice, and all at once."""
    caplog.set_level(logging.WARNING, "flowrl")
    desk = Desk(str(tmp_path / "ray"))
    calls = ["rollout.generate", "actor.log_probs", "critic.update", "actor.update", "rollout.sync", "actor.weights"]
    steps = len(HOME) + len(calls) + 4
    metrics, digest = uninterrupted(tmp_path / "local", tiny, steps)
    job = toy_job(GRAPH, tmp_path / "ray", tiny, place=Split(2, 1, restart="role"))
    found = []
    with leaves_nothing() as processes, job.open(seed=5) as executor:
        executor.sync()
        for node, role in HOME.items():
            caplog.clear()
            found.append(executor.step(batch(), len(found), on_node=kill_at(executor, node, role)))
            [warning] = warnings_of(caplog)
            host = "the general host" if role is None else f"{role} rank 0"
            named = warning.removesuffix(warning[warning.index(f" in step {len(found)}") :])
            assert named == node or role is HOME.get(named) is None  # the general host runs several concurrently
            assert f"lost {host}, whose process died" in warning
        for call in calls:
            caplog.clear()
            thread = kill_blocked(desk, call)
            found.append(executor.step(batch(), len(found)))
            thread.join()
            [warning] = warnings_of(caplog)
            assert f"in step {len(found)}" in warning
            assert f"lost {call.partition('.')[0]} rank 0" in warning
        os.kill(pid := process_of(executor, "actor"), signal.SIGKILL)  # between steps
        assert ends(pid)
        found.append(executor.step(batch(), len(found)))
        threads = [kill_blocked(desk, "actor.load_checkpoint")]  # and while it is rebuilt
        found.append(executor.step(batch(), len(found), on_node=kill_at(executor, "update_actor", "actor")))
        threads.append(kill_blocked(desk, "critic.save_checkpoint"))  # and at the very end
        found.append(executor.step(batch(), len(found)))
        for thread in threads:
            thread.join()

        def kill_all(name: str) -> None:
            if name == "update_actor" and not gone:
                gone.extend(process_ids(executor).values())
                for pid in gone:
                    os.kill(pid, signal.SIGKILL)

        gone: list[int] = []
        result = executor.step(batch(), len(found), on_node=kill_all)
        found.append(result)
        processes += [*gone, *process_ids(executor).values()]
    for one, expected in zip(found, metrics, strict=True):
        assert_same_numbers(one.metrics.compute(), expected)
    assert result.values["sync"]["receipt"].digest == digest


@pytest.mark.parametrize(
    ("call", "task", "host"),
    [
        ("rollout.generate", "generate in step 2", "rollout rank 0"),
        ("actor.update", "update_actor in step 2", "actor rank 0"),
        ("ref.wake", "ref_log_prob in step 2, waking,", "ref rank 0"),
    ],
)
def test_an_error_names_the_dead_process_and_nothing_leaks(
    call: str, task: str, host: str, tiny: str, tmp_path: Path
) -> None:
    desk = Desk(str(tmp_path / "desk"))
    job = toy_job(grpo(digits, n=2, max_new_tokens=4), tmp_path / "desk", tiny, place=Colocate(1, deadline=120))
    with leaves_nothing() as processes, job.open() as executor:
        processes += process_ids(executor).values()
        executor.sync()
        executor.step(batch(), 0)
        thread = kill_blocked(desk, call)
        with raises("host.died", task=task, host=host) as caught:
            executor.step(batch(), 1)
        thread.join()
        assert "Colocate(restart='role')" in caught.value.message


def test_an_error_names_the_general_host_if_it_dies(tiny: str, tmp_path: Path) -> None:
    """Also if only the readers of its columns notice it."""
    job = toy_job(grpo(digits, n=2, max_new_tokens=4), tmp_path / "desk", tiny, place=Split(1, 1, deadline=120))
    with leaves_nothing() as processes, job.open() as executor:
        processes += process_ids(executor).values()
        executor.sync()
        with raises("host.died", host="the general host") as caught:
            # Its columns may outlive it briefly.
            executor.step(batch(), 0, on_node=kill_at(executor, "update_actor", None))
            executor.step(batch(), 1)
        assert caught.value.facts["task"] in ("update_actor in step 1", "repeat in step 2")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("call", "task", "host"),
    [
        ("actor.update", "update_actor in step 1", "actor rank 0"),
        ("rollout.wake", "sync in step 1, waking,", "rollout rank 0"),
    ],
)
def test_an_error_names_a_hanging_process_within_the_deadline(
    call: str, task: str, host: str, tiny: str, tmp_path: Path
) -> None:
    desk = Desk(str(tmp_path / "desk"))
    with leaves_nothing() as processes:
        place = Colocate(1, deadline=12)
        job = toy_job(grpo(digits, n=2, max_new_tokens=4), tmp_path / "desk", tiny, place=place)
        with job.open() as executor:
            processes += process_ids(executor).values()
            executor.sync()
            desk.block(call)
            thread = threading.Thread(target=desk.blocked, args=(call,))
            thread.start()
            started = time.monotonic()
            with raises("host.stuck", task=task, host=host, seconds=12.0):
                executor.step(batch(), 0)
            assert time.monotonic() - started < 12 + 150  # the deadline of one node, and the earlier nodes
            thread.join()


def test_a_step_is_repeated_after_an_engine_ended_itself(
    tiny: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In the same process, which continues; without restart="role", the error ends the run."""
    caplog.set_level(logging.WARNING, "flowrl")
    graph = grpo(digits, n=2, max_new_tokens=4)
    metrics, digest = uninterrupted(tmp_path / "local", tiny, 3, graph)
    desk = Desk(str(tmp_path / "desk"))
    with toy_job(graph, tmp_path / "desk", tiny, place=Colocate(1, restart="role")).open(seed=5) as executor:
        executor.sync()
        found = []
        for step in range(3):
            if step == 1:
                desk.fail("rollout.generate", EngineError)
            found.append(executor.step(batch(), step))
        [warning] = warnings_of(caplog)
        assert warning.startswith("generate failed in step 2 on rollout rank 0: EngineError")
        assert sum(event["what"] == "build" for event in desk.events()) == 3
        desk.fail("rollout.generate")
        with pytest.raises(NodeError, match=r"rollout\.generate was set to fail"):
            executor.step(batch(), 3)
    for one, expected in zip(found, metrics, strict=True):
        assert_same_numbers(one.metrics.compute(), expected)
    assert found[-1].values["sync"]["receipt"].digest == digest


@pytest.mark.timeout(900)
def test_a_dead_rank_is_rebuilt_with_the_other_ranks_and_the_numbers_are_equal(tiny: str, tmp_path: Path) -> None:
    """The other ranks end too, and are rebuilt with it."""
    graph = grpo(digits, n=2, max_new_tokens=4)
    metrics, digest = uninterrupted(tmp_path / "local", tiny, 2, graph)
    place = Colocate(3, restart="role")
    job = toy_job(graph, tmp_path / "desk", tiny, {"actor": 3, "ref": 2}, place)
    with leaves_nothing() as processes, job.open(seed=5) as executor:
        executor.sync()
        found = [executor.step(batch(), 0)]
        processes += process_ids(executor).values()
        pid = process_of(executor, "actor", 2)

        def on_node(name: str) -> None:
            if name == "update_actor" and ids[0] == process_of(executor, "actor"):
                os.kill(pid, signal.SIGKILL)

        ids = [process_of(executor, "actor", rank) for rank in range(3)]
        found.append(executor.step(batch(), 1, on_node=on_node))
        assert all(ends(one) for one in ids)
        processes += process_ids(executor).values()
    for one, expected in zip(found, metrics, strict=True):
        assert_same_numbers(one.metrics.compute(), expected)
    assert found[-1].values["sync"]["receipt"].digest == digest


class CollectiveTrainerEngine(ToyTrainerEngine):
    """Its ranks wait for each other as sharded ones do; rank 1 dies in a call for which the desk has a file."""

    def _enter(self, method: str, **more: Any) -> None:
        super()._enter(method, **more)
        if method in ("weights", "save_checkpoint", "load_checkpoint"):
            due = self.desk.folder / f"{method}.die"
            if self.rank == 1 and due.exists():
                due.unlink()
                os.kill(os.getpid(), signal.SIGKILL)
            dist.barrier()


class CollectiveTrainer(ToyTrainer):
    def build(self, context: Any) -> CollectiveTrainerEngine:
        if (due := Path(self.desk) / "build.die").exists() and context.rank == 1:
            due.unlink()
            raise BindError("this rank refuses", code="backend.made-up", rank=1)
        return CollectiveTrainerEngine("actor", self, context)


@pytest.mark.timeout(900)
def test_an_error_names_the_rank_that_died_in_a_collective_call(
    tiny: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 0 fails because of it, often before its death is known: in an export, a save, and a load."""
    caplog.set_level(logging.WARNING, "flowrl")
    graph = grpo(digits, n=2, max_new_tokens=4)
    metrics, digest = uninterrupted(tmp_path / "local", tiny, 4, graph)
    desk = tmp_path / "desk"
    job = toy_job(graph, desk, tiny, place=Colocate(2, restart="role"))
    job = job.edit(bind={"actor": CollectiveTrainer(desk=str(desk), folder=tiny, ranks=2)})
    with leaves_nothing() as processes, job.open(seed=5) as executor:
        executor.sync()
        found = [executor.step(batch(), 0)]
        for calls in (["weights"], ["save_checkpoint"], ["weights", "load_checkpoint"]):
            caplog.clear()
            for call in calls:
                (desk / f"{call}.die").touch()
            found.append(executor.step(batch(), len(found)))
            warnings = warnings_of(caplog)
            assert len(warnings) == len(calls)
            assert all("lost actor rank 1, whose process died" in warning for warning in warnings)
        processes += process_ids(executor).values()
        (desk / "weights.die").touch()
        (desk / "build.die").touch()  # no process died, so the error is that of the backend, as without Ray
        with raises("backend.made-up", rank=1) as caught:
            executor.step(batch(), 4)
        assert isinstance(caught.value, BindError) and caught.value.message == "this rank refuses"
    for one, expected in zip(found, metrics, strict=True):
        assert_same_numbers(one.metrics.compute(), expected)
    assert found[-1].values["sync"]["receipt"].digest == digest


@pytest.mark.parametrize("call", ["rollout.wake", "rollout.sleep"])
def test_an_engine_that_fails_in_sleep_or_wake_is_reported_and_recovered(
    call: str, tiny: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "flowrl")
    graph = grpo(digits, n=2, max_new_tokens=4)
    metrics, _ = uninterrupted(tmp_path / "local", tiny, 2, graph)
    desk = Desk(str(tmp_path / "desk"))
    job = toy_job(graph, tmp_path / "desk", tiny, place=Colocate(1, restart="role"))
    with leaves_nothing() as processes, job.open(seed=5) as executor:
        processes += process_ids(executor).values()
        executor.sync()
        found = [executor.step(batch(), 0)]
        desk.fail(call, EngineError)
        found.append(executor.step(batch(), 1))
        [warning] = warnings_of(caplog)
        turn = "waking" if call == "rollout.wake" else "putting to sleep"
        assert f" in step 2, {turn}, failed on rollout rank 0: EngineError: {call} was set to fail" in warning
        desk.fail(call)
        with raises("step.node-failed", host="rollout rank 0", error="ValueError") as caught:
            executor.step(batch(), 2)
        assert f" in step 3, {turn}," in caught.value.facts["task"]
        assert isinstance(caught.value.__cause__, ValueError)
    for one, expected in zip(found, metrics, strict=True):
        assert_same_numbers(one.metrics.compute(), expected)


def test_a_failure_has_its_causes_except_those_that_cannot_be_pickled() -> None:
    class Local(Exception):
        """A local class, which cannot be pickled."""

    outer = SyncError("not synced")
    outer.__cause__ = Local()
    outer.__cause__.__cause__ = EngineError("ended itself")
    received = pickle.loads(pickle.dumps(Failure.of(outer, "sync failed")))
    found = [(type(error), getattr(error, "message", None)) for error in chain(received.error())]
    assert found == [(NodeError, "sync failed"), (SyncError, "not synced"), (EngineError, "ended itself")]
    assert not received.lost
    outer.__cause__.__cause__ = ObjectLostError("ab" * 28, "somebody", "somewhere")
    assert Failure.of(outer, "sync failed").lost


def test_a_process_that_cannot_start_is_not_reported_as_died() -> None:
    class Broken:
        def __init__(self) -> None:
            raise ImportError("no module of that name on this machine")

        def pid(self) -> int:
            return os.getpid()

    actor: Any = ray.remote(Broken).options(num_cpus=0).remote()
    with raises("host.start-failed", task="loading actor", host="the general host") as caught:
        result_of(actor.pid.remote(), None, "loading actor", Colocate(1))
    assert not isinstance(caught.value, HostDiedError)
    assert "no module of that name" in caught.value.message and "out-of-memory" not in caught.value.message
