"""Connect a job to a Ray cluster: join one at an address, or start one that later jobs of this process reuse."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any, BinaryIO

import ray

from flowrl.distributed.cluster.host_server import host_server
from flowrl.distributed.cluster.local_cluster import QUIET, is_connected, local_cluster, shut_down_unless, use_cluster
from flowrl.distributed.cluster.ray_place import RayPlace
from flowrl.errors import BindError

_ANSWER_SECONDS = 5
# HTTP/2, which Ray uses: the client's preface (RFC 9113, 3.4), types of frames (6), and the first byte of a response
# (RFC 7541, A: 0x88 is ":status: 200").
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS, _GO_AWAY = 0, 1, 3, 4, 7
_OK = b"\x88"


@contextlib.contextmanager
def connected(place: RayPlace) -> Iterator[None]:
    """Connect to Ray within the block: use an existing connection, else join the place's address, else start Ray here.
    A cluster that was started here remains for the next job, see `local_cluster`; one that was joined is disconnected
    after the block."""
    expected = None if place.address in (None, "auto") else _parsed(str(place.address))
    cpus = max(os.cpu_count() or 1, place.slots)  # slots are logical, so that there can be more than CPUs
    local = place.address is None and (is_connected() or not ray.is_initialized())
    hosts = host_server() if local else None
    shut_down_unless(cpus, hosts)
    before = signal.getsignal(signal.SIGTERM)
    with contextlib.ExitStack() as stack:
        if ray.is_initialized():
            here = ray.get_runtime_context().gcs_address
            if expected is not None and _resolved(expected) != _resolved(_parsed(here)):
                raise BindError(
                    f"{type(place).__name__} has address={place.address!r}, but this process is connected to the Ray "
                    f"cluster at {here}. Leave out address= to use that one, or call ray.shutdown() first.",
                    code="cluster.address",
                    address=place.address,
                    found=here,
                )
            stack.enter_context(use_cluster())
        elif hosts is not None:
            stack.enter_context(local_cluster(cpus, hosts))
        else:
            stack.enter_context(_joined(str(place.address), expected))
        stack.enter_context(_keep_signals(before))
        yield


@contextlib.contextmanager
def _joined(address: str, expected: tuple[str, int] | None) -> Iterator[None]:
    """Join the cluster at an address within the block."""
    if expected is not None:
        _refuse_silent(address, expected)
    try:
        ray.init(address=address, **QUIET)
    except (ConnectionError, ValueError, RuntimeError, TimeoutError) as error:
        if "AuthenticationError" in f"{error}{error.__cause__}":
            raise BindError(
                f"The Ray cluster at {address!r} rejected this process's token. Set RAY_AUTH_MODE=token and "
                f"RAY_AUTH_TOKEN in the environment to the cluster's token.",
                code="cluster.authentication",
                address=address,
            ) from error
        raise _no_cluster(address, str(error).splitlines()[0]) from error
    try:
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _keep_signals(before: Any) -> Iterator[None]:
    """Restore the SIGTERM handler from before Ray started, for the block and after it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler: Any = before if callable(before) else signal.getsignal(signal.SIGTERM)
    raised: list[SystemExit] = []

    def forward(number: int, frame: Any) -> None:
        try:
            handler(number, frame)
        except SystemExit as error:
            raised.append(error)
            raise

    if callable(handler):
        signal.signal(signal.SIGTERM, forward)
    try:
        yield
    except SystemExit as error:
        raise (raised or [error])[-1] from None
    finally:
        if signal.getsignal(signal.SIGTERM) is forward:
            signal.signal(signal.SIGTERM, before)


def _parsed(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "/" in host:
        raise BindError(
            f"Invalid address {address!r} of a Ray cluster. Use host:port as `ray start --head` prints it, or 'auto'.",
            code="cluster.address",
            address=address,
        )
    return host, int(port)


def _resolved(address: tuple[str, int]) -> tuple[str, int]:
    try:
        return socket.gethostbyname(address[0]), address[1]
    except OSError:  # an unknown name is not an alias of a host
        return address


def _refuse_silent(address: str, at: tuple[str, int]) -> None:
    """Refuse an address where no Ray responds: Ray would retry, print a line each time, and then end this process."""
    try:
        with socket.create_connection(at, _ANSWER_SECONDS) as connection:
            if os.environ.get("RAY_USE_TLS") == "1":
                return
            connection.sendall(_PREFACE + _frame(_SETTINGS, 0, 0, b"") + _call(address))
            with connection.makefile("rb") as stream:
                found = _response(stream)
    except OSError as error:
        raise _no_cluster(address, str(error)) from error
    if found != _OK:
        raise _no_cluster(address, "another service responds there")


def _call(address: str) -> bytes:
    """An empty gRPC call of Ray's head, on stream 1."""
    fields = b"\x83\x86"  # ":method: POST", ":scheme: http"; then fields by the number or the text of their name
    for name, value in (
        (b"\x04", "/ray.rpc.NodeInfoGcsService/GetClusterId"),
        (b"\x01", address),
        (b"\x0f\x10", "application/grpc"),
        (b"\x00\x02te", "trailers"),
    ):
        text = value.encode()[:126]  # of one byte for the length
        fields += name + bytes([len(text)]) + text
    return _frame(_HEADERS, 4, 1, fields) + _frame(_DATA, 1, 1, bytes(5))


def _frame(kind: int, flags: int, stream: int, content: bytes) -> bytes:
    return len(content).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + content


def _response(stream: BinaryIO) -> bytes | None:
    """The first byte of the response's header; None if there is none."""
    kinds = []
    while len(head := stream.read(9)) == 9:
        content = stream.read(int.from_bytes(head[:3], "big"))
        kinds.append(head[3])
        if kinds[0] != _SETTINGS or head[3] in (_RESET, _GO_AWAY):
            return None
        if head[3] == _HEADERS:
            return content[:1]
    return None


def _no_cluster(address: str, reason: str) -> BindError:
    return BindError(
        f"No Ray cluster responds at {address!r} ({reason}). Start one with `ray start --head`, or leave out address= "
        f"to start one on this machine.",
        code="cluster.address",
        address=address,
        reason=reason,
    )
