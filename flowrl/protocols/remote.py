"""`RemoteWeights`: the weights of a trainer in another process, and what was sent of them."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable


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
