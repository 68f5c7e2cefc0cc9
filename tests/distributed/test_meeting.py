"""Stores listen at the address that they were given, and nowhere else."""

from __future__ import annotations

import socket
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from flowrl.distributed import meeting
from flowrl.distributed.meeting import LOOPBACK, c10d, stay_on_loopback, store_at


def addresses_of(port: int) -> set[str]:
    """Where something listens at a port, as the kernel writes addresses."""
    lines = [line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()]
    found = [line[1].split(":") for line in lines if line[3] == "0A"]
    return {address for address, at in found if int(at, 16) == port}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/net")
def test_a_store_at_the_loopback_is_on_no_other_interface() -> None:
    store = store_at(LOOPBACK, 30.0)
    assert addresses_of(store.port) == {"0100007F"}
    guest = c10d.TCPStore(LOOPBACK, store.port, None, False, timeout=timedelta(seconds=30))
    guest.set("key", "value")
    assert store.get("key") == b"value"
    assert store.timeout == timedelta(seconds=30)


def test_every_store_has_a_port_of_its_own() -> None:
    stores = [store_at(LOOPBACK, 30.0) for _ in range(3)]
    assert len({store.port for store in stores}) == 3


def test_what_the_environment_names_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(3, "eth0"), (1, "lo")])
    environment = {"GLOO_SOCKET_IFNAME": "eth0"}
    monkeypatch.setattr(meeting.os, "environ", environment)
    stay_on_loopback()
    assert environment == {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "lo"}
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(3, "eth0")])
    environment.clear()
    stay_on_loopback()
    assert environment == {}
