"""Many calls of a reward function at once, each with a time limit.

A function that can be imported runs in worker processes (`worker`): a call that hangs, even in C code that holds the
interpreter's lock, is ended with its process, and a fresh process takes over. Processes stay from step to step and end
with the program. Any other callable runs in threads of this process.
"""

# Why not `concurrent.futures`, or `pebble` (version 5.2.3)? The former has no time limit for a call that runs, and one
# dead worker breaks its pool. Pebble's workers are `multiprocessing` processes: they either fork a process that has
# threads, or import `__main__` (running an unguarded script again) and, to find their own code, flowrl and torch. An
# import that fails breaks the whole pool without saying why, a worker is ended without what it started, and one that
# hangs outlives a program that was killed.

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

from flowrl.core.references import parse_reference
from flowrl.errors import RewardError
from flowrl.operators.reward import worker as reward_worker
from flowrl.operators.reward.worker import NoScore, Scored

START_LIMIT = 300.0
"""Seconds allowed for importing the module of a reward function."""

Outcome = Scored | NoScore
Arguments = Mapping[str, Any]


class FunctionSource(NamedTuple):
    """An importable function: its reference (files by absolute path), and the digest of its source file, if any."""

    reference: str
    digest: str | None


class Worker(Protocol):
    """One place where calls run, one after the other."""

    def start(self) -> None:
        """Get ready for calls, or raise a RewardError."""

    def call(self, arguments: Arguments, timeout: float) -> Outcome:
        """Make a call of at most `timeout` seconds."""

    @property
    def alive(self) -> bool:
        """Whether it can take another call."""

    def kill(self) -> None:
        """Interrupt whatever it is doing; may be called from any thread."""

    def end(self) -> object:
        """Release what it holds; called by the thread that makes its calls."""


class ThreadWorker:
    """Calls a function in this process. A call over its limit is left behind in its (daemon) thread."""

    alive = True

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn = fn

    def start(self) -> None:
        """Nothing to do."""

    def call(self, arguments: Arguments, timeout: float) -> Outcome:
        """Make a call in a new thread."""
        future: Future[Outcome] = Future()
        threading.Thread(
            target=lambda: future.set_result(reward_worker.call(self._fn, arguments)), name="flowrl-reward", daemon=True
        ).start()
        try:
            return future.result(timeout)
        except TimeoutError:
            return _over(timeout)

    def kill(self) -> None:
        """Nothing: a thread cannot be ended from outside."""

    def end(self) -> None:
        """Nothing to release."""


class ProcessWorker:
    """Calls a function in a separate process."""

    def __init__(self, source: FunctionSource) -> None:
        self._source = source
        self.alive = True
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            # -P: the folder of the worker's file must not come before the standard library.
            [sys.executable, "-P", reward_worker.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={"OMP_NUM_THREADS": "1", **os.environ},  # there are several workers, beside a model that computes
            start_new_session=True,  # the parent handles Ctrl-C; and the group can be ended as one
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        os.set_blocking(self._stdin.fileno(), False)

    def start(self) -> None:
        """Import the function.

        Raises:
            RewardError: the import raised, or took longer than `START_LIMIT`.
        """
        source, name = parse_reference(self._source.reference)
        job = {"path": sys.path, "source": source, "name": name, "digest": self._source.digest}
        reply = self._ask(job, START_LIMIT)
        if not isinstance(reply, NoScore):
            return
        if self.alive:
            self.end()
        details = f"\n{reply.traceback}" if reply.traceback else ""
        raise RewardError(
            f"a worker process for the reward function {self._source.reference!r} could not be started: importing it "
            f"{reply.what}. Expected a module that can be imported by itself: "
            f"put what runs as a script under `if __name__ == '__main__':`.{details}"
        )

    def call(self, arguments: Arguments, timeout: float) -> Outcome:
        """Make a call; the worker is dead after one that exceeded its limit or ended the process."""
        reply = self._ask({"arguments": arguments, "timeout": timeout}, timeout)
        return reply if isinstance(reply, NoScore) else Scored(**reply)

    def _ask(self, message: Any, limit: float) -> dict[str, Any] | NoScore:
        try:
            line = self._exchange(json.dumps(message).encode() + b"\n", time.monotonic() + limit)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            status = self.end()
            how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
            return NoScore(f"ended its process ({how})")
        if line is None:
            self.end()
            return _over(limit)
        reply: dict[str, Any] = json.loads(line)
        return NoScore(**reply) if "what" in reply else reply

    def _exchange(self, line: bytes, deadline: float) -> bytes | None:
        """Send a line and read one; None if the deadline comes first. Neither direction blocks past it."""
        rest, received = memoryview(line), b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._stdin, selectors.EVENT_WRITE)
            selector.register(self._stdout, selectors.EVENT_READ)
            while not received.endswith(b"\n"):
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    return None
                for key, _ in ready:
                    if key.fileobj is self._stdin:
                        rest = rest[os.write(self._stdin.fileno(), rest) :]
                        if not rest:
                            selector.unregister(self._stdin)
                    elif chunk := os.read(self._stdout.fileno(), 1 << 16):
                        received += chunk
                    else:
                        raise EOFError
        return received

    def kill(self) -> None:
        """End the process and all that it started; the thread that owns the worker sees the pipe close."""
        with self._lock:
            if self.alive:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> int:
        """End the process and wait for it; returns its exit status."""
        self.kill()  # before the wait, since afterwards the id of the group may be another's
        with self._lock:
            self.alive = False
            self._stdin.close()
            self._stdout.close()
            return self._process.wait()


