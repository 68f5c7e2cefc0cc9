"""The predicted memory of a job as text."""

from __future__ import annotations

from collections.abc import Iterator

from flowrl.protocols.footprint import GIB, PARTS, STATED, Parts
from flowrl.run.prediction.fitting import Change
from flowrl.run.prediction.memory import Memory, Stage


def described(memory: Memory, change: Change | None) -> list[str]:
    """The peak of each slot by process and part, and the change that fits, if it does not.

    Slots with the same peak are one entry.
    """
    limits = memory.limits
    lines = [
        f"memory of each slot on {memory.hardware}, in GiB, for rows of at most {limits.prompt} + {limits.response} "
        f"tokens (predicted; * stated, not computed):"
    ]
    peaks: dict[tuple[str, ...], list[int]] = {}
    for slot, stage in memory.peaks.items():
        peaks.setdefault(tuple(_entries(stage)), []).append(slot)
    for (title, *entries), slots in peaks.items():
        stage = memory.peaks[slots[0]]
        verdict = "fits" if stage.bytes <= memory.hardware.room else "does not fit"
        lines += [f"  {_slots(slots)}, {title}: {_gib(stage.bytes)}, {verdict}", *entries]
    if memory.unknown:
        lines.append(
            f"  not counted: {', '.join(memory.unknown)}, whose backends predict nothing. State what each takes: "
            f"memory=<GiB>."
        )
    if memory.fits:
        return lines
    if change is None:
        return [*lines, "  no change of micro-batches, checkpointing, ranks, offload and adapters makes it fit"]
    peak = change.memory.worst
    return [*lines, f"  cheapest change that fits, at {_gib(peak.bytes)}: {change.options}"]


def _entries(stage: Stage) -> Iterator[str]:
    yield f"at its peak in {stage.node}"
    for one in stage.alive:
        yield f"    {one.process}{' (asleep)' if one.asleep else ''}: {_parts(one.parts)}"


def _parts(parts: Parts) -> str:
    found = [f"{name} {_gib(parts[name])}{'*' if name in STATED else ''}" for name in PARTS if parts.get(name)]
    return ", ".join(found) or "nothing"


def _slots(slots: list[int]) -> str:
    return f"slot {slots[0]}" if len(slots) == 1 else f"slots {', '.join(map(str, slots))}"


def _gib(size: int) -> str:
    """GiB with three digits that count."""
    return f"{size / GIB:.{2 if size < 10 * GIB else 1}f}" if size >= 0.005 * GIB else f"{size / GIB:.1g}"
