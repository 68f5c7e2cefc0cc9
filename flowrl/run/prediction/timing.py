"""The seconds of each stage of a step, from a model's shape, stated hardware and four fitted constants."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from flowrl.run.prediction.arithmetic import HALF, Shape


class Fitted(NamedTuple):
    """All constants that are fitted; see ``benchmarks/published_runs.py``.

    Args:
        compute: the part of the stated operations a second that matrix products reach.
        layer: seconds of a layer of experts for a token of decoding, without its bytes and operations: routing, and
            many small products.
        experts: seconds of a pass of a layer of experts over a micro-batch of a trainer, without its operations: before
            it launches them, the host waits for the number of tokens of each.
        sync: the part of the stated bandwidth that a sender reaches, which gathers, converts and packs weights.
    """

    compute: float
    layer: float
    experts: float
    sync: float


BANDWIDTH = 0.8
"""Stated: the part of every stated bandwidth that is reached: of memory, and of what ranks gather and reduce."""

LAUNCHES = 5e-5
"""Stated: seconds of a dense layer for a token of decoding, without its bytes and operations: about ten
kernels of a CUDA graph, 5 microseconds each."""

HOP = 5e-6
"""Stated: seconds of a message of a few bytes between two devices; an all-reduce of n sends 2 log2(n) one after the
other (a binary tree, there and back), and a layer has two all-reduces."""

_POINTS = 64


class Speed(NamedTuple):
    """What the vendor states of a device: dense bfloat16 operations a second, and bytes of bfloat16 numbers a second
    of its memory, of its link to the others of a machine and of its network, in one direction."""

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


def update_of(checkpoints: bool | int | str, lora: bool, float32: bool = False) -> Passes:
    """The passes of an update: forward, the gradients of inputs and of trained weights, and with checkpoints forward
    again, or each n-th layer of it; attention's backward pass is 2.5 forward ones (Dao 2023, arXiv:2307.08691, section
    4.1)."""
    again = 1.0 / checkpoints if isinstance(checkpoints, int) and checkpoints else float(bool(checkpoints))
    reduced = 0.0 if lora else 1.0 if float32 else 2.0  # gradients are float32, with twice the bytes of bfloat16
    return Passes(2.0 + again + (not lora), 3.5 + again, 2.0 + reduced)


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
        pipeline: stages, each of which has its part of the layers.
        expert: ranks that have the experts of a layer together, to which tokens travel and back.
    """

    devices: int
    shards: int
    tensor: int
    micro_batches: float
    per_machine: int = 8
    idle: float = 0.0
    pipeline: int = 1
    expert: int = 1


@dataclass(frozen=True)
class Rollout:
    """Engines that generate.

    Args:
        engines: how many.
        tensor: the devices of each.
        max_rows: the most rows that one decodes at a time.
        refilled: requests of the next step take the places of rows that end, so that an engine stays full.
    """

    engines: int
    tensor: int
    max_rows: int
    refilled: bool = False


def trained_seconds(
    shape: Shape, speed: Speed, fitted: Fitted, lengths: Lengths, rows: float, trainer: Trainer, passes: Passes
) -> float:
    """Seconds of passes over rows: products and memory traffic one after the other, or gathers, whichever is longer."""
    tokens = rows * lengths.mean / trainer.devices
    flops = 2.0 * shape.active * passes.weights + shape.attention_flops(lengths.context) * passes.attention
    products = tokens * flops / (speed.flops * fitted.compute)
    traffic = tokens * shape.traffic_bytes * passes.weights / (speed.memory * BANDWIDTH)
    reduced = 0.0
    if trainer.tensor > 1:  # two all-reduces of a layer, of which each moves its bytes twice
        sent = 4 * HALF * shape.layers * shape.hidden * (trainer.tensor - 1)
        reduced = tokens * sent * passes.weights / (speed.link * BANDWIDTH)
    if trainer.expert > 1:
        path = speed.link if trainer.expert <= trainer.per_machine else speed.network
        sent = 2 * HALF * shape.sparse_layers * shape.chosen * shape.hidden
        reduced += tokens * sent * (1.0 - 1.0 / trainer.expert) * passes.weights / (path * BANDWIDTH)
    gathered = 0.0
    if trainer.shards > 1:
        path = speed.link if trainer.shards <= trainer.per_machine else speed.network
        elsewhere = shape.sparse * shape.experts * shape.sparse_layers * (1.0 - 1.0 / trainer.expert)
        moved = HALF * (shape.weights - elsewhere) * passes.gathers * trainer.micro_batches
        gathered = moved * (1.0 - 1.0 / trainer.shards) / (path * BANDWIDTH)
    waits = fitted.experts * shape.sparse_layers / trainer.pipeline * passes.weights * trainer.micro_batches
    return max(products + traffic + reduced + waits, gathered) / (1.0 - trainer.idle)


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
    bandwidth = speed.memory * rollout.tensor * BANDWIDTH
    wait = fitted.layer * shape.sparse_layers + LAUNCHES * (shape.layers - shape.sparse_layers)
    wait += 4.0 * math.log2(rollout.tensor) * HOP * shape.layers

    def step(batch: float, context: float) -> float:
        read = HALF * shape.read(batch) + batch * context * shape.cache_bytes
        products = batch * (2.0 * shape.active + shape.attention_flops(context))
        return read / bandwidth + products / flops + wait

    decoded = 1.0 - prompt / lengths.mean
    full_steps = each * lengths.mean / full
    drained = 0.0
    if not rollout.refilled:
        full_steps -= lengths.mean
        for point in range(_POINTS):
            place = (point + 0.5) / _POINTS
            batch = max(full * lengths.alive(place), 1.0)
            drained += step(batch, place * lengths.longest) * lengths.longest / _POINTS
    waiting = full_steps * step(full, lengths.context)
    prefill = each * prompt * (2.0 * shape.active + shape.attention_flops(prompt / 2.0)) / flops
    return (drained + waiting) * decoded + prefill


def synced_seconds(sent: float, speed: Speed, fitted: Fitted, one_machine: bool, senders: int = 1) -> float:
    """Seconds to send so many bytes from these trainers, each its part: by the link of a machine, or by the network."""
    return sent / ((speed.link if one_machine else speed.network) * senders * fitted.sync)


FITTED = Fitted(compute=0.385, layer=0.000604, experts=0.00459, sync=0.0603)
"""The constants of ``python benchmarks/published_runs.py --fit``."""

ERRORS: Mapping[str, tuple[float, float]] = MappingProxyType(
    {"update": (0.81, 1.29), "step": (0.44, 1.29), "sync": (0.6, 1.64)}
)
"""By stage, published / predicted seconds of the models that are held out, without a tenth of the rows at each end."""
