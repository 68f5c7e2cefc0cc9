"""Pools of workers that call a reward function in parallel, with a timeout per call.

An importable function runs in worker processes (`worker`): if a call times out, even in C code that holds the GIL, its
process and all subprocesses are terminated and replaced by a new one. The processes are forked from a server that has
imported the function. They are reused from step to step and end with the program. Any other callable runs in threads of
this process.
"""

# Why not `concurrent.futures`, or `pebble` (version 5.2.3)? The former has no timeout for a running call, and one dead
# worker breaks its pool. Pebble's workers are `multiprocessing` processes: they either fork a process that has threads,
# or import `__main__` (running an unguarded script again) and, to find their own code, flowrl and torch. A failed
# import breaks the pool without an explanation, a terminated worker leaves its subprocesses running, and one that
# hangs survives a killed program.

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import secrets
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from flowrl.errors import RewardError
from flowrl.operators.reward import worker as reward_worker
from flowrl.operators.reward.sources import FunctionSource
from flowrl.operators.reward.worker import CUT_OFF, NoScore, Scored
from flowrl.references import parse_reference
from flowrl.workers import supervisor
from flowrl.workers.fork_server import ForkServer, NotReadyError

START_LIMIT = 300.0
"""Seconds allowed for importing the module of a reward function."""

END_LIMIT = 10.0
"""Seconds allowed for terminating a worker and its subprocesses."""

MAX_REPLY = 1 << 24
"""Maximum size of a reply in bytes."""

Outcome = Scored | NoScore
Arguments = Mapping[str, Any]


class Worker(Protocol):
    """Runs calls one at a time."""

    def start(self) -> None:
        """Prepare for calls, or raise a RewardError."""

    def call(self, arguments: Arguments, timeout: float) -> Outcome:
        """Make a call of at most `timeout` seconds."""

    @property
    def alive(self) -> bool:
        """Whether it can make another call."""

    def kill(self) -> None:
        """Interrupt it; may be called from any thread."""

    def end(self) -> object:
        """Release its resources; called by the thread that makes its calls."""


class ThreadWorker:
    """Calls a function in this process. A call that times out continues in its (daemon) thread."""

    alive = True

    def __init__(self, fn: Callable[..., Any], name: str) -> None:
        self._fn, self._name = fn, name

    def start(self) -> None:
        """Refuse a function that cannot be called."""
        if (message := reward_worker.why_invalid(self._fn, self._name)) is not None:
            raise RewardError(message, code="reward.invalid-function", function=self._name)

    def call(self, arguments: Arguments, timeout: float) -> Outcome:
        """Make a call in a new thread."""
        future: Future[Outcome] = Future()
        threading.Thread(
            target=lambda: future.set_result(reward_worker.call(self._fn, arguments)), name="flowrl-reward", daemon=True
        ).start()
        try:
            return future.result(timeout)
        except TimeoutError:
            return _timed_out(timeout)

    def kill(self) -> None:
        """Do nothing: a thread cannot be terminated."""

    def end(self) -> None:
        """Do nothing."""


