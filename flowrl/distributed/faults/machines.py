"""Machines of a job that are lost: powered off, or cut off from the network."""

from __future__ import annotations

import socket
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import ray

from flowrl.distributed.faults import ray_processes as watch
from flowrl.errors import NodeError
from flowrl.run.placement.place import ProcessSpec
from flowrl.sync.route import Location

_SECONDS = 5


@contextmanager
def naming_lost_machine(locations: Mapping[ProcessSpec, Location]) -> Iterator[None]:
    """Raise a `NodeError` in the block as one that names the machine of these processes that is lost, if there is one:
    the processes there are gone, and those elsewhere fail as they wait for them."""
    try:
        yield
    except NodeError as error:
        nodes = {location.node for location in locations.values()}
        silent = next(_silent(nodes), None) if nodes and not watch.is_gone() else None
        if silent is None:
            raise
        node, machine = silent
        task = error.facts.get("task", "The job")
        processes = sorted(plan.name for plan, location in locations.items() if location.node == node)
        raise NodeError(
            f"{task} lost the machine {machine} with {', '.join(processes)}: Ray no longer responds there. Start Ray "
            f"on it again, or use a place with fewer slots; then continue from the last checkpoint with "
            f"Training(resume=True).",
            code="host.machine-lost",
            **{**error.facts, "machine": machine, "processes": processes},
        ) from error


def _silent(nodes: Collection[str]) -> Iterator[tuple[str, str]]:
    """Those of these Ray nodes that do not respond, with their addresses."""
    for node in ray.nodes():
        if node["NodeID"] in nodes:
            host, port = node["NodeManagerAddress"], node["NodeManagerPort"]
            if not node["Alive"] or not _responds(host, port):
                yield node["NodeID"], f"{host}:{port}"


def _responds(host: str, port: int) -> bool:
    """Whether something accepts connections there: if not, Ray itself notices it later."""
    try:
        socket.create_connection((host, port), _SECONDS).close()
    except OSError:
        return False
    return True
