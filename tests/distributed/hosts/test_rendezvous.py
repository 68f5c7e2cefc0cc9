"""Stores listen only at the given address."""

from __future__ import annotations

import socket
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flowrl.distributed.hosts import hosts
from flowrl.distributed.hosts import rendezvous as meeting
from flowrl.distributed.hosts.host import Host
from flowrl.distributed.hosts.hosts import Hosts
from flowrl.distributed.hosts.rendezvous import LOOPBACK, c10d, stay_on_loopback, store_at
from flowrl.protocols.mesh import Mesh
from flowrl.run.placement.place import ProcessSpec
from flowrl.run.placement.turns import Turns
from flowrl.sync.route import Location


def addresses_of(port: int) -> set[str]:
    """The addresses of the listeners at a port, in the kernel's notation."""
    lines = [line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()]
    found = [line[1].split(":") for line in lines if line[3] == "0A"]
    return {address for address, at in found if int(at, 16) == port}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/net")
def test_a_store_at_loopback_listens_on_no_other_interface() -> None:
    store = store_at(LOOPBACK, 30.0)
    assert addresses_of(store.port) == {"0100007F"}
    client = c10d.TCPStore(LOOPBACK, store.port, None, False, timeout=timedelta(seconds=30))
    client.set("key", "value")
    assert store.get("key") == b"value"
    assert store.timeout == timedelta(seconds=30)


def test_each_store_has_its_own_port() -> None:
    stores = [store_at(LOOPBACK, 30.0) for _ in range(3)]
    assert len({store.port for store in stores}) == 3


def test_loopback_is_set_only_where_the_environment_names_no_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(3, "eth0"), (1, "lo")])
    environment = {"GLOO_SOCKET_IFNAME": "eth0"}
    monkeypatch.setattr(meeting.os, "environ", environment)
    stay_on_loopback()
    assert environment == {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "lo"}
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(3, "eth0")])
    environment.clear()
    stay_on_loopback()
    assert environment == {}


@pytest.mark.parametrize("nodes", [("a", "a", "a"), ("a", "a", "b"), ("b", "a", "a")])
def test_a_job_on_one_machine_uses_loopback_only(nodes: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks on one machine that send to an engine on another machine do not."""
    plans = [ProcessSpec(("actor",), 0, Mesh(fsdp=2), (0,)), ProcessSpec(("actor",), 1, Mesh(fsdp=2), (1,))]
    plans.append(ProcessSpec(("rollout",), 0, Mesh(), (2,)))
    calls: list[tuple[str, Any]] = []

    def ask(self: Hosts, to: list[ProcessSpec], what: str, method: str, *args: Any, **_: Any) -> list[Any]:
        calls.append((method, args[0] if method == "rendezvous_address" else args[2]))
        return [("address", 1)] * len(to)

    monkeypatch.setattr(Hosts, "ask", ask)
    monkeypatch.setattr(Hosts, "_locate", lambda *_: [Location(*seat) for seat in zip(nodes, (0, 1, 0), strict=True)])
    stub: Any = SimpleNamespace(options=lambda **_: stub, remote=lambda *_: None)
    monkeypatch.setattr(hosts, "ray", SimpleNamespace(remote=lambda *host, **_: stub if host else lambda _: stub))
    backend = SimpleNamespace(collective=True, commit=None)
    started: Any = object.__new__(Hosts)
    vars(started).update(
        actors={}, locations={}, seed=0, place=SimpleNamespace(deadline=9.0), _swapping=(), _turns=Turns(plans)
    )
    vars(started).update(bindings={"actor": backend, "rollout": backend}, _turns=Turns(plans))
    started._slots = SimpleNamespace(options=lambda _: {}, gpus=lambda _: None)
    started.start(plans)
    alone = set(nodes) == {"a"}
    assert calls == [("rendezvous_address", alone), ("build", alone), ("build", alone)]


@pytest.mark.parametrize("alone", [True, False])
def test_a_job_of_one_process_uses_loopback_only(alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[None] = []
    monkeypatch.setattr("flowrl.distributed.hosts.host.stay_on_loopback", lambda: calls.append(None))
    host: Any = object.__new__(Host)
    host.plan, host.seed = ProcessSpec(("actor",), 0, Mesh(), (0,)), 0
    host.build({}, None, alone, 9.0)
    assert len(calls) == alone