class Pool:
    """`workers` workers that take calls from one queue, first come first served.

    Args:
        make: makes a worker.
        workers: how many run at once.
    """

    def __init__(self, make: Callable[[], Worker], workers: int) -> None:
        self._make, self._workers = make, workers
        self._tasks: queue.SimpleQueue[tuple[Future[Outcome], Arguments, float] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._live: set[Worker] = set()
        self._closed = False

    def results(self, calls: Sequence[Arguments], timeout: float) -> Iterator[Outcome]:
        """The outcome of each call, in order; closing the iterator drops the calls that have not begun.

        Raises:
            RewardError: a worker could not be started, or the pool is closed.
        """
        futures: list[Future[Outcome]] = [Future() for _ in calls]
        with self._lock:
            if self._closed:
                raise RewardError("the pool of reward workers is closed, as the program is ending.")
            while len(self._threads) < min(self._workers, len(calls)):
                self._threads.append(threading.Thread(target=self._serve, name="flowrl-reward-pool", daemon=True))
                self._threads[-1].start()
            for future, arguments in zip(futures, calls, strict=True):
                self._tasks.put((future, arguments, timeout))
        try:
            for future in futures:
                yield future.result()
        finally:
            for future in futures:
                future.cancel()

    def close(self) -> None:
        """End all workers now; calls that wait or run end in an error."""
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
        trouble: RewardError | None = None
        while True:
            # A worker is started before a call is taken, so a slow start keeps no call waiting that another could make.
            if worker is None and trouble is None:
                try:
                    worker = self._started()
                except RewardError as error:
                    trouble = error
            if (task := self._tasks.get()) is None:
                if worker is not None:
                    worker.end()
                break
            future, arguments, timeout = task
            if not future.set_running_or_notify_cancel():
                continue
            if worker is None:
                future.set_exception(trouble)
                trouble = None
                continue
            outcome = worker.call(arguments, timeout)
            if not worker.alive:
                with self._lock:
                    self._live.discard(worker)
                worker = None
            future.set_result(outcome)

    def _started(self) -> Worker:
        with self._lock:
            if self._closed:
                raise RewardError("the pool of reward workers was closed while it had work.")
            worker = self._make()
            self._live.add(worker)
        try:
            worker.start()
        except RewardError:
            with self._lock:
                self._live.discard(worker)
            raise
        return worker


_pools: dict[tuple[FunctionSource, int], Pool] = {}
_pools_lock = threading.Lock()


def process_pool(source: FunctionSource, workers: int) -> Pool:
    """The pool of processes for a function; it lives as long as the program, or until `close_pools`.

    Raises:
        RewardError: called inside a worker, whose module would otherwise start workers without end.
    """
    script = getattr(sys.modules["__main__"], "__file__", None) or ""
    if os.path.abspath(script) == os.path.abspath(reward_worker.__file__):
        raise RewardError(
            "a Reward ran while a reward worker imported the module of the reward function; put what that module runs "
            "under `if __name__ == '__main__':`, or move the function to a module of its own."
        )
    with _pools_lock:
        key = (source, workers)
        if key not in _pools:
            _pools[key] = Pool(lambda: ProcessWorker(source), workers)
        return _pools[key]


@atexit.register
def close_pools() -> None:
    """End all worker processes; later calls start fresh ones."""
    with _pools_lock:
        pools = list(_pools.values())
        _pools.clear()
    for pool in pools:
        pool.close()
    for pool in pools:
        pool.join()


def _over(limit: float) -> NoScore:
    return NoScore(f"did not return within {limit:g} s")
