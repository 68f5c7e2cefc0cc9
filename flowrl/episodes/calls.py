"""Calls of what is users': in threads where they block, and what their errors say."""

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
"""Where frames are not the environment's."""


async def called(function: Callable[[], Any], blocks: bool) -> Any:
    """What a function of the environment returns; one that blocks runs in a thread of its own.

    A thread cannot be ended: one whose time is over is left behind, and ends with the program.
    """
    if not blocks:
        result = function()
        return await result if inspect.isawaitable(result) else result
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def tell(set_it: Callable[[Any], None], value: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(lambda: None if done.done() else set_it(value))

    def run() -> None:
        try:
            result = function()
        except BaseException as error:
            told = error if isinstance(error, Exception) and not isinstance(error, StopIteration) else _as_error(error)
            tell(done.set_exception, told)
        else:
            tell(done.set_result, result)

    threading.Thread(target=run, daemon=True, name="flowrl-environment").start()
    return await done


def _as_error(error: BaseException) -> RuntimeError:
    """What ends a program or a generator, as an error: it is a thread that it would have ended."""
    said = str(error)
    told = RuntimeError(f"it raised {type(error).__name__}{': ' if said else ''}{said}")
    return told.with_traceback(error.__traceback__)


def told(error: BaseException) -> str:
    """What an error says, and where in the environment's own code it was raised, as far as that is known."""
    if isinstance(error, FlowrlError):
        return str(error)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_OWN)]
    where = f" (at {frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    said = str(error)
    return f"{type(error).__name__}{': ' if said else ''}{said}{where}"
