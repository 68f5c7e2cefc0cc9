"""Errors of a process that ran out of memory, whatever library noticed it, as one error with the limit."""

from __future__ import annotations

import os
import resource
import traceback
from collections.abc import Iterator

from flowrl.errors import EngineError, FlowrlError

_SIGNS = ("can't allocate memory", "Cannot allocate memory", "failed to map segment", "std::bad_alloc")
"""What libraries say when the system refuses memory."""
_SIGNS_UNDER_A_LIMIT = ("can't start new thread",)
"""What they say where its stack does not fit; without a limit on memory it means too many threads."""


def out_of_memory(error: Exception, command: str) -> FlowrlError | None:
    """The error for one that a lack of memory caused: what was done, and the limit; None for others."""
    limit: int | None = resource.getrlimit(resource.RLIMIT_AS)[0]
    limit = None if limit == resource.RLIM_INFINITY else limit
    if limit is None and isinstance(error, FlowrlError):  # which says all that is known
        return None
    signs = _SIGNS if limit is None else _SIGNS + _SIGNS_UNDER_A_LIMIT
    if not any(isinstance(one, MemoryError) or any(sign in str(one) for sign in signs) for one in _chain(error)):
        return None
    if limit is None:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        allowed, advice = f"This machine has {_size(total)} of memory", "Use a smaller model or batch, or more memory"
    else:
        allowed = f"The process may use {_size(limit)} of address space (ulimit -v {limit >> 10})"
        advice = "Raise the limit: ulimit -v unlimited"
    if isinstance(error, FlowrlError):
        doing = error.message.splitlines()[0].rstrip(".: ")
    else:
        doing = "at {0.filename}:{0.lineno}".format(traceback.extract_tb(error.__traceback__)[-1])
    return EngineError(
        f"flowrl {command} ran out of memory ({doing}). {allowed}. {advice}.",
        code="cli.out-of-memory",
        command=command,
        limit=limit,
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and those that it was raised from."""
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"
