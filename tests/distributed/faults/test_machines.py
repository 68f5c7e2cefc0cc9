"""The error of a job names a machine that does not respond."""

from __future__ import annotations

import socket
from typing import Any

import pytest
import ray

from flowrl.distributed.faults import ray_processes
from flowrl.distributed.faults.machines import naming_lost_machine
from flowrl.errors import NodeError
from flowrl.protocols.mesh import Mesh
from flowrl.run.placement.place import ProcessSpec
from flowrl.sync.route import Location
from tests.support.errors import raises

LOCATIONS = {
    ProcessSpec(("actor",), rank, Mesh(fsdp=3), (rank,)): Location(node, rank) for rank, node in enumerate("abb")
}


@pytest.fixture
def ports(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The ports of Ray on two machines of the job and on another one, of which only the first responds."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as closed:
        found = {"other": closed.getsockname()[1], "a": one.getsockname()[1], "b": closed.getsockname()[1]}
        closed.close()
        monkeypatch.setattr(ray, "nodes", lambda: [node(name, port) for name, port in found.items()])
        yield found


def node(name: str, port: int, alive: bool = True) -> dict[str, Any]:
    return {"NodeID": name, "NodeManagerAddress": "127.0.0.1", "NodeManagerPort": port, "Alive": alive}


def test_the_machine_its_processes_and_the_task_are_named(ports: dict[str, int]) -> None:
    error = NodeError("update in step 3 failed on actor rank 0", code="host.died", task="update", host="actor rank 0")
    facts = {"machine": f"127.0.0.1:{ports['b']}", "processes": ("actor[1]", "actor[2]"), "task": "update"}
    with raises("host.machine-lost", **facts) as caught, naming_lost_machine(LOCATIONS):
        raise error
    assert caught.value.__cause__ is error
    assert caught.value.message.startswith("update lost the machine")


def test_a_machine_that_ray_gave_up_is_named(ports: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """It may accept connections that no process reads."""
    monkeypatch.setattr(ray, "nodes", lambda: [node("a", ports["a"]), node("b", ports["a"], alive=False)])
    with raises("host.machine-lost", processes=("actor[1]", "actor[2]")), naming_lost_machine(LOCATIONS):
        raise NodeError("lost", code="host.died")


@pytest.mark.usefixtures("ports")
def test_other_errors_are_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those while all machines respond, those of Ray on the driver's machine, and those of other kinds."""
    here = {plan: location for plan, location in LOCATIONS.items() if location.node == "a"}
    with raises("host.died"), naming_lost_machine(here):
        raise NodeError("lost", code="host.died")
    with pytest.raises(ValueError, match="own"), naming_lost_machine(LOCATIONS):
        raise ValueError("own")
    monkeypatch.setattr(ray_processes, "_gone", [("raylet", "it died")])
    with raises("cluster.ray-died"), naming_lost_machine(LOCATIONS):
        raise NodeError("it died", code="cluster.ray-died")