class ProcessWorker:
    """Calls a function in a separate process."""

    def __init__(self, source: FunctionSource) -> None:
        self._source = source
        self.alive = True
        self._channel, self._theirs = socket.socketpair()
        self._status, self._report = os.pipe()

    def start(self) -> None:
        """Fork the process and import the function."""
        try:
            fds = [self._theirs.fileno(), self._report]
            fork_server(self._source).fork(f"{reward_worker.__file__}:serve", supervisor.__file__, fds)
        except BaseException:
            self.alive = False
            self._channel.close()
            os.close(self._status)
            raise
        finally:
            self._theirs.close()
            os.close(self._report)
        self._channel.setblocking(False)
        module, name = parse_reference(self._source.reference)
        digest, parameters = self._source.digest, self._source.parameters
        job = {"path": sys.path, "source": module, "name": name, "digest": digest, "parameters": parameters}
        reply = self._ask(job, START_LIMIT)
        if not isinstance(reply, NoScore):
            if reply["invalid"] is None:
                return
            self.end()
            raise RewardError(reply["invalid"], code="reward.invalid-function", function=self._source.reference)
        if self.alive:
            self.end()
        details = f"\n{reply.traceback}\n" if reply.traceback else ""
        advice = "It must be importable on its own: put code that runs as a script under `if __name__ == '__main__':`."
        if reply.what.startswith(("raised ModuleNotFoundError", "raised ImportError")):
            advice = "Install the missing package into the environment of the run, or correct the import."
        raise RewardError(
            f"A worker process for the reward function {self._source.reference!r} could not start: importing it "
            f"{reply.what}. {advice}{details}",
            code="reward.worker-start",
            function=self._source.reference,
        )

    def call(self, arguments: Arguments, timeout: float) -> Outcome:
        """Make a call; one that times out, ends the process or writes into the result socket terminates the worker."""
        reply = self._ask({"arguments": arguments}, timeout)
        return reply if isinstance(reply, NoScore) else Scored(**reply)

    def _ask(self, message: Mapping[str, Any], limit: float) -> dict[str, Any] | NoScore:
        name = secrets.token_hex(8)  # which the function cannot write by accident
        request = json.dumps({"id": name, **message}).encode() + b"\n"
        try:
            line = self._exchange(request, time.monotonic() + limit)
        except TimeoutError:
            self.end()
            return _timed_out(limit)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return NoScore(_exit_reason(self.end()), "reward.process-died")
        try:
            reply: dict[str, Any] = json.loads(line)
            if reply.pop("id") != name:
                raise ValueError("a reply to another request")
        except (ValueError, RecursionError, AttributeError, KeyError, TypeError):
            self.end()
            shown = f"{line[:80]!r}{'...' if len(line) > 80 else ''}"
            return NoScore(f"wrote into the result socket of its process ({shown})", "reward.process-died")
        return NoScore(**reply) if "what" in reply else reply

    def _exchange(self, line: bytes, deadline: float) -> bytes:
        """Send a line and read one; raises `TimeoutError` at the deadline, and `EOFError` if the socket is closed."""
        rest, received = memoryview(line), bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(self._channel, selectors.EVENT_READ | selectors.EVENT_WRITE)
            while not received.endswith(b"\n") and len(received) <= MAX_REPLY:
                remaining = deadline - time.monotonic()
                ready = selector.select(remaining) if remaining > 0 else []
                if not ready:
                    raise TimeoutError
                _, events = ready[0]
                if events & selectors.EVENT_READ:
                    chunk = self._channel.recv(1 << 16)
                    if not chunk:
                        raise EOFError
                    received += chunk
                elif rest:
                    rest = rest[self._channel.send(rest) :]
                    if not rest:
                        selector.modify(self._channel, selectors.EVENT_READ)
        return bytes(received)

    def kill(self) -> None:
        """Terminate the process and its subprocesses; the thread that owns the worker sees the socket close."""
        with contextlib.suppress(OSError):  # already closed
            self._channel.shutdown(socket.SHUT_RDWR)

    def end(self) -> int:
        """Terminate the process and its subprocesses, and wait for it; returns its exit status.

        The supervisor writes its process id at its start and the worker's status at its end. A missing status means
        that the supervisor was killed, and the worker with it.
        """
        self.kill()
        self.alive = False
        report, deadline = b"", time.monotonic() + END_LIMIT
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._status, selectors.EVENT_READ)
                while selector.select(max(0.0, deadline - time.monotonic())):
                    if not (part := os.read(self._status, 64)):
                        break
                    report += part
                else:
                    if report:  # the supervisor was stopped
                        os.kill(int(report.split()[0]), signal.SIGKILL)
        finally:
            self._channel.close()
            os.close(self._status)
        words = report.split()
        return os.waitstatus_to_exitcode(int(words[1])) if len(words) > 1 else -signal.SIGKILL


def _exit_reason(status: int) -> str:
    if status == CUT_OFF:
        return "closed the result socket of its process"
    how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    return f"ended its process ({how})"


