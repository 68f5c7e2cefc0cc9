"""State of many kinds that a worker may leak in its process, and a snapshot of that state."""

from __future__ import annotations

import atexit
import builtins
import gc
import json
import os
import random
import signal
import socket
import sys
import tempfile
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.random  # NumPy imports it on first use, and a fork would then seed itself
import torch
import torch.distributed as dist

NAME = "flowrl_planted"
_open: list[Any] = []


class Weights(torch.nn.Linear):
    """Weights that the garbage collector finds by their class."""


def poison() -> None:
    """Change state of every kind."""
    os.environ[NAME] = "planted"
    os.chdir(tempfile.gettempdir())
    os.umask(0o123)
    sys.modules[NAME] = ModuleType(NAME)
    sys.path.append(f"/{NAME}")
    setattr(builtins, NAME, True)
    listener = socket.create_server(("127.0.0.1", 0))
    _open.extend([Weights(4, 4), tempfile.NamedTemporaryFile(prefix=NAME), listener])  # noqa: SIM115 (left open)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    atexit.register(len, NAME)
    threading.Thread(target=threading.Event().wait, name=NAME, daemon=True).start()
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(1)
    torch.set_default_dtype(torch.float64)
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)


def state() -> dict[str, Any]:
    """The state by kind; equal in two new processes, except for their random numbers."""
    umask = os.umask(0)
    os.umask(umask)
    kinds = [os.readlink(path).split(":")[0] for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return {
        "environment": os.environ.get(NAME),
        "folder": os.getcwd(),
        "umask": umask,
        "modules": NAME in sys.modules,
        "path": f"/{NAME}" in sys.path,
        "builtins": hasattr(builtins, NAME),
        "weights": sum(isinstance(each, Weights) for each in gc.get_objects()),
        "files": sum(NAME in kind for kind in kinds),
        "sockets": kinds.count("socket"),
        "handler": signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL,
        "at exit": atexit._ncallbacks(),
        "threads": [thread.name for thread in threading.enumerate() if thread.name == NAME],
        "Python's numbers": random.getstate()[1] == random.Random(0).getstate()[1],
        "NumPy's numbers": bool(np.array_equal(np.random.get_state()[1], np.random.RandomState(0).get_state()[1])),
        "torch's numbers": torch.initial_seed(),
        "dtype": str(torch.get_default_dtype()),
        "group": dist.is_initialized(),
    }


def work(actions: list[str], fds: list[int]) -> None:
    """In a worker: run the actions in order, and write the result of the last as JSON.

    Args:
        actions: names of functions of this module, or ``random`` or ``pid``.
        fds: the write end of a pipe.
    """
    result: Any = None
    for name in actions:
        result = {"poison": poison, "state": state, "random": _random_numbers, "pid": os.getpid}[name]()
    with open(fds[0], "w") as pipe:
        json.dump(result, pipe)


def compute(device: str, fds: list[int]) -> None:
    """In a worker: write as JSON whether CUDA was initialized before, and a sum computed on the device.

    Args:
        device: of torch.
        fds: the write end of a pipe.
    """
    before = torch.cuda.is_initialized()
    total = float(torch.arange(5.0, device=device).square().sum())
    with open(fds[0], "w") as pipe:
        json.dump([before, total], pipe)


def _random_numbers() -> list[float]:
    return [random.random(), float(np.random.random())]
