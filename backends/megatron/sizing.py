"""The memory of a `MegatronTrainer`, from a configuration alone; megatron-core is not imported."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from flowrl.backends.megatron.architecture import EMBEDDING, weights
from flowrl.backends.torch.on_mesh import configuration
from flowrl.backends.torch.score.rows import Budget
from flowrl.backends.torch.sizing.logits import Head
from flowrl.backends.torch.sizing.steps import Steps
from flowrl.backends.torch.sizing.trace import MicroBatch, Peaks, Run, trace
from flowrl.backends.torch.sizing.weights import FLOAT, WIDTHS, Model, Weight, Weights, weights_of
from flowrl.backends.torch.train.boxes import Place, local_shape
from flowrl.protocols.footprint import CUDA_BYTES, Call, Demand, Footprint, Parts, largest
from flowrl.protocols.mesh import Mesh
from flowrl.sync.buckets import BUCKET_BYTES, in_buckets


def footprint_of(spec: Any, demand: Demand) -> Footprint:
    """The footprint of the process that takes the most in an update: the first stage has the embedding and the most
    micro-batches in flight, and the last one the head. Scores take what they do on the stage where this is the most."""
    numbers = sorted({0, spec.geometry.pipeline - 1})
    stages = [_Stage(spec, demand, number).footprint() for number in numbers]
    most, score = max(stages, key=_most), largest(*(stage.calls["score"] for stage in stages))
    return replace(most, calls={**most.calls, "score": score})


def _most(footprint: Footprint) -> int:
    return sum(footprint.awake.values()) + sum(footprint.calls["update"].values())


@functools.cache
def _peaks(model: Model, batch: MicroBatch, run: Run, dtype: str) -> Peaks:
    """The activations of some layers, traced as transformers computes them without fused attention: as megatron-core
    does, it has all scores of attention at a time, and saves their softmax."""
    lm: Any = model.skeleton()
    return trace(lm.to(getattr(torch, dtype)), batch, run)


class _Stage:
    """The first process of a stage of the pipeline on the axis ``tensor``.

    Args:
        number: of the stage.
    """

    def __init__(self, spec: Any, demand: Demand, number: int) -> None:
        self.spec, self.demand, self.number = spec, demand, number
        self.mesh: Mesh = spec.geometry
        self.config = configuration(spec.model)
        self.layers: int = self.config.num_hidden_layers // self.mesh.pipeline
        self.first: bool = number == 0
        self.last: bool = number == self.mesh.pipeline - 1
        self.width = WIDTHS[spec.dtype]

    def footprint(self) -> Footprint:
        """Its footprint; it takes the same asleep."""
        numbers = [math.prod(shape) for shape in self._trained]
        trained, tied = FLOAT * sum(numbers), self._copied
        copies = 0 if self.width == FLOAT else self.width * sum(numbers)  # the layers compute with these
        each = tuple(Weight(shape, True, 0) for shape in self._trained)
        steps = Steps(
            self.spec.optimizer, Weights(each, False, (), 0, 0, (0, 0, 0, 0)), Mesh(), self.demand.device, sharded=True
        )
        cuda = {"CUDA": CUDA_BYTES} if self.demand.device == "cuda" else {}
        resident = {
            "weights": trained + copies + self.width * tied,
            "optimizer states": steps.states,
            "activations": self._scores,
            **cuda,
        }
        gradients = {"gradients": trained + FLOAT * tied}
        moments = [gradients | parts for parts in self._passes()]
        step = gradients | {"optimizer states": steps.peak(False)}
        calls: dict[Call, Parts] = {"update": largest(step, *moments), "score": self._score(), "send": self._send()}
        return Footprint(resident, resident, calls, sum(self._sent))

    @functools.cached_property
    def _trained(self) -> list[tuple[int, ...]]:
        """The shapes of its parts of the weights that it trains."""
        place = Place(0, self.mesh.tensor, 0, 1)
        return [local_shape(one.shape, one.cut, place) for name, one in weights(self.config) if self._has(name)]

    def _has(self, name: str) -> bool:
        parts = name.split(".")
        if parts[:2] == ["decoder", "layers"]:
            return int(parts[2]) // self.layers == self.number
        return self.first if name == EMBEDDING else self.last

    @property
    def _vocabulary(self) -> int:
        return -(-int(self.config.vocab_size) // self.mesh.tensor)

    @property
    def _copied(self) -> int:
        """The numbers of the head that is a copy of the first stage's embedding."""
        copies = self.config.tie_word_embeddings and self.last and not self.first
        return self._vocabulary * int(self.config.hidden_size) * bool(copies)

    @property
    def _batch(self) -> MicroBatch:
        """The largest micro-batch, whose rows are padded to the longest."""
        budget = Budget.of(self.spec.max_tokens, torch.device(self.demand.device), packed=False)
        rows = max(1, budget.positions // self.demand.tokens)
        rows = rows if self.demand.rows is None else max(1, min(rows, self.demand.rows))
        return MicroBatch(rows, self.demand.tokens, self.demand.response, packed=False)

    @property
    def _in_flight(self) -> int:
        """The micro-batches whose activations it has at a time (1F1B: Narayanan et al. 2021, arXiv:2104.04473)."""
        most = self.mesh.pipeline - self.number
        return most if self.demand.rows is None else min(most, -(-self.demand.rows // self._batch.rows))

    @property
    def _scores(self) -> int:
        """Bytes of megatron-core's buffer of attention scores, which stays after the first pass."""
        heads = self.config.num_attention_heads // self.mesh.tensor
        return self.width * self._batch.rows * int(heads) * self._batch.tokens**2

    @property
    def _head(self) -> Head:
        """Its part of the head, in the compute dtype."""
        batch = self._batch
        return Head(
            self._vocabulary,
            self.config.hidden_size,
            batch.rows * batch.scored,
            self.spec.logprob_chunk,
            self.demand.device,
            self.spec.dtype == "bfloat16",
            True,
            self.demand.distributions,
        )

    def _traced(self, trains: bool) -> Peaks:
        model = Model(self.spec.model, attention="eager", tensor=self.mesh.tensor, layers=self.layers)
        checkpoints = bool(self.spec.gradient_checkpointing) and trains
        found = _peaks(model, self._batch, Run(False, trains, checkpoints), self.spec.dtype)
        # megatron-core adds an offset, 0, to the up projection, which is another tensor for the product with the gate
        more = self.width * self._batch.positions * int(self.config.intermediate_size) // self.mesh.tensor
        kept = (self.layers if trains and not checkpoints else 1) * more
        saved = kept if trains and not checkpoints else 0
        return Peaks(found.saved + saved, found.forward + kept, found.last + kept, found.rest + kept)

    def _passes(self) -> Iterator[dict[str, int]]:
        """The moments of a micro-batch, while others are in flight: in the forward pass, at the head, in the backward
        pass of the layers and of the embedding."""
        peaks = self._traced(trains=True)
        others, head = (self._in_flight - 1) * peaks.saved, self._head
        gradient = self.width * head.vocabulary * head.hidden
        tied = gradient * bool(self.first and self.last and self.config.tie_word_embeddings)
        narrow = 0 if self.width == FLOAT else gradient + self.width * head.tokens * head.hidden  # rounded copies
        yield {"activations": others + peaks.forward}
        if self.last:
            yield {"activations": others + peaks.saved, "logits": head.backward + narrow}
        yield {"activations": others + peaks.last, "logits": tied}
        if self.first:
            yield {"activations": others + peaks.rest, "logits": tied}

    def _score(self) -> Parts:
        peaks = self._traced(trains=False)
        logits = self._head.forward if self.last else 0
        # In its calls megatron-core keeps what the stage received, its last layer's output and the norm's.
        kept = 0 if self.first else 3 * self.width * self._batch.positions * int(self.config.hidden_size)
        return largest({"activations": peaks.forward}, {"activations": peaks.saved + kept, "logits": logits})

    @functools.cached_property
    def _sent(self) -> list[int]:
        """Bytes of each tensor that a sync sends."""
        found = weights_of(Model(self.spec.model)).sent
        return [one.width(self.demand.sent_in) * math.prod(shape) for one in found for shape in one.stored]

    def _send(self) -> Parts:
        """A sync: all processes add up a bucket while the one before is still read, and one of them packs a bucket."""
        most = before = packed = 0
        narrow, streams = self.demand.sent_in != "float32", self.demand.transport != "object store"
        for bucket in in_buckets([("", _Sized(size)) for size in self._sent], BUCKET_BYTES):  # type: ignore[misc]
            sizes = [one.nbytes for _, one in bucket]
            rounded = max(sizes) * narrow // self.mesh.tensor
            most = max(most, before + sum(sizes) + rounded + packed)
            packed = max(packed, BUCKET_BYTES, *sizes) * streams
            most, before = max(most, before + sum(sizes) + packed), sum(sizes)
        return {"sync buckets": most}


class _Sized:
    """A tensor of which only the size counts."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
