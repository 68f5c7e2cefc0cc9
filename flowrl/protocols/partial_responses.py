"""`PartialResponses`: an engine whose responses can be read while they are sampled."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from flowrl.protocols.protocols import StreamingRollout


@runtime_checkable
class PartialResponses(StreamingRollout, Protocol):
    """A `StreamingRollout` that gives the tokens of a response before it ends."""

    def sampled_so_far(self, name: str, start: int) -> list[int]:
        """The tokens of a request in flight so far, from this number on; none of one that is not in flight."""
        ...
