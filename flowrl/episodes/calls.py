"""Calls of user code: in threads if they block, and the text of the errors that they raise."""

from __future__ import annotations

import asyncio
import asyncio.runners
import contextlib
import inspect
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from flowrl import errors
from flowrl.errors import FlowrlError

_OWN = (str(Path(__file__).parent), str(Path(asyncio.__file__).parent))
"""Folders of frames that are not the environment's."""

_HANDLERS = (asyncio.runners.__file__, str(Path(errors.__file__).parent / "run" / "training" / "signals.py"))
"""Files with handlers of signals."""


class EndedCallError(Exception):
    """User code raised what is not an `Exception`, such as `SystemExit`, or what a future cannot carry."""

    def __init__(self, original: BaseException) -> None:
        super().__init__(describe_error(original))
        self.original = original


async def call_user_code(function: Callable[[], Any], blocks: bool) -> Any:
    """What a function of the environment returns; one that blocks runs in a thread, which cannot be terminated."""
    if not blocks:
        try:
            result = function()
            return await result if inspect.isawaitable(result) else result
        except (Exception, asyncio.CancelledError):
            raise
        except BaseException as error:
            if _is_of_a_signal(error):
                raise
            raise EndedCallError(error) from None
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def finish(set_it: Callable[[Any], None], value: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, so no caller waits
            loop.call_soon_threadsafe(lambda: None if done.done() else set_it(value))

    def run() -> None:
        try:
            result = function()
        except BaseException as error:
            plain = isinstance(error, Exception) and not isinstance(error, StopIteration)
            finish(done.set_exception, error if plain else EndedCallError(error))
        else:
            finish(done.set_result, result)

    threading.Thread(target=run, daemon=True, name="flowrl-environment").start()
    return await done


@contextlib.contextmanager
def protected_loop() -> Iterator[None]:
    """Run user code on this event loop, which it cannot stop, nor end by what one of its tasks raises."""
    loop = asyncio.get_running_loop()

    def refuse() -> None:
        raise RuntimeError("it called loop.stop(), but the event loop belongs to all episodes")

    def create(loop: asyncio.AbstractEventLoop, coroutine: Any, **settings: Any) -> asyncio.Task[Any]:
        return asyncio.Task(call_user_code(lambda: coroutine, blocks=False), loop=loop, **settings)

    loop.stop = refuse  # type: ignore[method-assign]
    loop.set_task_factory(create)
    try:
        yield
    finally:
        del loop.stop
        loop.set_task_factory(None)


def _is_of_a_signal(error: BaseException) -> bool:
    """Whether a handler of a signal raised it, such as that of Ctrl-C, and not the code that it interrupted."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and frames[-1].filename in _HANDLERS


def describe_error(error: BaseException) -> str:
    """The text of an error, and the line of the environment's own code that raised it, if known."""
    if isinstance(error, FlowrlError):
        return error.message
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_OWN)]
    where = f" (at {frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    text = text_of(error)
    return f"{type(error).__name__}{': ' if text else ''}{text}{where}"


def text_of(error: BaseException) -> str:
    """The text of an error, also where a user's ``__str__`` raises."""
    try:
        return str(error)
    except BaseException as another:
        return f"(its text cannot be read: {type(another).__name__})"
