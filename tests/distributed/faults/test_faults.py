"""What Ray itself raises is raised again by name, with what it was for and how to fix it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
from ray import exceptions

from flowrl.distributed.faults import faults
from flowrl.distributed.faults.faults import HostDiedError, answer
from flowrl.distributed.hosts.hosts import Hosts
from flowrl.distributed.place import Colocate
from flowrl.distributed.runner import RayRunner
from flowrl.errors import NodeError
from flowrl.run.placement.place import ProcessSpec
from tests.support.jobs import job_of

HOST = ProcessSpec(("actor",), 1, 2, (1,))
# Every error of Ray's that another process may cause, made as Ray makes it; whether a new process would mend it.
RAISED = {
    exceptions.ActorDiedError(): True,
    exceptions.ActorUnavailableError("no answer", b"a" * 16): True,
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
def test_whatever_ray_raises_is_named(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults.ray, "get", raising(error))
    with pytest.raises(NodeError, match=r"^update_actor in step 3 (lost|failed on) actor rank 1") as caught:
        answer(None, HOST, "update_actor in step 3", Colocate(2))
    assert isinstance(caught.value, HostDiedError) is RAISED[error]
    assert caught.value.__cause__ is error
    if isinstance(caught.value, HostDiedError):
        assert caught.value.host == HOST
        assert "Colocate(restart='role')" in str(caught.value)
    else:
        assert type(error).__name__ in str(caught.value)
    for kind, mend in (("ObjectStoreFullError", "--object-store-memory"), ("OutOfDiskError", "make room under")):
        assert (type(error).__name__ == kind) == (mend in str(caught.value))


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
def test_whatever_ray_raises_in_the_driver_says_what_for(
    error: Exception, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the prompts of a step are put into the object store."""
    runner = RayRunner(SimpleNamespace())  # type: ignore[arg-type]
    graph = job_of("grpo", tiny).graph
    monkeypatch.setattr(ray, "put", raising(error))
    node, columns = graph["batch"], {"uid": np.array(["a", "b"], dtype=object)}
    said = f"the column uid of the input batch failed in the driver: {type(error).__name__}"
    with pytest.raises(NodeError, match=said) as caught:
        runner.put(node, columns)
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("error", [error for error, gone in RAISED.items() if gone], ids=lambda e: type(e).__name__)
def test_a_process_that_ray_says_is_gone_counts_as_dead(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts: Any = Hosts.__new__(Hosts)
    hosts.actors = {HOST: SimpleNamespace(pid=SimpleNamespace(remote=lambda: "ping"))}
    monkeypatch.setattr(ray, "wait", lambda refs, **_: (list(refs), []))
    monkeypatch.setattr(ray, "get", raising(error))
    assert hosts.dead([HOST]) == [HOST]
