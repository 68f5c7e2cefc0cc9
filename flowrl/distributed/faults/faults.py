"""What can go wrong with a process that was asked for something: it raised, it died, or nothing is heard of it."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import (
    GetTimeoutError,
    LocalRayletDiedError,
    NodeDiedError,
    ObjectLostError,
    ObjectStoreFullError,
    OutOfDiskError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)

from flowrl.distributed.cluster.ray_place import RayPlace
from flowrl.errors import NodeError
from flowrl.run.placement.place import ProcessSpec

GONE = (RayActorError, OutOfMemoryError, NodeDiedError, WorkerCrashedError, LocalRayletDiedError)
"""What Ray raises where a process is gone."""


class HostDiedError(NodeError):
    """The process of a rank ended; `host` says whose it was (None is the general one)."""

    def __init__(self, message: str, host: ProcessSpec | None = None) -> None:
        super().__init__(message)
        self.host = host


@dataclass(frozen=True)
class Failure:
    """An exception that a node raised, as it travels: Ray would lose its cause.

    Args:
        message: of the `NodeError`.
        causes: the exception, and what it was raised from, and so on; those that survive pickling.
        traceback: where it was raised, on its host.
        lost: something that the node reads is gone, as it is with the process that wrote it.
    """

    message: str
    causes: tuple[BaseException, ...]
    traceback: str
    lost: bool

    @staticmethod
    def of(error: Exception, message: str) -> Failure:
        """What is left of `error` for another process."""
        causes = tuple(copy for one in chain(error) if (copy := _portable(one)) is not None)
        trace = "".join(traceback.format_exception(error))
        return Failure(message, causes, trace, any(isinstance(one, ObjectLostError) for one in chain(error)))

    def error(self) -> NodeError:
        """The error to raise, with its causes and the traceback of its host."""
        error = NodeError(self.message)
        outer: BaseException = error
        for cause in self.causes:
            outer.__cause__ = outer = cause
        error.add_note(f"On the host:\n{self.traceback}")
        return error


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """An exception, what it was raised from, and so on."""
    while error is not None:
        yield error
        error = error.__cause__


def _portable(error: BaseException) -> BaseException | None:
    """`error` as another process gets it, without its cause; None where it does not survive pickling."""
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:  # whatever a class of its own may do; its text is in the message
        return None
    return copy if isinstance(copy, BaseException) else None


def named(host: ProcessSpec | None) -> str:
    """How messages and traces call a host."""
    return "the general host" if host is None else f"{'+'.join(host.roles)} rank {host.rank}"


def answer(ref: Any, host: ProcessSpec | None, what: str, place: RayPlace, patience: float | None = None) -> Any:
    """What a host answered.

    Args:
        ref: of the answer.
        host: whose it is.
        what: was asked for: a node, and when.
        place: says how long to wait,
        patience: unless this does.

    Raises:
        HostDiedError: the process died.
        NodeError: it could not be started, did not answer in time, or raised, which is the cause then.
    """
    seconds = place.deadline if patience is None else patience
    try:
        return ray.get(ref, timeout=seconds)
    except RayTaskError as error:  # before those that it may be too, as the cause is
        cause = error.cause
        cause.add_note(f"On the host:\n{error}")
        raise NodeError(f"{what} failed on {named(host)}: {type(cause).__name__}: {cause}") from cause
    except GetTimeoutError as error:
        raise stuck(host, what, place, seconds) from error
    except GONE as error:
        if getattr(error, "actor_init_failed", False):  # no death that a new process would mend
            raise NodeError(f"{what} could not start {named(host)}: {str(error).strip()}") from error
        raise died(host, what, place, _first_line(error)) from error
    except RayError as error:
        raise NodeError(f"{what} failed on {named(host)}: {_said(error)}") from error


@contextmanager
def naming(what: str) -> Iterator[None]:
    """What Ray raises in the block, in this process, becomes an error that says what for.

    Raises:
        NodeError: from it.
    """
    try:
        yield
    except RayError as error:
        raise NodeError(f"{what} failed in the driver: {_said(error)}") from error


def _said(error: RayError) -> str:
    """What an error of Ray's says in short, and what mends it."""
    if isinstance(error, ObjectStoreFullError):
        fix = "give Ray's object store more memory (ray start --object-store-memory, or a larger /dev/shm)"
    elif isinstance(error, OutOfDiskError):
        fix = "the disk that Ray spills to is full: make room under its --temp-dir (/tmp/ray)"
    else:
        fix = "look into Ray's logs, in session_latest/logs under its --temp-dir (/tmp/ray)"
    return f"{type(error).__name__}: {_first_line(error)}; {fix}."


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")


def died(host: ProcessSpec | None, what: str, place: RayPlace, reason: str) -> HostDiedError:
    """The error of a process that is gone."""
    fix = "" if place.restart == "role" else f", or let it be rebuilt: {type(place).__name__}(restart='role')"
    return HostDiedError(
        f"{what} lost {named(host)}, whose process died ({reason}); look for the kernel's out-of-memory killer or "
        f"Ray's (RAY_memory_usage_threshold){fix}.",
        host,
    )


def stuck(host: ProcessSpec | None, what: str, place: RayPlace, seconds: float) -> NodeError:
    """The error of a process of which nothing is heard."""
    return NodeError(
        f"{what} is stuck on {named(host)}: nothing was heard for {seconds:g} s; find out what it waits for, "
        f"or give it more time: {type(place).__name__}(deadline=...)."
    )
