"""Where processes of a job meet: a `torch.distributed.TCPStore` that listens at one address alone.

Whoever reaches a store can read and write it, since it asks for no password. Left to itself, it listens on all
interfaces of the machine.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist

LOOPBACK = "127.0.0.1"

c10d: Any = dist  # whose annotations hide the stores that it documents


def store_at(address: str, seconds: float) -> Any:
    """A store that listens at an address of this machine, on a free port; whoever waits in it waits so many seconds."""
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
    """Let gloo and NCCL listen on the loopback alone in this process, unless its environment names an interface."""
    name = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if name is not None:
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", name)
