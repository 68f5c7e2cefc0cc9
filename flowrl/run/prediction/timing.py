"""The seconds of each stage of a step, from a model's shape, stated hardware and four fitted constants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from flowrl.run.prediction.arithmetic import HALF, Shape


class Fitted(NamedTuple):
    """All constants that are fitted; see ``benchmarks/published_runs.py``.

    Args:
        compute: the part of the stated operations a second that matrix products reach.
        bandwidth: the part of every stated bandwidth: of memory, and of what ranks gather and reduce.
        layer: seconds of a layer for a token of decoding, beside its bytes and operations: launches and all-reduces.
        sync: the part of the stated bandwidth that a sender reaches, which gathers, converts and packs weights.
    """

    compute: float
    bandwidth: float
    layer: float
    sync: float


class Speed(NamedTuple):
    """What the vendor states of a device: dense bfloat16 operations a second, and bytes a second of its memory, of its
    link to the others of a machine and of its network, in one direction."""

    flops: float
    memory: float
    link: float
    network: float


class Lengths(NamedTuple):
    """Tokens of a row: the mean and the longest.

    The part of rows longer than t is 1 - (t / longest) ** k, with the k that gives the mean.
    """

    mean: float
    longest: float

    @property
    def power(self) -> float:
        """The k of the distribution."""
        return self.mean / (self.longest - self.mean) if self.mean < self.longest else float("inf")

    @property
    def context(self) -> float:
        """The mean number of tokens that a token of a row attends to."""
        if self.mean >= self.longest:
            return self.longest / 2.0
        return self.longest**2 * self.power / (self.power + 2.0) / (2.0 * self.mean)

    def alive(self, place: float) -> float:
        """The part of rows that are longer than this part of the longest."""
        return 1.0 if self.mean >= self.longest else 1.0 - place**self.power


@dataclass(frozen=True)
class Passes:
    """Passes over rows on the devices of a trainer.

    Args:
        weights, attention: passes of the size of a forward one, of the products with weights and of attention.
        gathers: times that a micro-batch moves all weights in bfloat16 between the ranks that shard them.
    """

    weights: float
    attention: float
    gathers: float


SCORE = Passes(1.0, 1.0, 1.0)
"""A forward pass."""


def update_of(checkpoints: bool | int | str, lora: bool) -> Passes:
    """The passes of an update: forward, the gradients of inputs and of trained weights, and with checkpoints forward
    again, or each n-th layer of it; attention's backward pass is 2.5 forward ones (Dao 2023, arXiv:2307.08691, section
    4.1)."""
    again = 1.0 / checkpoints if isinstance(checkpoints, int) and checkpoints else float(bool(checkpoints))
    return Passes(2.0 + again + (not lora), 3.5 + again, 2.0 + (0.0 if lora else 2.0))  # float32 gradients count twice


@dataclass(frozen=True)
class Trainer:
    """Devices that train.

    Args:
        devices: all of them.
        shards: ranks that gather each other's weights; 1 gathers none.
        tensor: ranks that split each layer.
        per_machine: devices of a machine, which links connect.
        micro_batches: of a step on a data rank.
        idle: the part of the time that stages of a pipeline wait for each other.
    """

    devices: int
    shards: int
    tensor: int
    micro_batches: float
    per_machine: int = 8
    idle: float = 0.0


@dataclass(frozen=True)
class Rollout:
    """Engines that generate: how many, the devices of each, and the most rows that one decodes at a time."""

    engines: int
    tensor: int
    max_rows: int


def trained_seconds(
    shape: Shape, speed: Speed, fitted: Fitted, lengths: Lengths, rows: float, trainer: Trainer, passes: Passes
) -> float:
    """Seconds of passes over rows: products and memory traffic one after the other, or gathers, whichever is longer."""
    tokens = rows * lengths.mean / trainer.devices
    flops = 2.0 * shape.active * passes.weights + shape.attention_flops(lengths.context) * passes.attention
    products = tokens * flops / (speed.flops * fitted.compute)
    traffic = tokens * shape.traffic_bytes * passes.weights / (speed.memory * fitted.bandwidth)
    reduced = 0.0
    if trainer.tensor > 1:  # two all-reduces of a layer, of which each moves its bytes twice
        sent = 4 * HALF * shape.layers * shape.hidden * (trainer.tensor - 1)
        reduced = tokens * sent * passes.weights / (speed.link * fitted.bandwidth)
    gathered = 0.0
    if trainer.shards > 1:
        path = speed.link if trainer.shards <= trainer.per_machine else speed.network
        moved = HALF * shape.weights * passes.gathers * trainer.micro_batches
        gathered = moved * (1.0 - 1.0 / trainer.shards) / (path * fitted.bandwidth)
    return max(products + traffic + reduced, gathered) / (1.0 - trainer.idle)


def generated_seconds(
    shape: Shape, speed: Speed, fitted: Fitted, lengths: Lengths, prompt: float, rows: float, rollout: Rollout
) -> float:
    """Seconds to prefill and decode rows: engines stay full while rows wait, then empty as rows end.

    A step of decoding reads the weights that its tokens use and the cache of every row, then computes (the roofline of
    Williams et al. 2009 without overlap), and waits `Fitted.layer` a layer.

    Args:
        prompt: the mean tokens of a prompt, which are part of `lengths`.
    """
    each = rows / rollout.engines
    full = min(each, rollout.max_rows)
    flops = speed.flops * rollout.tensor * fitted.compute
    bandwidth = speed.memory * rollout.tensor * fitted.bandwidth
    wait = fitted.layer * shape.layers

    def step(batch: float, context: float) -> float:
        read = HALF * shape.read(batch) + batch * context * shape.cache_bytes
        products = batch * (2.0 * shape.active + shape.attention_flops(context))
        return read / bandwidth + products / flops + wait

    decoded = 1.0 - prompt / lengths.mean
    points = 64
    drained = 0.0
    for point in range(points):
        place = (point + 0.5) / points
        batch = max(full * lengths.alive(place), 1.0)
        drained += step(batch, place * lengths.longest) * lengths.longest / points
    waiting = (each - full) * lengths.mean / full * step(full, lengths.context)
    prefill = each * prompt * (2.0 * shape.active + shape.attention_flops(prompt / 2.0)) / flops
    return (drained + waiting) * decoded + prefill


def synced_seconds(shape: Shape, speed: Speed, fitted: Fitted, one_machine: bool, senders: int = 1) -> float:
    """Seconds to send all weights in bfloat16 from these trainers, each its part: by the link of a machine, or by the
    network."""
    return HALF * shape.weights / ((speed.link if one_machine else speed.network) * senders * fitted.sync)


FITTED = Fitted(compute=0.378, bandwidth=0.689, layer=0.000517, sync=0.056)
"""The constants of ``python benchmarks/published_runs.py --fit``."""

ERRORS: Mapping[str, tuple[float, float]] = MappingProxyType(
    {"update": (0.79, 1.25), "step": (0.41, 0.8), "sync": (0.55, 1.52)}
)
"""By stage, published / predicted seconds of the models that are held out, without a tenth of the rows at each end."""
