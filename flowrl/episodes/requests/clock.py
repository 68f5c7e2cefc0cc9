"""`EpisodeClock`: the time limit of an episode's environment."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from flowrl.data.waits import WaitRecorder


class EpisodeClock:
    """Ends an episode whose environment takes longer than `seconds` between two answers. It stops while an engine
    computes for the episode.

    Args:
        environments: records when the episode waits for its environment.
    """

    def __init__(self, seconds: float, environments: WaitRecorder) -> None:
        self._seconds, self._environments = seconds, environments
        self._timeout = asyncio.Timeout(None)
        self._requests = 0  # in flight
        self._entered = False

    async def __aenter__(self) -> None:
        self._environments.begin()
        self._timeout = asyncio.timeout(self._seconds)
        await self._timeout.__aenter__()
        self._entered = True

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered = False
        if not self._requests:
            self._environments.end()
        await self._timeout.__aexit__(kind, error, trace)

    def expired(self) -> bool:
        """Whether it has ended the episode."""
        return self._timeout.expired()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop it during a request to an engine; it starts again after the last one, also if that is refused."""
        if not self._requests:
            self._timeout.reschedule(None)
            self._environments.end()
        self._requests += 1
        try:
            yield
        finally:
            self._requests -= 1
            if not self._requests and self._entered:
                self._environments.begin()
                self._timeout.reschedule(asyncio.get_running_loop().time() + self._seconds)

    def stop(self) -> None:
        """Stop it for good, unless the time is over."""
        if not self.expired():
            self._timeout.reschedule(None)
