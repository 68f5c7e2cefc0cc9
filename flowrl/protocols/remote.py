"""`RemoteRollout`: the handle of an engine in another process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from flowrl.protocols.protocols import Request, Response
from flowrl.records import Receipt

if TYPE_CHECKING:
    from flowrl.data.text.tokenizer import ChatTokenizer


@runtime_checkable
class RemoteRollout(Protocol):
    """A handle of a `StreamingRollout` in another process, which computes there."""

    @property
    def tokenizer(self) -> ChatTokenizer: ...

    @property
    def receipt(self) -> Receipt | None: ...

    async def exchange(self, requests: Sequence[Request], dropped: Sequence[str]) -> Sequence[tuple[str, Response]]:
        """Drop the requests of these names, submit others, and compute until some response ends, or for some steps.

        Returns:
            the responses that ended, by the names of their requests.

        Raises:
            EngineError: the engine or its process failed.
        """
        ...
