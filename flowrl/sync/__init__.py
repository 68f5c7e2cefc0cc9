"""Weight transfer from a trainer to an engine, and the proof that both hold the same weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowrl.lazy import lazy

if TYPE_CHECKING:
    from flowrl.sync.digest import weights_digest
    from flowrl.sync.route import Seat, choose

__all__ = [
    "Seat",
    "choose",
    "weights_digest",
]

__getattr__ = lazy(
    __name__,
    {
        "Seat": "route",
        "choose": "route",
        "weights_digest": "digest",
    },
)