class Pool:
    """`workers` workers, made by `make`, that serve calls from one queue in order."""

    def __init__(self, make: Callable[[], Worker], workers: int) -> None:
        self._make, self._workers = make, workers
        self._tasks: queue.SimpleQueue[tuple[Future[Outcome], Arguments, float] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._live: set[Worker] = set()
        self._closed = False

    def results(self, calls: Sequence[Arguments], timeout: float) -> Iterator[Outcome]:
        """The outcome of each call, in order; closing the iterator cancels calls that have not started."""
        futures: list[Future[Outcome]] = [Future() for _ in calls]
        with self._lock:
            if self._closed:
                raise _closed()
            while len(self._threads) < min(self._workers, len(calls)):
                thread = threading.Thread(target=self._serve, name="flowrl-reward-pool", daemon=True)
                thread.start()
                self._threads.append(thread)
            for future, arguments in zip(futures, calls, strict=True):
                self._tasks.put((future, arguments, timeout))
        try:
            for future in futures:
                yield future.result()
        finally:
            for future in futures:
                future.cancel()

    def close(self) -> None:
        """Terminate all workers; pending and running calls fail."""
        with self._lock:
            self._closed = True
            for worker in self._live:
                worker.kill()
            for _ in self._threads:
                self._tasks.put(None)

    def join(self) -> None:
        """Wait until the workers of a closed pool have ended."""
        for thread in self._threads:
            thread.join()

    def _serve(self) -> None:
        worker: Worker | None = None
        failure: RewardError | None = None
        while True:
            # Start a worker before taking a call, so that a slow start delays no call that another worker could make.
            if worker is None and failure is None:
                try:
                    worker = self._started()
                except RewardError as error:
                    failure = error
            if (task := self._tasks.get()) is None:
                if worker is not None:
                    worker.end()
                break
            future, arguments, timeout = task
            if not future.set_running_or_notify_cancel():
                continue
            if worker is None:
                future.set_exception(failure)
                failure = None
                continue
            # Any error belongs to the pending call, and this thread continues.
            try:
                future.set_result(worker.call(arguments, timeout))
            except Exception as error:
                future.set_exception(_unexpected("a call", error))
                worker.end()
            if not worker.alive:
                with self._lock:
                    self._live.discard(worker)
                worker = None

    def _started(self) -> Worker:
        worker: Worker | None = None
        try:
            with self._lock:
                if self._closed:
                    raise _closed()
                worker = self._make()
                self._live.add(worker)
            worker.start()
        except Exception as error:
            if worker is not None:
                with self._lock:
                    self._live.discard(worker)
            raise error if isinstance(error, RewardError) else _unexpected("the start", error) from error
        return worker


def _closed() -> RewardError:
    return RewardError(
        "The pool of reward workers is closed, since the program is ending. Wait for running steps before the program "
        "ends.",
        code="reward.worker-failed",
    )


def _unexpected(what: str, error: Exception) -> RewardError:
    """An error of flowrl's side of a worker."""
    found = RewardError(
        f"Unexpected error in {what} of a reward worker, {type(error).__name__}: {error}. Check the limits on "
        f"processes, open files and memory (ulimit -a), and the arguments.",
        code="reward.worker-failed",
        error=type(error).__name__,
    )
    found.__cause__ = error
    return found


_servers: dict[FunctionSource, ForkServer] = {}
_servers_lock = threading.Lock()


def fork_server(source: FunctionSource) -> ForkServer:
    """The server from which workers are forked, after importing the module of the function.

    If the import starts threads (which a fork would lose), ends the process or raises, the server imports nothing: each
    worker imports the module, and reports the error. A worker itself must not start workers, or there would be no end.
    """
    if reward_worker.__file__ in sys.modules:  # named by its path in a fork server
        raise RewardError(
            "A Reward ran while a reward worker imported the module of the reward function. Put code that runs as a "
            "script under `if __name__ == '__main__':`, or move the function to another module.",
            code="reward.worker-start",
            function=source.reference,
        )
    with _servers_lock:
        if source in _servers and not _servers[source].alive:
            _servers.pop(source).close()
        if source not in _servers:
            module, name = parse_reference(source.reference)
            _servers[source] = ForkServer(
                [[reward_worker.__file__, "preload", module, name, source.digest, source.parameters]]
            )
        server = _servers[source]
    try:
        sound = server.wait_until_ready() == 1
    except NotReadyError:
        sound = False
    except TimeoutError as error:
        raise RewardError(
            f"A worker process for the reward function {source.reference!r} could not start: {error}.",
            code="reward.worker-start",
            function=source.reference,
        ) from None
    with _servers_lock:
        if not sound and _servers.get(source) is server:
            server.close()
            _servers[source] = ForkServer([])
        return _servers.get(source, server)  # another thread may have replaced it


_pools: dict[tuple[FunctionSource, int], Pool] = {}
_pools_lock = threading.Lock()


def process_pool(source: FunctionSource, workers: int) -> Pool:
    """The pool of processes for a function, until `close_pools` or the end of the program."""
    with _pools_lock:
        key = (source, workers)
        if key not in _pools:
            _pools[key] = Pool(lambda: ProcessWorker(source), workers)
        return _pools[key]


def _forget_pools() -> None:
    """Reset the state in a forked process, which has no pool threads and must not terminate the workers."""
    global _pools_lock, _servers_lock
    _pools_lock, _servers_lock = threading.Lock(), threading.Lock()
    _pools.clear()
    _servers.clear()


os.register_at_fork(after_in_child=_forget_pools)


def _close_servers() -> None:
    with _servers_lock:
        while _servers:
            _servers.popitem()[1].close()


@atexit.register
def close_pools() -> None:
    """Terminate all worker processes; later calls start new ones."""
    with _pools_lock:
        pools = list(_pools.values())
        _pools.clear()
    for pool in pools:
        pool.close()
    _close_servers()  # so that no worker waits for an import
    for pool in pools:
        pool.join()
    _close_servers()


def _timed_out(limit: float) -> NoScore:
    return NoScore(f"did not return within {limit:g} s", "reward.timeout")
