"""`Hardware`: the devices of a place, by name or stated."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from pydantic import Field

from flowrl.errors import ParameterError, offer
from flowrl.protocols.footprint import GIB
from flowrl.run.prediction.timing import Speed
from flowrl.spec import Spec

_FIGURES = {
    "A100-40GB": (40_960, 312, 19.5, 1555, 300),
    "A100": (81_920, 312, 19.5, 2039, 300),
    "H100": (81_559, 989, 67, 3350, 450),
    "H20": (97_871, 148, 44, 4000, 450),
    "H200": (143_771, 989, 67, 4800, 450),
    "B200": (183_359, 2250, 75, 8000, 900),
    "L40S": (46_068, 362, 91.6, 864, 32),
    "RTX4090": (24_564, 165, 82.6, 1008, 32),
}
"""The memory that ``nvidia-smi`` reports, in MiB, about 2 GiB less than vendors' decimal GB; and of vendors' data
sheets: dense bfloat16 and float32 TFLOP/s, and GB/s of memory and of the link (NVLink, or PCIe 4) in one direction."""


class Hardware(Spec):
    """A device of each slot: its memory in GiB, and what it is.

    Args:
        memory: GiB of a slot.
        device: ``"cuda"``, or ``"cpu"``, where an engine that sleeps keeps its memory.
        name: for messages.
        flops: dense bfloat16 operations a second, in TFLOP/s; times are predicted only if this and `bandwidth` are
            stated.
        flops_float32: operations a second in float32 without TF32, which torch leaves off, in TFLOP/s; if None, nodes
            that compute in float32 have no predicted time.
        bandwidth: of its memory, in GB/s.
        link: to the other devices of its machine, in GB/s and one direction.
        network: of each device to other machines, likewise.
    """

    schedulable = False

    memory: float = Field(gt=0, allow_inf_nan=False)
    device: Literal["cuda", "cpu"] = "cuda"
    name: str = "own hardware"
    flops: float | None = Field(None, gt=0, allow_inf_nan=False)
    flops_float32: float | None = Field(None, gt=0, allow_inf_nan=False, kw_only=True)
    bandwidth: float | None = Field(None, gt=0, allow_inf_nan=False)
    link: float = Field(32.0, gt=0, allow_inf_nan=False)
    network: float = Field(50.0, gt=0, allow_inf_nan=False)

    @property
    def room(self) -> int:
        """Bytes of a slot."""
        return round(self.memory * GIB)

    @property
    def speed(self) -> Speed | None:
        """Its stated figures in operations and bytes a second; None if they are not stated."""
        if self.flops is None or self.bandwidth is None:
            return None
        return Speed(self.flops * 1e12, self.bandwidth * 1e9, self.link * 1e9, self.network * 1e9)

    @property
    def speed_float32(self) -> Speed | None:
        """The same in float32; its numbers have twice the bytes of those that `Speed` counts, so they move half as
        fast."""
        if self.speed is None or self.flops_float32 is None:
            return None
        _, *paths = self.speed
        return Speed(self.flops_float32 * 1e12, *(path / 2 for path in paths))

    def __str__(self) -> str:
        return f"{self.name} ({self.memory:.1f} GiB)"


HARDWARE: Mapping[str, Hardware] = MappingProxyType(
    {
        name: Hardware(size / 1024, name=name, flops=flops, flops_float32=float32, bandwidth=bandwidth, link=link)
        for name, (size, flops, float32, bandwidth, link) in _FIGURES.items()
    }
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
