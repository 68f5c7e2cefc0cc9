"""A process for tests of `EngineProcess`: it echoes requests, has shared memory and a child, and dies on request."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

from flowrl.backends.hosted.reaper import NOTE


def main(requests: Connection, replies: Connection) -> None:
    """Reply to requests until the parent ends."""
    memory = SharedMemory(create=True, size=4096)
    resource_tracker.unregister(memory._name, "shared_memory")  # type: ignore[attr-defined]  # so that no resource tracker removes it
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    print("last line of output", flush=True)
    while True:
        message, body = requests.recv(), requests.recv_bytes()
        match message.pop("call"):
            case "echo":
                replies.send({**message, "size": len(body), "child": child.pid, "memory": memory.name})
            case "fail":
                replies.send({"error": "ValueError: no"})
            case "die":
                os._exit(3)
            case "grow":  # and die, once the reaper has recorded it
                more = SharedMemory(create=True, size=4096)
                resource_tracker.unregister(more._name, "shared_memory")  # type: ignore[attr-defined]
                print(more.name, flush=True)
                note = Path(os.environ["TMPDIR"], NOTE)
                while not note.exists() or more.name not in note.read_text():
                    time.sleep(0.01)
                os._exit(3)
            case "half":
                os.write(replies.fileno(), b"\0" * 7)
                os.abort()
