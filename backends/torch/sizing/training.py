"""The footprints of engines on `flowrl.backends.torch.score.model.TorchModel`: trainers, critics and scorers."""

from __future__ import annotations

import math
from typing import Any

import torch

from flowrl.backends.torch.optimizers.specs import Optimizer
from flowrl.backends.torch.score.blocks import Checkpointing
from flowrl.backends.torch.score.rows import Budget
from flowrl.backends.torch.sizing.logits import Head
from flowrl.backends.torch.sizing.sending import sending_bytes
from flowrl.backends.torch.sizing.steps import Steps
from flowrl.backends.torch.sizing.trace import MicroBatch, Peaks, Run
from flowrl.backends.torch.sizing.weights import FLOAT, Model, Weights, peaks_of, weights_of
from flowrl.protocols.footprint import CUDA_BYTES, Call, Demand, Footprint, Parts, largest
from flowrl.protocols.mesh import Mesh
from flowrl.sync.buckets import BUCKET_BYTES


class Engine:
    """The memory of a model that scores, and perhaps trains.

    Args:
        spec: a `flowrl.backends.torch.on_mesh.MeshBackend`; without a `model` it is one that shares the weights of
            `Demand.owner`, and has its settings.
        chunk: tokens of a tile of logits; None has no head over the vocabulary.
    """

    def __init__(self, spec: Any, demand: Demand, chunk: int | None) -> None:
        self.spec = spec if spec.model is not None else demand.owner
        self.demand, self.chunk = demand, chunk
        lora, attention = getattr(self.spec, "lora", None), self.spec.attention
        self.mesh = mesh = self.spec.geometry
        self.model = Model(self.spec.starts_from, lora, chunk is not None, attention, mesh.tensor, mesh.expert)
        self.weights: Weights = weights_of(self.model)
        self.bfloat16 = self.spec.dtype == "bfloat16"
        offload = self.spec.offload in (True, "parameters")
        self.sharded = self.mesh != Mesh() or offload
        self.on_device = demand.device == "cpu" or not offload
        self.resharded = getattr(self.spec, "reshard_after_forward", True)

    def trained(self, optimizer: Optimizer, checkpoints: Checkpointing, routed: bool) -> Footprint:
        """The footprint of a trainer with this optimizer.

        Parameters, gradients and AdamW's two states are 4 bytes a number each (Rajbhandari et al. 2020,
        arXiv:1910.02054, section 3.1, without its float16 copies); activations and logits are those of the largest
        micro-batch.
        """
        weights, own, offload = self.weights, self.on_device, self.spec.offload
        gradients = weights.bytes(self.mesh, trained=True) * own
        steps = Steps(optimizer, weights, self.mesh, self.demand.device, self.sharded)
        states = steps.states * (self.demand.device == "cpu" or offload not in (True, "optimizer"))
        peaks = self._peaks(Run(self.bfloat16, True, checkpoints, self.sharded, routed))
        step = {"gradients": gradients, "optimizer states": steps.peak(offload)}
        moments = [{"gradients": gradients, **parts} for parts in self._passes(peaks)]
        resident = {"weights": weights.bytes(self.mesh) * own, "optimizer states": states}
        calls: dict[Call, Parts] = {"update": largest(step, *moments), "score": self._score(), "send": self._send()}
        return Footprint(resident | self._cuda, self._cuda, calls, sum(self._sent()))

    def scored(self, shares: bool) -> Footprint:
        """The footprint of a frozen model; if it `shares` weights, only what its calls take."""
        resident = {} if shares else {"weights": self.weights.bytes(self.mesh) * self.on_device, **self._cuda}
        receives = {"sync buckets": self.weights.bytes(self.mesh)}  # `follow` reads all weights before it mixes them
        return Footprint(resident, {} if shares else self._cuda, {"score": self._score(), "receive": receives})

    @property
    def _cuda(self) -> dict[str, int]:
        return {"CUDA": CUDA_BYTES} if self.demand.device == "cuda" else {}

    def _micro_batch(self) -> MicroBatch:
        """The largest micro-batch: as many of the longest rows as fit into the budget."""
        packed = self.spec.attention != "eager"
        budget = Budget.of(self.spec.max_tokens, torch.device(self.demand.device), packed)
        rows = max(1, budget.positions * self.mesh.context // self.demand.tokens)
        rows = rows if self.demand.rows is None else max(1, min(rows, self.demand.rows))
        tokens, scored = (-(-n // self.mesh.context) for n in (self.demand.tokens, self.demand.response))
        return MicroBatch(rows, tokens, scored, packed)

    def _peaks(self, run: Run) -> Peaks:
        return peaks_of(self.model, self._micro_batch(), run)

    def _head(self) -> Head | None:
        if self.chunk is None:
            return None
        batch, weights = self._micro_batch(), self.weights
        return Head(
            weights.vocabulary,
            weights.hidden,
            batch.rows * batch.scored,
            self.chunk,
            self.demand.device,
            self.bfloat16,
            weights.head_trained,
            self.demand.distributions,
        )

    def _score(self) -> Parts:
        """The call of `log_probs` or `values`: the forward pass, then the head."""
        peaks, head = self._peaks(Run(self.bfloat16, False, sharded=self.sharded)), self._head()
        body = {"activations": peaks.forward, "gathered weights": self._gathered(blocks=2)}
        if head is None:
            return body
        at_head = {"activations": peaks.saved, "logits": head.forward}
        return largest(body, at_head | {"gathered weights": self._gathered("head", blocks=1)})

    def _passes(self, peaks: Peaks) -> list[dict[str, int]]:
        """The moments of a micro-batch: in the forward pass, at the head, in the backward pass."""
        head = self._head()
        gradient = 0 if head is None or not self.weights.tied else head.gradient  # until that of the embedding is added
        logits = {"activations": peaks.saved, "logits": 0 if head is None else head.backward}
        kept = 0 if self.resharded else self._kept()
        return [
            {"activations": peaks.forward, "gathered weights": self._gathered("embedding", blocks=2) + kept},
            logits | {"gathered weights": self._gathered("head", blocks=1) + kept},
            {
                "activations": peaks.last,
                "logits": gradient,
                "gathered weights": self._gathered(blocks=2, gradients=True) + kept,
            },
            {
                "activations": peaks.rest,
                "logits": gradient,
                "gathered weights": self._gathered("embedding", backward=True),
            },
        ]

    def _kept(self) -> int:
        """Bytes of what stays gathered after the forward pass: the embedding, and all blocks but the two that
        `_gathered` counts."""
        if not self.sharded:
            return 0
        blocks = self.weights.blocks - self._of_blocks(2)
        return self._width * max(0, blocks) + FLOAT * self.weights.of("embedding")

    def _of_blocks(self, blocks: int) -> int:
        """The numbers of some blocks that are gathered together; the next experts follow the rest of their block."""
        whole, _, experts, _ = self.weights.block
        if self.mesh.fsdp == 1 and self.spec.offload not in (True, "parameters"):
            blocks = min(blocks, 1)  # FSDP of one rank copies weights without a buffer to gather them in
        return blocks * whole + min(blocks, 1) * experts

    @property
    def _width(self) -> int:
        """Bytes of a number of a gathered block."""
        return 2 if self.bfloat16 and self.weights.narrow else FLOAT

    def _gathered(
        self, layer: str | None = None, blocks: int = 0, gradients: bool = False, backward: bool = False
    ) -> int:
        """Bytes of gathered weights: the rest and a `layer` in float32, and some blocks in the compute dtype; with
        `gradients` also those of a block, whole and in float32 to be reduced, and in the `backward` pass of a layer
        those of it."""
        if not self.sharded:
            return 0
        _, trained, _, trained_experts = self.weights.block
        found = FLOAT * (self.weights.of("rest") + (0 if layer is None else self.weights.of(layer)))
        found += self._width * self._of_blocks(blocks)
        if gradients:
            found += FLOAT * max(trained, trained_experts)
        if backward:
            found += FLOAT * (self.weights.of("rest", trained=True) + self.weights.of(layer or "rest", trained=True))
        return found

    def _sent(self) -> list[int]:
        """Bytes of each tensor that a sync sends: those of an adapter in float32."""
        if self.demand.adapter:
            return [FLOAT * one.numbers() for one in self.weights.each if one.trained]
        sent, dtype = weights_of(self.model._replace(tensor=1, expert=1)).sent, self.demand.sent_in
        return [one.width(dtype) * math.prod(shape) for one in sent for shape in one.stored]

    def _send(self) -> Parts:
        """A sync's gathering of shards, and a bucket."""
        if not (sizes := self._sent()):
            return {}
        asked = self.demand
        if asked.adapter:  # with its shards and what is gathered of it, which are small
            packed = sum(sizes) if asked.transport == "object store" else BUCKET_BYTES
            return {"sync buckets": packed + 2 * self.sharded * sum(sizes)}
        mesh = self.mesh if self.sharded else None
        found = sending_bytes(self.model, mesh, BUCKET_BYTES, asked.sent_in, asked.transport, asked.device)
        return {"sync buckets": found}
