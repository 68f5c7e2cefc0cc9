"""The transport of weights, by the places of trainer and engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from flowrl.distributed.delivery import Delivery
from flowrl.protocols.backend import Backend
from flowrl.protocols.mesh import Mesh
from flowrl.run.placement.place import ProcessSpec
from flowrl.sync.route import Location, choose

HERE, THERE = "node a", "node b"


@pytest.mark.parametrize(
    ("senders", "receivers", "transport"),
    [
        ([Location(HERE, 1)], [Location(HERE, 1)], "in process"),
        ([Location(HERE, 1), Location(HERE, 2)], [Location(HERE, 1), Location(HERE, 2)], "in process"),
        ([Location(HERE, 1)], [Location(HERE, 1), Location(HERE, 2)], "object store"),  # only some ranks of the engine
        ([Location(HERE, 1)], [Location(HERE, 2)], "object store"),
        ([Location(HERE, 1), Location(THERE, 2)], [Location(HERE, 3)], "gloo"),  # all ranks send
        ([Location(HERE, 1), Location(HERE, 2)], [Location(HERE, 3)], "object store"),
        ([Location(HERE, 1)], [Location(THERE, 1)], "gloo"),  # process ids are local to a node
        ([Location(HERE, 1)], [Location(HERE, 2), Location(THERE, 3)], "gloo"),
        ([Location(HERE, 1, ("0",))], [Location(HERE, 2, ("0",))], "cuda ipc"),
        ([Location(HERE, 1, ("0",))], [Location(THERE, 2, ("0",))], "nccl"),
        (
            [Location(HERE, 1, ("0",)), Location(HERE, 2, ("1",))],
            [Location(HERE, 3, ("2",)), Location(HERE, 4, ("3",))],
            "nccl",
        ),
        ([Location(HERE, 1, ("0",))], [Location(HERE, 2, ("0",)), Location(HERE, 3, ("1",))], "object store"),
        ([Location(HERE, 1, ("0",))], [Location(HERE, 2, ("0",)), Location(THERE, 3, ("0",))], "gloo"),
        (
            [Location(HERE, 1, ("0",)), Location(HERE, 2)],
            [Location(HERE, 3, ("0",)), Location(HERE, 4)],
            "object store",
        ),
        ([Location(HERE, 1, ("0",))], [Location(THERE, 2)], "gloo"),
        ([Location(HERE, 1, ("0",))], [Location(HERE, 2)], "object store"),
    ],
)
def test_the_fastest_possible_transport_is_chosen(
    senders: list[Location], receivers: list[Location], transport: str
) -> None:
    by = (tuple(range(len(senders))),) * len(receivers)
    assert choose(senders, receivers) == (transport, ((0,),) * len(receivers) if transport == "cuda ipc" else by)


def test_trainer_ranks_send_to_receivers_on_the_same_gpu() -> None:
    """On GPUs shared by ranks of both sides, on two nodes, in any order."""
    trainer = [
        Location(HERE, 1, ("0",)),
        Location(HERE, 2, ("1",)),
        Location(THERE, 1, ("0",)),
        Location(THERE, 2, ("1",)),
    ]
    replicas = [
        Location(THERE, 3, ("1",)),
        Location(HERE, 3, ("0",)),
        Location(THERE, 4, ("0",)),
        Location(HERE, 4, ("1",)),
    ]
    assert choose(trainer, replicas) == ("cuda ipc", ((3,), (0,), (2,), (1,)))
    parallel = [Location(HERE, 3, ("0", "1")), Location(THERE, 3, ("0", "1"))]  # each receives on its first GPU
    assert choose(trainer, parallel) == ("cuda ipc", ((0,), (2,)))
    assert choose(trainer[:1], parallel) == ("gloo", ((0,), (0,)))


@pytest.mark.parametrize(
    ("slots", "nodes", "transport"), [((0, 1, 2), "aab", "gloo"), ((0, 1, 1), "abb", "object store")]
)
def test_hosts_that_take_turns_use_the_object_store(slots: tuple[int, ...], nodes: str, transport: str) -> None:
    """Two ranks of a trainer, and an engine that may share a slot with one of them."""
    trainer = [ProcessSpec(("actor",), rank, Mesh(fsdp=2), (slots[rank],)) for rank in range(2)]
    engine = ProcessSpec(("rollout",), 0, Mesh(), (slots[2],))
    locations = {host: Location(node, i) for i, (host, node) in enumerate(zip((*trainer, engine), nodes, strict=True))}
    ranks = {"actor": trainer, "rollout": [engine]}
    hosts: Any = SimpleNamespace(ranks=ranks.__getitem__, locations=locations, bindings={"rollout": Backend()})
    assert Delivery(hosts, "actor", "rollout", "sync").transport == transport
