"""The rendezvous of a job's processes: a `torch.distributed.TCPStore` that listens at a single address.

A store has no password, so anyone who can connect can read and write it. By default it listens on all interfaces.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist

LOOPBACK = "127.0.0.1"

c10d: Any = dist  # its annotations lack the documented stores


def store_at(address: str, seconds: float) -> Any:
    """A store that listens at an address of this machine, on a free port, with a timeout in seconds."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family)
    return c10d.TCPStore(
        address,
        listener.getsockname()[1],
        None,
        is_master=True,
        timeout=timedelta(seconds=seconds),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def stay_on_loopback() -> None:
    """Make gloo and NCCL listen only on the loopback in this process, unless its environment names an interface."""
    name = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if name is not None:
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", name)
