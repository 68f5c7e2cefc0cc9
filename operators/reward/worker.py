"""The process of a reward function, and the outcome of a call.

A `ForkServer` loads this file by its path, so that neither flowrl nor torch is imported (only the imports of the user's
module); so it uses the standard library only. Requests and replies are JSON lines over a socket; a reply has the id
of its request. The function has no access to the socket: stdin is empty, stdout goes to stderr, and subprocesses do not
inherit the socket.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib
import importlib.util
import inspect
import json
import numbers
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

CUT_OFF = 120
"""The exit status of a worker whose socket the function has closed."""

_FIRST = 200
"""The smallest file descriptor of the socket: code that closes or writes to a range of descriptors rarely reaches it,
and every system allows this number."""

SOURCE = "$source"
"""The key of a function or spec among parameters: ``{"$source": [module or file, name, digest, parameters]}``."""

FRAMES = 3
"""Number of innermost traceback frames in a report."""


class Scored(NamedTuple):
    """A score, and the other numbers that the function returned with it."""

    score: float
    extras: dict[str, float]


class NoScore(NamedTuple):
    """Why there is no score: what the function did (``"raised ValueError: ..."``), the code of the error, and the end
    of the traceback."""

    what: str
    code: str
    traceback: str = ""


def call(fn: Callable[..., Any], arguments: Mapping[str, Any]) -> Scored | NoScore:
    """Call a reward function and read its result: a number, or a dict with a number under ``"score"``."""
    try:
        return _scored(fn(**arguments))
    except BaseException as error:  # also SystemExit, which is a failure of this row only
        return failed(error)


def _scored(result: Any) -> Scored | NoScore:
    score = number(result.get("score") if isinstance(result, dict) else result)
    if score is None:
        expected = "a number under 'score'" if isinstance(result, dict) else "a number or a dict with a 'score'"
        return NoScore(f"returned {_short(repr(result))}, expected {expected}", "reward.invalid-score")
    rest = result.items() if isinstance(result, dict) else ()
    return Scored(score, {str(k): x for k, v in rest if k != "score" and (x := number(v)) is not None})


def failed(error: BaseException) -> NoScore:
    """An exception, with the innermost frames of its traceback."""
    try:
        lines = traceback.format_list(traceback.extract_tb(error.__traceback__)[1:][-FRAMES:])
        text = str(error)
    except BaseException as another:  # in the user's __str__, or out of memory or stack
        lines, text = [], f"(its text cannot be read: {type(another).__name__})"
    what = f"raised {type(error).__name__}{': ' + _short(text) if text else ''}"
    return NoScore(what, "reward.raised", "".join(lines).rstrip())


def number(value: Any) -> float | None:
    """A real number (also a NumPy scalar, or a 0-d array or tensor) as a float; None for anything else."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, numbers.Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return float("inf")


