"""The predicted times of a job as text."""

from __future__ import annotations

from flowrl.run.prediction.hardware import Hardware
from flowrl.run.prediction.stages import Times, by_reason
from flowrl.run.prediction.timing import ERRORS


def timed(times: Times, hardware: Hardware) -> list[str]:
    """The seconds of each node by stage with their source, and of a step with the interval of published runs."""
    lines = [f"seconds of each stage on {hardware.name} (predicted; formulas, stated hardware, 4 fitted constants):"]
    for kind in ("generate", "score", "update", "sync"):
        found = [one for one in times.stages if one.kind == kind]
        if found:
            lines.append(f"  {kind}: {_seconds(times.of(kind))}")
            lines += [f"    {one.node}: {_seconds(one.seconds)}, {one.source}" for one in found]
    how = "one after another" if not times.lag else f"with lag {times.lag}, the busiest slot"
    lines.append(f"  step, {how}: {_seconds(times.seconds)}")
    if any(not one.source.startswith("measured") for one in times.stages):
        least, most = ERRORS["step"]
        lines.append(
            f"  of published steps of other models, 80 % took {least} to {most} times what this predicts: "
            f"{_seconds(times.seconds * least)} to {_seconds(times.seconds * most)}"
        )
    if float32 := [one.node for one in times.stages if one.float32]:
        lines.append(
            f"  in float32: {', '.join(float32)}, by the stated speed in float32; published steps compute in bfloat16"
        )
    if times.unknown:
        lines.append(f"  not predicted: {by_reason(times.unknown)}")
    return lines


def _seconds(seconds: float) -> str:
    """Seconds with three digits that count."""
    return f"{seconds:.3g} s"
