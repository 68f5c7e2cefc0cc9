"""The process that a reward function runs in, and the outcome of a call.

`pool` starts this file by its path, so that neither flowrl nor torch is imported (only what the user's module imports);
hence only the standard library is used here. Requests and replies are JSON, one per line, over the pipes that were
stdin and stdout; what the function prints goes to stderr. The process ends when its requests do, so it cannot outlive
the one that started it.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import json
import numbers
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

ALARM_FACTOR = 2.0
ALARM_SLACK = 1.0
"""A call ends its own process after ``ALARM_FACTOR * timeout + ALARM_SLACK`` seconds, if nobody else has ended it."""

FRAMES = 3
"""How many frames of a traceback are reported, counted from the innermost."""


class Scored(NamedTuple):
    """A score, and the other numbers that the function returned with it."""

    score: float
    extras: dict[str, float]


class NoScore(NamedTuple):
    """Why there is no score: what the function did (``"raised ValueError: ..."``), and the end of the traceback."""

    what: str
    traceback: str = ""


def call(fn: Callable[..., Any], arguments: Mapping[str, Any]) -> Scored | NoScore:
    """Call a reward function and read what it returned: a number, or a dict with a number under ``"score"``."""
    try:
        result = fn(**arguments)
    except BaseException as error:  # also SystemExit: it is this row's failure, not the process's
        return failed(error)
    score = number(result.get("score") if isinstance(result, dict) else result)
    if score is None:
        wanted = "a number under 'score'" if isinstance(result, dict) else "a number or a dict with a 'score'"
        return NoScore(f"returned {_short(repr(result))}, expected {wanted}")
    rest = result.items() if isinstance(result, dict) else ()
    return Scored(score, {str(k): x for k, v in rest if k != "score" and (x := number(v)) is not None})


def failed(error: BaseException) -> NoScore:
    """An exception, with the innermost frames of its traceback."""
    lines = traceback.format_list(traceback.extract_tb(error.__traceback__)[1:][-FRAMES:])
    text = str(error)
    return NoScore(f"raised {type(error).__name__}{': ' + _short(text) if text else ''}", "".join(lines).rstrip())


def number(value: Any) -> float | None:
    """A real number (also a NumPy scalar, or an array or tensor of no axes) as a float; None for anything else."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, numbers.Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return float("inf")


def digest(content: bytes) -> str:
    """A digest that differs between two states of a source file."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def load(source: str, name: str, expected: str | None) -> Callable[..., Any]:
    """Import the function from a module or ``.py`` file, after checking that its source is the one asked for."""
    if source.endswith(".py"):
        module_name = f"{os.path.splitext(os.path.basename(source))[0]}_{digest(source.encode())}"
        spec = importlib.util.spec_from_file_location(module_name, source)
        if spec is None or spec.loader is None:
            raise ImportError(f"{source} cannot be loaded as a module")
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(source)
    if expected is not None:
        with open(str(module.__file__), "rb") as stream:
            if digest(stream.read()) != expected:
                raise ImportError(f"{module.__file__} has changed since the operator was made; make a new one")
    fn = functools.reduce(getattr, name.split("."), module)
    if not callable(fn):
        raise TypeError(f"{name} is a {type(fn).__name__}, expected a function")
    return fn


def _short(text: str, limit: int = 500) -> str:
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"


def _take_pipes() -> tuple[int, int]:
    """Move the protocol away from fds 0 and 1, so that nothing the function prints or reads can get into it."""
    requests, replies = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return requests, replies


def _read(requests: int, lines: queue.SimpleQueue[bytes]) -> None:
    with open(requests, "rb") as stream:
        for line in stream:
            lines.put(line)
    os._exit(0)  # whoever asked is gone, and with it the reader of a call that still runs


def main() -> None:
    """Load the function that the first line names, then answer one call per line."""
    requests, replies = _take_pipes()

    def reply(message: Any) -> None:
        rest = memoryview(json.dumps(message).encode() + b"\n")
        while rest:
            rest = rest[os.write(replies, rest) :]

    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests, lines), daemon=True).start()
    job = json.loads(lines.get())
    sys.path[:] = job["path"]
    try:
        fn = load(job["source"], job["name"], job["digest"])
    except BaseException as error:
        reply(failed(error)._asdict())
        os._exit(1)
    reply({"ready": True})
    while True:
        request = json.loads(lines.get())
        # The kernel ends a call that holds the interpreter's lock for ever, in case the asker is gone and cannot.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, ALARM_FACTOR * request["timeout"] + ALARM_SLACK)
        outcome = call(fn, request["arguments"])
        signal.setitimer(signal.ITIMER_REAL, 0)
        reply(outcome._asdict())


if __name__ == "__main__":
    main()
