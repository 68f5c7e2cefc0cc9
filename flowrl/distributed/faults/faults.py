"""Failures of a host: it raised, it died, or it does not respond."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Iterator, Mapping
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
from flowrl.errors import FlowrlError, NodeError
from flowrl.run.engine.runner import code_and_facts
from flowrl.run.placement.place import ProcessSpec

GONE = (RayActorError, OutOfMemoryError, NodeDiedError, WorkerCrashedError, LocalRayletDiedError)
"""Errors of Ray that mean that a process is gone."""


class HostDiedError(NodeError):
    """The process of a rank died; `host` is its spec (None is the general host)."""

    def __init__(
        self, message: str = "", host: ProcessSpec | None = None, /, *, code: str = "", **facts: object
    ) -> None:
        super().__init__(message, code=code, **facts)
        self.host = host


@dataclass(frozen=True)
class Failure:
    """An exception of a node in a form that can be sent: Ray would lose its cause.

    Args:
        lost: whether an input of the node is lost, for example because the process that wrote it died.
    """

    message: str
    code: str
    facts: Mapping[str, Any]
    causes: tuple[BaseException, ...]
    traceback: str
    lost: bool

    @staticmethod
    def of(error: Exception, message: str, **facts: object) -> Failure:
        """The failure of an exception."""
        causes = tuple(copy for one in chain(error) if (copy := _portable(one)) is not None)
        trace = "".join(traceback.format_exception(error))
        lost = any(isinstance(one, ObjectLostError) for one in chain(error))
        return Failure(message, *code_and_facts(error, **facts), causes, trace, lost)

    def error(self) -> NodeError:
        """The error to raise, with its causes and the traceback of its host."""
        error = NodeError(self.message, code=self.code, **self.facts)
        outer: BaseException = error
        for cause in self.causes:
            outer.__cause__ = outer = cause
        error.add_note(f"On the host:\n{self.traceback}")
        return error


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """An exception and its chain of causes."""
    while error is not None:
        yield error
        error = error.__cause__


def _portable(error: BaseException) -> BaseException | None:
    """A pickled copy of an exception, without its cause; None if it cannot be pickled."""
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:  # pickling a user's class may raise anything; the message has its text
        return None
    return copy if isinstance(copy, BaseException) else None


def named(host: ProcessSpec | None) -> str:
    """The name of a host in messages and traces."""
    return "the general host" if host is None else f"{'+'.join(host.roles)} rank {host.rank}"


def result_of(ref: Any, host: ProcessSpec | None, what: str, place: RayPlace, patience: float | None = None) -> Any:
    """The result of a call to a host.

    The timeout is `patience` in seconds, by default the place's deadline.
    """
    seconds = place.deadline if patience is None else patience
    try:
        return ray.get(ref, timeout=seconds)
    except RayTaskError as error:  # first, because it may also be an instance of its cause's class
        cause = error.cause
        cause.add_note(f"On the host:\n{error}")
        code, facts = code_and_facts(cause, task=what, host=named(host))
        text = cause.message if isinstance(cause, FlowrlError) else cause
        raise NodeError(
            f"{what} failed on {named(host)}: {type(cause).__name__}: {text}", code=code, **facts
        ) from cause
    except GetTimeoutError as error:
        raise stuck(host, what, place, seconds) from error
    except GONE as error:
        if getattr(error, "actor_init_failed", False):  # a new process would fail too
            raise NodeError(
                f"{what} could not start {named(host)}: {str(error).strip()}",
                code="host.start-failed",
                task=what,
                host=named(host),
            ) from error
        raise died(host, what, place, _first_line(error)) from error
    except RayError as error:
        raise _ray_failed(error, what, f"on {named(host)}", host=named(host)) from error


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Raise errors of Ray in the block, in this process, as a `NodeError` that names the task."""
    try:
        yield
    except RayError as error:
        raise _ray_failed(error, what, "in the driver") from error


def _ray_failed(error: RayError, what: str, where: str, **facts: object) -> NodeError:
    """The error of a task in which Ray itself failed, with Ray's text and the fix."""
    if isinstance(error, ObjectStoreFullError):
        fix = "Give Ray's object store more memory (ray start --object-store-memory, or a larger /dev/shm)"
    elif isinstance(error, OutOfDiskError):
        fix = "The disk that Ray spills to is full: free space under its --temp-dir (/tmp/ray)"
    else:
        fix = "Check Ray's logs in session_latest/logs under its --temp-dir (/tmp/ray)"
    return NodeError(
        f"{what} failed {where}: {type(error).__name__}: {_first_line(error)}. {fix}.",
        code="cluster.ray-failed",
        task=what,
        error=type(error).__name__,
        **facts,
    )


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")


def died(host: ProcessSpec | None, what: str, place: RayPlace, reason: str) -> HostDiedError:
    """The error of a process that is gone."""
    fix = (
        "" if place.restart == "role" else f" To rebuild it automatically, use {type(place).__name__}(restart='role')."
    )
    return HostDiedError(
        f"{what} lost {named(host)}, whose process died ({reason}). Check for the kernel's or Ray's out-of-memory "
        f"killer (RAY_memory_usage_threshold).{fix}",
        host,
        code="host.died",
        task=what,
        host=named(host),
        reason=reason,
    )


def stuck(host: ProcessSpec | None, what: str, place: RayPlace, seconds: float) -> NodeError:
    """The error of a process that does not respond."""
    return NodeError(
        f"{what} is stuck on {named(host)}: no response for {seconds:g} s. Find out what it waits for, or allow more "
        f"time with {type(place).__name__}(deadline=...).",
        code="host.stuck",
        task=what,
        host=named(host),
        seconds=seconds,
    )
