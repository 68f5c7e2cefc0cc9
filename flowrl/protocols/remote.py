"""Handles of engines in other processes: `RemoteWeights` of a trainer, `RemoteRollout` of an engine that is asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from flowrl.errors import DataError
from flowrl.protocols.protocols import Request, Response, StreamingRollout
from flowrl.records import Receipt

if TYPE_CHECKING:
    from flowrl.data.text.tokenizer import ChatTokenizer


Ended = tuple[str, Response | DataError]
"""The response to a request, or why the engine refuses it, with the request's name."""


class SentChanges(NamedTuple):
    """What a sync with ``changed=True`` sent: its bytes, and the share of all values that changed since the last sync
    (None if all weights were sent)."""

    nbytes: int
    share: float | None


@runtime_checkable
class RemoteWeights(Protocol):
    """A proxy of a trainer in another process, which provides its weights."""

    @property
    def transport(self) -> str:
        """The transport, such as ``"gloo"``."""
        ...

    @property
    def changes(self) -> SentChanges | None:
        """What was sent, once all weights arrived; None if the sync sends all weights every time."""
        ...


@runtime_checkable
class RemoteRollout(Protocol):
    """A handle of a `StreamingRollout` in another process, which computes there."""

    @property
    def tokenizer(self) -> ChatTokenizer: ...

    @property
    def receipt(self) -> Receipt | None: ...

    async def exchange(self, requests: Sequence[Request], dropped: Sequence[str]) -> Sequence[Ended]:
        """Drop the requests of these names, submit others, and compute until some response ends, or for some steps.

        Returns:
            the responses that ended, by the names of their requests, and why the engine refuses others.

        Raises:
            EngineError: the engine or its process failed.
        """
        ...


def submit(engine: StreamingRollout, requests: Sequence[Request]) -> list[tuple[str, DataError]]:
    """Submit requests to an engine; those that it refuses, by name."""
    refused = []
    for request in requests:
        try:
            engine.submit(request)
        except DataError as error:
            refused.append((request.name, error))
    return refused
