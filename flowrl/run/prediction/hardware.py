"""`Hardware`: the devices of a place, by name or stated."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from pydantic import Field

from flowrl.errors import ParameterError, offer
from flowrl.protocols.footprint import GIB
from flowrl.spec import Spec

_MIB = MappingProxyType(
    {
        "A100-40GB": 40_960,
        "A100": 81_920,
        "H100": 81_559,
        "H20": 97_871,
        "H200": 143_771,
        "B200": 183_359,
        "L40S": 46_068,
        "RTX4090": 24_564,
    }
)
"""The memory that ``nvidia-smi`` reports for each, in MiB: about 2 GiB less than vendors' decimal GB."""


class Hardware(Spec):
    """A device of each slot: its memory in GiB, and what it is.

    Args:
        memory: GiB of a slot.
        device: ``"cuda"``, or ``"cpu"``, where an engine that sleeps keeps its memory.
        name: for messages.
    """

    schedulable = False

    memory: float = Field(gt=0, allow_inf_nan=False)
    device: Literal["cuda", "cpu"] = "cuda"
    name: str = "own hardware"

    @property
    def room(self) -> int:
        """Bytes of a slot."""
        return round(self.memory * GIB)

    def __str__(self) -> str:
        return f"{self.name} ({self.memory:.1f} GiB)"


HARDWARE: Mapping[str, Hardware] = MappingProxyType(
    {name: Hardware(size / 1024, name=name) for name, size in _MIB.items()}
)
"""Hardware by name."""


def hardware_of(name: Any) -> Hardware:
    """The hardware of this name, in any case.

    Raises:
        ParameterError: flowrl knows none of this name.
    """
    known = {key.lower(): one for key, one in HARDWARE.items()}
    if (found := known.get(str(name).lower().replace(" ", ""))) is None:
        raise ParameterError(
            f"{name!r} is no hardware that flowrl knows; {offer(str(name), HARDWARE, 'it knows')} State others: "
            f"'Hardware(memory=24)', in GiB.",
            code="memory.unknown-hardware",
            found=name,
            known=sorted(HARDWARE),
        )
    return found
