"""Errors of Ray are re-raised with the task, the host, Ray's text and the fix; all errors survive pickling."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
from ray import exceptions

from flowrl.distributed.faults import faults
from flowrl.distributed.faults.faults import Failure, HostDiedError, chain, died, result_of
from flowrl.distributed.faults.ray_processes import RayDiedError
from flowrl.distributed.hosts.hosts import Hosts
from flowrl.distributed.place import Colocate
from flowrl.distributed.runner import RayRunner
from flowrl.errors import EngineError, FlowrlError, NodeError, SyncError
from flowrl.protocols.mesh import Mesh
from flowrl.run.placement.place import ProcessSpec
from flowrl.sync.group import Interrupted
from tests.support.errors import raises
from tests.support.jobs import job_of

HOST = ProcessSpec(("actor",), 1, Mesh(fsdp=2), (1,))
# Errors of Ray that another process may cause, constructed as Ray does; True if a new process would recover.
RAISED = {
    exceptions.ActorDiedError(): True,
    exceptions.ActorUnavailableError("no result_of", b"a" * 16): True,
    exceptions.OutOfMemoryError("Task was killed due to the node running low on memory."): True,
    exceptions.NodeDiedError("the node died"): True,
    exceptions.WorkerCrashedError(): True,
    exceptions.LocalRayletDiedError(): True,
    exceptions.ObjectStoreFullError("no room for 3 GB"): False,
    exceptions.OutOfDiskError("nothing left"): False,
    exceptions.RaySystemError("broken pipe"): False,
    exceptions.RpcError("unavailable", 14): False,
    exceptions.TaskCancelledError(): False,
    exceptions.RuntimeEnvSetupError("no such package"): False,
    exceptions.ActorUnschedulableError("nowhere"): False,
    exceptions.ActorPlacementGroupRemoved(): False,
    exceptions.PendingCallsLimitExceeded("too many"): False,
    exceptions.ObjectLostError("ab" * 28, "somebody", "somewhere"): False,
    exceptions.UnserializableException("traceback"): False,
}


def raising(error: Exception) -> Any:
    def get(*_: Any, **__: Any) -> Any:
        raise error

    return get


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
def test_errors_of_ray_name_the_task_and_the_host(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults.ray, "get", raising(error))
    code = "host.died" if RAISED[error] else "cluster.ray-failed"
    with raises(code, task="update_actor in step 3", host="actor rank 1") as caught:
        result_of(None, HOST, "update_actor in step 3", Colocate(2))
    assert isinstance(caught.value, HostDiedError) is RAISED[error]
    assert caught.value.__cause__ is error
    assert next(iter(str(error).strip().splitlines()), "").rstrip(".") in caught.value.message
    if isinstance(caught.value, HostDiedError):
        assert caught.value.host == HOST
        assert "Colocate(restart='role')" in caught.value.message
    else:
        assert caught.value.facts["error"] == type(error).__name__ in caught.value.message
    for kind, fix in (("ObjectStoreFullError", "--object-store-memory"), ("OutOfDiskError", "free space under")):
        assert (type(error).__name__ == kind) == (fix in caught.value.message)


def test_a_call_that_times_out_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults.ray, "get", raising(exceptions.GetTimeoutError("too long")))
    with raises("host.stuck", task="update_actor in step 3", host="actor rank 1", seconds=60.0):
        result_of(None, HOST, "update_actor in step 3", Colocate(2, deadline=60.0))


def test_an_actor_that_fails_to_start_is_not_reported_as_died(monkeypatch: pytest.MonkeyPatch) -> None:
    error = exceptions.ActorDiedError(exceptions.RayTaskError("__init__", "no such module", ImportError()))
    monkeypatch.setattr(faults.ray, "get", raising(error))
    with raises("host.start-failed", task="starting", host="the general host") as caught:
        result_of(None, None, "starting", Colocate(2))
    assert not isinstance(caught.value, HostDiedError) and "no such module" in caught.value.message


def test_an_error_of_a_worker_keeps_code_and_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    cause = SyncError("no receipt", code="sync.made-up", version=3)
    monkeypatch.setattr(faults.ray, "get", raising(exceptions.RayTaskError("wake", "trace", cause)))
    with raises("sync.made-up", task="waking", host="actor rank 1", version=3, error="SyncError") as caught:
        result_of(None, HOST, "waking", Colocate(2))
    assert caught.value.message == "waking failed on actor rank 1: SyncError: no receipt"
    assert caught.value.__cause__ is cause


@pytest.mark.parametrize(
    "error",
    [
        died(HOST, "update_actor in step 3", Colocate(2), "the actor died"),
        RayDiedError("Ray died", code="cluster.ray-died", process="the raylet"),
        Interrupted("gone", code="sync.interrupted", timeout=3.0),
        EngineError("ended"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_survive_pickling(error: FlowrlError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.code, copy.facts) == (type(error), str(error), error.code, error.facts)
    assert getattr(copy, "host", None) == getattr(error, "host", None)


def test_a_failure_record_has_code_and_facts_of_its_error() -> None:
    failure = Failure.of(SyncError("no receipt", code="sync.made-up", version=3), "sync failed", node="sync", step=2)
    error = pickle.loads(pickle.dumps(failure)).error()
    assert type(error) is NodeError and error.message == "sync failed"
    assert (error.code, error.facts) == (
        "sync.made-up",
        {"node": "sync", "step": 2, "error": "SyncError", "version": 3},
    )
    [cause] = [*chain(error)][1:]
    assert isinstance(cause, SyncError) and cause.code == "sync.made-up"
    assert Failure.of(ValueError("no"), "gae failed").code == "step.node-failed"


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
def test_errors_of_the_object_store_name_the_task(error: Exception, tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver puts the prompts of a step into the object store."""
    runner = RayRunner(SimpleNamespace())  # type: ignore[arg-type]
    graph = job_of("grpo", tiny).graph
    monkeypatch.setattr(ray, "put", raising(error))
    node, columns = graph["batch"], {"uid": np.array(["a", "b"], dtype=object)}
    task = "the column uid of the input batch"
    with raises("cluster.ray-failed", task=task, error=type(error).__name__) as caught:
        runner.put(node, columns)
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("error", [error for error, gone in RAISED.items() if gone], ids=lambda e: type(e).__name__)
def test_a_process_that_ray_reports_gone_counts_as_dead(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts: Any = Hosts.__new__(Hosts)
    hosts.actors = {HOST: SimpleNamespace(pid=SimpleNamespace(remote=lambda: "ping"))}
    monkeypatch.setattr(ray, "wait", lambda refs, **_: (list(refs), []))
    monkeypatch.setattr(ray, "get", raising(error))
    assert hosts.dead([HOST]) == [HOST]
