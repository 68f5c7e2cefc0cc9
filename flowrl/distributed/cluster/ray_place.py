"""`RayPlace`: the settings of all places on Ray."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from flowrl.run.placement.place import Place

_YEAR = 365 * 86400


class RayPlace(Place):
    """Base of places whose processes are Ray's.

    Args:
        address: the Ray cluster to join; None for a local one, which the first job starts and later ones reuse.
        memory, per_machine: see `Place`.
        deadline: seconds until a running node counts as stuck, at most a year.
        restart: ``"role"`` rebuilds a role whose process died and repeats the step; ``"never"`` raises.
    """

    address: str | None = Field(default=None, kw_only=True)
    deadline: float = Field(default=3600.0, gt=0, le=_YEAR, strict=True, kw_only=True)
    restart: Literal["never", "role"] = Field(default="never", kw_only=True)

    @property
    def rebuilds(self) -> bool:
        return self.restart == "role"

    @property
    def elsewhere(self) -> bool:
        return self.address is not None
