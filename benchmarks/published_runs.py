"""Predicted against published seconds: ``python benchmarks/published_runs.py``, and ``--fit`` fits the constants again.

Models, sorted by their weights, alternate between the half that constants are fitted on and the half that is held out;
`flowrl.run.prediction.timing` keeps the constants and, for what `flowrl plan` prints, the errors of the held-out half.
"""

from __future__ import annotations

import itertools
import math
import statistics
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from harness import table

from flowrl.protocols.footprint import GIB
from flowrl.run.prediction.arithmetic import HALF, Shape, shape_of
from flowrl.run.prediction.hardware import HARDWARE, Hardware
from flowrl.run.prediction.timing import (
    FITTED,
    SCORE,
    Fitted,
    Lengths,
    Rollout,
    Trainer,
    generated_seconds,
    synced_seconds,
    trained_seconds,
    update_of,
)

DATA: dict[str, Any] = tomllib.loads((Path(__file__).parent / "published" / "runs.toml").read_text(encoding="utf-8"))
SHAPES: dict[str, Shape] = {name: shape_of(config) for name, config in DATA["models"].items()}
BY_SIZE = sorted(SHAPES, key=lambda name: SHAPES[name].weights)
HELD_OUT = frozenset(BY_SIZE[1::2])
PLAIN = ("Qwen3-30B-A3B", "Qwen3-32B")  # trained without checkpoints
MOST_ROWS = 256  # that an engine decodes at a time: vLLM's max_num_seqs


class Run(NamedTuple):
    """A published row: what it times, its name, and its figures (see ``published/runs.toml``)."""

    stage: str
    name: str
    model: str
    figures: Sequence[Any]
    seconds: float


def runs() -> list[Run]:
    """All rows of the data."""
    found = []
    for source in DATA["source"]:
        for row in source["rows"]:
            stage = {6: "update", 12: "step", 3: "sync"}[len(row)]
            label = f"{source['name']}: {row[0]}, {' '.join(str(one) for one in row[1:-1])}"
            found.append(Run(stage, label, row[0], row[1:-1], row[-1]))
    return found


def hardware(name: str) -> Hardware:
    """The hardware of a row."""
    if name in HARDWARE:
        return HARDWARE[name]
    memory, flops, bandwidth, link, network = DATA["speeds"][name]
    return Hardware(memory, name=name, flops=flops, bandwidth=bandwidth, link=link, network=network)