def digest(content: bytes) -> str:
    """The digest of a source file."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


_loaded: dict[tuple[str, str, str | None, str | None], Callable[..., Any]] = {}


def preload(source: str, name: str, expected: str | None, parameters: str | None) -> None:
    """`load` a function in the fork server; if that fails, the worker that loads it reports the error."""
    with contextlib.suppress(Exception):
        _loaded[source, name, expected, parameters] = load(source, name, expected, parameters)


def load(source: str, name: str, expected: str | None, parameters: str | None = None) -> Callable[..., Any]:
    """Import the function from a module or ``.py`` file, and check the digest of its source.

    With `parameters`, as JSON, the name is that of a class, and the function is its instance with these.
    """
    if (source, name, expected, parameters) in _loaded:
        return _loaded[source, name, expected, parameters]
    found = _import(source, name, expected)
    return found if parameters is None else found(**json.loads(parameters, object_hook=_restored))


def _restored(data: dict[str, Any]) -> Any:
    """A parameter from its JSON: what its source names, if it has one."""
    return load(*data[SOURCE]) if data.keys() == {SOURCE} else data


def _import(source: str, name: str, expected: str | None) -> Callable[..., Any]:
    """Import what a module or ``.py`` file defines."""
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
                raise ImportError(f"{module.__file__} has changed since the operator was created; create a new one")
    fn: Any = module
    for part in name.split("."):
        fn = getattr(fn, part)
    found: Callable[..., Any] = fn
    return found


def why_invalid(fn: Any, name: str) -> str | None:
    """Why a function cannot be used as a reward function; None if it can."""
    what = f"The reward function {name}"
    if not callable(fn):
        return f"{what} is a {type(fn).__name__}, expected a function."
    if isinstance(fn, type):
        return (
            f"{what} is a class, which returns an object, not a score. Pass a function, or an instance with __call__."
        )
    if inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(type(fn).__call__):
        return (
            f"{what} is async and returns a coroutine, not a score. Define it by `def`, and await in it by "
            f"asyncio.run(...)."
        )
    try:
        signature = inspect.signature(fn)
    except ValueError:  # compiled code need not have one
        return None
    try:
        signature.bind(data_source="", solution_str="", ground_truth="", extra_info={})
    except TypeError as error:
        return (
            f"{what}{signature} cannot be called by keyword with data_source, solution_str, ground_truth and "
            f"extra_info ({error}). Define fn(data_source, solution_str, ground_truth, extra_info=None), which gets "
            f"the text of one response, or call yours from such a function."
        )
    return None


def _short(text: str, limit: int = 500) -> str:
    """The start of a text, with surrogates, which cannot be printed, escaped."""
    cut = text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"
    return cut.encode("utf-8", "backslashreplace").decode()


class _Channel:
    """The socket to the pool, at a file descriptor that the function is unlikely to touch."""

    def __init__(self) -> None:
        self._socket = fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, _FIRST)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        os.dup2(2, 1)
        self._requests = open(self._socket, "rb", closefd=False)  # noqa: SIM115 (open until the process ends)
        self._owner, self._id = os.getpid(), None
        self._open = True
        os.register_at_fork(after_in_child=self._leave)

    def _leave(self) -> None:
        """Close the socket in a process forked by the function."""
        if self._open:
            self._open = False
            with contextlib.suppress(OSError):
                os.close(self._socket)

    def receive(self) -> Any:
        """The next request."""
        if not (line := self._requests.readline()):
            os._exit(0)  # the pool closed the socket
        request = json.loads(line)
        self._id = request.pop("id")
        return request

    def reply(self, **message: Any) -> None:
        """Reply to it; a process forked by the function exits here instead."""
        if os.getpid() != self._owner:
            os._exit(0)
        rest = memoryview(json.dumps({"id": self._id, **message}).encode() + b"\n")
        while rest:
            rest = rest[os.write(self._socket, rest) :]


def serve(supervisor: str, fds: list[int]) -> None:
    """Load the function that the first request names, then make one call per request.

    Args:
        supervisor: the file of `flowrl.workers.supervisor`.
        fds: the socket, and a pipe for the supervisor's process id and the worker's exit status.
    """
    spec = importlib.util.spec_from_file_location("flowrl_supervisor", supervisor)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    os.dup2(fds[0], 0)
    os.close(fds[0])
    os.write(fds[1], f"{os.getpid()} ".encode())
    module.supervise(_serve, fds[1])


def _serve() -> None:
    channel = _Channel()
    try:
        job = channel.receive()
        sys.path[:] = job["path"]
        try:
            fn = load(job["source"], job["name"], job["digest"], job["parameters"])
        except BaseException as error:
            channel.reply(**failed(error)._asdict())
            os._exit(1)
        channel.reply(invalid=why_invalid(fn, f"{job['source']}:{job['name']}"))
        while True:
            channel.reply(**call(fn, channel.receive()["arguments"])._asdict())
    except OSError:
        os._exit(CUT_OFF)
