"""Settings that an algorithm passes on to its neighbour, and those that it cannot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flowrl.errors import ParameterError


def refuse_lost(algorithm: str, settings: Mapping[str, Any], *lost: str) -> None:
    """Refuse settings of the neighbour that would be without effect here.

    Args:
        algorithm: its name.
        settings: what it was given to pass on.
        lost: what belongs to a part of the neighbour that the algorithm leaves out.

    Raises:
        ParameterError: one of them was given.
    """
    if given := [name for name in lost if name in settings]:
        raise ParameterError(
            f"{algorithm}({given[0]}={settings[given[0]]!r}) would be without effect, since {algorithm} leaves out "
            f"what {given[0]} is for; leave it out, too."
        )
