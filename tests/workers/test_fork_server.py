"""Tests of `fork_server.py` and `fork_server_process.py`: workers are forks of a warm process.

The server process has imported their modules. Each worker starts as clean as a new process.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from flowrl.workers import fork_server
from flowrl.workers.fork_server import ForkServer, NotReadyError, imports
from tests.operators.reward.test_pool import wait_until, wait_until_ended
from tests.workers import poison

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    server = ForkServer(imports([poison.__name__]), listens=True)
    assert server.wait_until_ready() == 1
    yield server
    server.close()


def result(server: ForkServer, *does: str) -> Any:
    """Run these actions of `tests.workers.poison` in a new worker; returns the result of the last."""
    read_end, write_end = os.pipe()
    with open(read_end) as pipe:
        server.fork(f"{poison.__name__}:work", does, [write_end])
        os.close(write_end)
        return json.load(pipe)


def test_workers_do_not_share_state(server: ForkServer) -> None:
    clean = result(server, "state")
    poisoned = result(server, "poison", "state")
    changed = {kind for kind in clean if clean[kind] != poisoned[kind]}
    assert changed == clean.keys(), "poison() does not change the other kinds of state"
    assert result(server, "state") == clean


def test_workers_have_different_random_numbers(server: ForkServer) -> None:
    first, second = result(server, "random"), result(server, "random")
    assert all(a != b for a, b in zip(first, second, strict=True))


def test_another_process_of_the_same_user_can_request_a_worker(server: ForkServer) -> None:
    """Over the abstract socket; the worker gets the connection as its last file descriptor."""
    request = json.dumps({"target": f"{poison.__name__}:work", "arguments": ["pid"]}).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect("\0" + server.address)
        connection.sendall(struct.pack("!I", len(request)) + request)
        pid = json.loads(connection.makefile().read())
    assert pid not in (os.getpid(), result(server, "pid"))


def test_malformed_requests_do_not_stop_the_server(server: ForkServer) -> None:
    for payload in (b"", b"\0\0", struct.pack("!I", 99) + b"cut off"):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect("\0" + server.address)
            connection.sendall(payload)
    read_end, write_end = os.pipe()
    with open(read_end) as pipe:
        server.fork("no_such_module:work", [], [write_end])
        os.close(write_end)
        assert pipe.read() == ""
    assert result(server, "pid") > 0


def test_a_layer_imports_once_per_environment_in_its_own_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server process itself does not import the modules of a layer."""
    (tmp_path / "reads_environment.py").write_text(
        "import os\nLAYER, IMPORTER = os.environ.get('LAYER'), os.getpid()\n"
        "def work(_, fds):\n    os.write(fds[0], f'{LAYER} {IMPORTER}'.encode())\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    def found(server: ForkServer, layer: str) -> list[str]:
        request = {"target": "reads_environment:work", "arguments": None}
        layered = request | {"layer": {"environment": {"LAYER": layer}, "calls": imports(["reads_environment"])}}
        read_end, write_end = os.pipe()
        with open(read_end) as pipe:
            fork_server.send(server._channel, layered, [write_end])
            os.close(write_end)
            return pipe.read().split()

    with closing(ForkServer([])) as server:
        (first, process), (again, same), (other, another) = (found(server, layer) for layer in "aab")
        assert (first, again, other) == ("a", "a", "b")
        assert process == same != another
    wait_until_ended({int(process), int(another)})


def test_imports_that_raise_or_exit_are_reported(tmp_path: Path) -> None:
    (tmp_path / "raising.py").write_text("raise OSError('planted')\n")
    (tmp_path / "exiting.py").write_text("import os\nos._exit(3)\n")
    path = [*sys.path, str(tmp_path)]
    with closing(ForkServer(imports(["raising"]), path)) as server:
        with pytest.raises(NotReadyError, match="OSError: planted") as caught:
            server.wait_until_ready()
        assert "raising.py" in caught.value.details
    with closing(ForkServer(imports(["exiting"]), path)) as server:
        with pytest.raises(NotReadyError, match="its process ended"):
            server.wait_until_ready()
        wait_until(lambda: not server.alive)
        with pytest.raises(OSError):
            server.fork("any:thing", None, [])


def test_wait_until_ready_counts_threads_started_by_imports(tmp_path: Path) -> None:
    """A fork does not copy them, so the owner must know their number."""
    (tmp_path / "threaded.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    with closing(ForkServer(imports(["threaded"]), [*sys.path, str(tmp_path)])) as server:
        assert server.wait_until_ready() == 2


@pytest.mark.parametrize("supervised", [True, False])
def test_the_server_ends_when_its_program_is_killed(supervised: bool) -> None:
    source = f"""if True:
        import os, signal
        from flowrl.workers.fork_server import ForkServer
        server = ForkServer([], supervised={supervised})
        server.wait_until_ready()
        print(server._process.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    wait_until_ended({int(done.stdout)})


@pytest.mark.parametrize("supervised", [True, False])
def test_closing_does_not_wait_for_imports(supervised: bool) -> None:
    server = ForkServer([["time", "sleep", 10_000]], supervised=supervised)
    server.close()
    assert not server.alive


def test_closing_in_a_forked_child_does_not_end_the_server(server: ForkServer) -> None:
    if (child := os.fork()) == 0:
        server.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert server.alive
    assert result(server, "pid") > 0