def predicted(run: Run, fitted: Fitted = FITTED) -> float:
    """The predicted seconds of a row."""
    shape, device = SHAPES[run.model], hardware(run.figures[0])
    speed = device.speed
    assert speed is not None
    if run.stage == "sync":
        return synced_seconds(HALF * shape.weights, speed, fitted, one_machine=False)
    if run.stage == "update":
        gpus, tokens, lora = run.figures[1:]
        trainer = Trainer(gpus, shards=gpus, tensor=1, micro_batches=2)
        return trained_seconds(shape, speed, fitted, Lengths(tokens, tokens), 2 * gpus, trainer, update_of(True, lora))
    gpus, lag, rows, mini, mean, most, engine, tensor, pipeline = run.figures[1:]
    lengths, half = Lengths(mean, most), gpus // 2 if lag else gpus
    micro_batches = mini * mean / most / (half // (tensor * pipeline))  # rows are packed up to the longest
    idle = (pipeline - 1) / (micro_batches + pipeline - 1)  # GPipe, arXiv:1811.06965, section 2.3
    machine = 72 if run.figures[0] == "GB200" else 8
    trainer = Trainer(half, 1, tensor, rows / mini * micro_batches, machine, idle, pipeline)
    cache = (0.8 if lag else 0.6) * device.memory * GIB * engine - HALF * shape.weights
    fits = max(int(cache / (mean * shape.cache_bytes)), 1)
    rollout = Rollout(half // engine, engine, min(MOST_ROWS, fits), refilled=bool(lag))
    train = 2 * trained_seconds(shape, speed, fitted, lengths, rows, trainer, SCORE)  # of the policy and the reference
    train += trained_seconds(shape, speed, fitted, lengths, rows, trainer, update_of(run.model not in PLAIN, False))
    train += synced_seconds(HALF * shape.weights, speed, fitted, not lag or machine >= gpus, 1 if not lag else pipeline)
    generate = generated_seconds(shape, speed, fitted, lengths, 0.0, rows, rollout)
    return max(train, generate) if lag else train + generate


def ordered(every: Sequence[Run]) -> tuple[int, int]:
    """Of the pairs of a model and a stage that are over 30 % apart, those that are ordered rightly, and all."""
    right = count = 0
    for one, other in itertools.combinations(every, 2):
        apart = max(one.seconds, other.seconds) > 1.3 * min(one.seconds, other.seconds)
        if (one.model, one.stage) == (other.model, other.stage) and apart:
            count += 1
            right += (predicted(one) < predicted(other)) == (one.seconds < other.seconds)
    return right, count


def error(every: Sequence[Run], fitted: Fitted = FITTED) -> float:
    """The median of |predicted / published - 1|."""
    return statistics.median(abs(predicted(run, fitted) / run.seconds - 1.0) for run in every)


def interval(every: Sequence[Run]) -> tuple[float, float]:
    """The least and the greatest published / predicted, without a tenth of the rows at each end."""
    ratios = sorted(run.seconds / predicted(run) for run in every)
    tail = len(ratios) // 10
    return round(ratios[tail], 2), round(ratios[-1 - tail], 2)


def held_out(stage: str) -> list[Run]:
    """The rows of a stage that no constant was fitted on."""
    return [run for run in runs() if run.stage == stage and run.model in HELD_OUT]


def summary() -> list[list[str]]:
    """By half and stage: rows, median error, and pairs ordered rightly."""
    lines = []
    for title, held in (("fitted on", False), ("held out", True)):
        half = [run for run in runs() if (run.model in HELD_OUT) is held]
        for stage in ("update", "step", "sync", "all"):
            of_stage = [run for run in half if stage in (run.stage, "all")]
            right, count = ordered(of_stage)
            share = f"{right} of {count}" if count else "none"
            lines.append([f"{title}, {stage}", str(len(of_stage)), f"{error(of_stage):.0%}", share])
    return lines


def fit() -> Fitted:
    """The constants with the least mean of |log(predicted / published)| on the half that is not held out."""
    mine = [run for run in runs() if run.model not in HELD_OUT]

    def loss(logs: Sequence[float]) -> float:
        fitted = Fitted(*map(math.exp, logs))
        return statistics.fmean(abs(math.log(predicted(run, fitted) / run.seconds)) for run in mine)

    found = _least(loss, [math.log(start) for start in (0.4, 6e-4, 3e-3, 0.05)])
    return Fitted(*(float(f"{math.exp(log):.3g}") for log in found))


def _least(loss: Any, at: list[float]) -> list[float]:
    """A minimum, by steps along each axis that halve (Hooke and Jeeves 1961)."""
    best, step = loss(at), 0.8
    while step > 0.005:
        better = min(((loss(near), near) for near in _around(at, step)), key=lambda found: found[0])
        if better[0] < best:
            best, at = better
        else:
            step /= 2.0
    return at


def _around(at: Sequence[float], step: float) -> Iterator[list[float]]:
    for axis, sign in itertools.product(range(len(at)), (-1.0, 1.0)):
        yield [value + sign * step * (axis == place) for place, value in enumerate(at)]


if __name__ == "__main__":
    if "--fit" in sys.argv:
        print(fit())
        sys.exit()
    rows = []
    for run in sorted(runs(), key=lambda one: one.model in HELD_OUT):
        seconds = predicted(run)
        half = "held out" if run.model in HELD_OUT else "fitted on"
        rows.append([run.name, half, f"{run.seconds:.1f}", f"{seconds:.1f}", f"{seconds / run.seconds - 1.0:+.0%}"])
    table("seconds", ["", "half", "published", "predicted", "error"], rows)
    table("median error, and pairs of a model over 30 % apart", ["", "rows", "error", "ordered rightly"], summary())
    left = [f"{source['name']}: {name}: {why}" for source in DATA["source"] for name, why in source["left_out"]]
    print("left out:", *left, sep="\n  ")
