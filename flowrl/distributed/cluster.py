"""The Ray cluster of a job: joined at its address, or started here and shut down at the end."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

import ray
from ray._private import ray_constants

from flowrl.distributed.ray_place import RayPlace
from flowrl.errors import BindError

_ANSWER_SECONDS = 5
# HTTP/2, which Ray speaks: the client's preface and empty settings; a server answers with settings of its own (RFC
# 9113, 3.4).
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


@contextlib.contextmanager
def connected(place: RayPlace) -> Iterator[None]:
    """Ray within the block: what this process is connected to already, else joined at the place's address, else
    started here.

    What was started here listens on the loopback alone, and is shut down at the end; what was joined is left, what was
    connected stays so.

    Raises:
        BindError: nothing answers at the address, this process is connected to another cluster, or Ray does not start.
    """
    wanted = None if place.address in (None, "auto") else _parsed(str(place.address))
    if ray.is_initialized():
        here = ray.get_runtime_context().gcs_address
        if wanted is not None and _resolved(wanted) != _resolved(_parsed(here)):
            raise BindError(
                f"{type(place).__name__}(address={place.address!r}), but this process is connected to the Ray cluster "
                f"at {here}; leave address out to use that one, or call ray.shutdown() first."
            )
        with _signals_kept(signal.getsignal(signal.SIGTERM)):
            yield
        return
    before = signal.getsignal(signal.SIGTERM)
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if place.address is not None:
        if wanted is not None:
            _refuse_silent(place.address, wanted)
        try:
            ray.init(address=place.address, **quiet)
        except (ConnectionError, ValueError, RuntimeError, TimeoutError) as error:
            if "AuthenticationError" in f"{error}{error.__cause__}":
                raise BindError(
                    f"the Ray cluster at {place.address!r} does not accept this process; give it the cluster's "
                    f"token: set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN in the environment."
                ) from error
            raise _no_cluster(place.address, str(error).splitlines()[0]) from error
    else:
        cpus = max(os.cpu_count() or 1, place.slots)  # slots are logical, so that there can be more than CPUs
        store = _store_bytes()
        with _on_loopback():  # without an address Ray would join whatever cluster of others this machine has
            try:
                ray.init("local", num_cpus=cpus, include_dashboard=False, object_store_memory=store, **quiet)
            except Exception as error:  # whatever keeps it from starting; Ray has no class of its own for that
                raise BindError(
                    f"Ray could not be started on this machine ({type(error).__name__}: "
                    f"{str(error).partition('. ')[0]}); look whether the machine is short of processors, memory or "
                    f"disk, and into Ray's logs, in session_latest/logs under /tmp/ray."
                ) from error
    try:
        with _signals_kept(before):
            yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _signals_kept(before: Any) -> Iterator[None]:
    """Within the block and after it, SIGTERM is for whoever it was for before Ray took it.

    Ray puts a handler of C++ below Python's, which prints a stack, and one of its own into Python, which is kept where
    there was none before. A `SystemExit` that a handler raises while Ray waits, Ray replaces by another.

    Args:
        before: what `signal.getsignal` said before Ray was started.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler: Any = before if callable(before) else signal.getsignal(signal.SIGTERM)
    raised: list[SystemExit] = []

    def keep(number: int, frame: Any) -> None:
        try:
            handler(number, frame)
        except SystemExit as error:
            raised.append(error)
            raise

    if callable(handler):
        signal.signal(signal.SIGTERM, keep)
    try:
        yield
    except SystemExit as error:
        raise (raised or [error])[-1] from None
    finally:
        if signal.getsignal(signal.SIGTERM) is keep:
            signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _on_loopback() -> Iterator[None]:
    """What Ray starts within the block listens on the loopback alone, as it does by itself on macOS and Windows.

    On Linux it listens on all interfaces, whatever `ray.init` is told of its address, unless the environment has
    RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 when Ray is first imported, which may be long before this.
    """
    before = getattr(ray_constants, "ENABLE_RAY_CLUSTER", True)  # a name of Ray's own, which may go
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def _parsed(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "/" in host:
        raise BindError(
            f"{address!r} is no address of a Ray cluster; expected host:port, as `ray start --head` prints it, or "
            f"'auto'."
        )
    return host, int(port)


def _resolved(address: tuple[str, int]) -> tuple[str, int]:
    try:
        return socket.gethostbyname(address[0]), address[1]
    except OSError:  # nobody knows the name; so it is no other name of a host
        return address


def _refuse_silent(address: str, at: tuple[str, int]) -> None:
    """Knock: Ray itself would wait for minutes, and then end this process.

    Raises:
        BindError: nothing there speaks Ray's protocol.
    """
    try:
        with socket.create_connection(at, _ANSWER_SECONDS) as knock:
            if os.environ.get("RAY_USE_TLS") == "1":
                return
            knock.sendall(_PREFACE)
            frame = knock.recv(9)
    except OSError as error:
        raise _no_cluster(address, str(error)) from error
    if len(frame) < 4 or frame[3] != 4:
        raise _no_cluster(address, "something is there, but it is not Ray")


def _no_cluster(address: str, reason: str) -> BindError:
    return BindError(
        f"no Ray cluster answers at {address!r} ({reason}); start one with `ray start --head`, or leave address out "
        f"and one is started here."
    )


def _store_bytes() -> int:
    """Room for columns and one set of weights: a quarter of what is free in shared memory, at least Ray's minimum."""
    status = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    free = status.f_bavail * status.f_frsize if status is not None else 1 << 30
    return max(80 << 20, min(free // 4, 8 << 30))
