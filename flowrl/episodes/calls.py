"""Calls of user code: in threads if they block, and the text of the errors that they raise."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flowrl.errors import FlowrlError

_OWN = (str(Path(__file__).parent), str(Path(asyncio.__file__).parent))
"""Folders of frames that are not the environment's."""


async def call_user_code(function: Callable[[], Any], blocks: bool) -> Any:
    """What a function of the environment returns; one that blocks runs in a thread, which cannot be terminated."""
    if not blocks:
        result = function()
        return await result if inspect.isawaitable(result) else result
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
            finish(done.set_exception, error if plain else _as_error(error))
        else:
            finish(done.set_result, result)

    threading.Thread(target=run, daemon=True, name="flowrl-environment").start()
    return await done


def _as_error(error: BaseException) -> RuntimeError:
    """`SystemExit`, `StopIteration` and the like as an ordinary error, which a future can carry."""
    text = str(error)
    plain = RuntimeError(f"it raised {type(error).__name__}{': ' if text else ''}{text}")
    return plain.with_traceback(error.__traceback__)


def describe_error(error: BaseException) -> str:
    """The text of an error, and the line of the environment's own code that raised it, if known."""
    if isinstance(error, FlowrlError):
        return error.message
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_OWN)]
    where = f" (at {frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    text = str(error)
    return f"{type(error).__name__}{': ' if text else ''}{text}{where}"
