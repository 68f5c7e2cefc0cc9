"""The forward and backward passes of a mini-batch in micro-batches, which add up its gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from flowrl.backends.torch.score.rows import Rows, Run, SequenceInputs, take
from flowrl.backends.torch.train.balancing import LoadBalancing
from flowrl.backends.torch.train.mesh import ProcessMesh
from flowrl.data.metrics import Metrics
from flowrl.protocols.protocols import Objective, ReplicatedMiniBatch

Forward = Callable[[Any], tuple[Tensor, Tensor | None]]
"""Output and entropy of the rows of a micro-batch."""

See = Callable[[int, Tensor, Tensor | None], None]
"""Called with the number of a micro-batch, its output and its entropy."""

Loss = Callable[[int, Tensor, Tensor | None], Tensor]
"""The scalar loss of a micro-batch, of the same."""


class Passes:
    """Computes micro-batches one by one; None in place of one is a rank without rows, while others compute.

    Args:
        balancing: a further loss, of the experts of a mini-batch's tokens.
    """

    def __init__(self, mesh: ProcessMesh, balancing: LoadBalancing | None = None) -> None:
        self._mesh, self._balancing = mesh, balancing

    def one(
        self,
        part: Rows,
        seen: Rows,
        turns: Sequence[Run | None],
        weights: Tensor,
        objective: Objective[Rows],
        forward: Forward,
        metrics: Metrics,
    ) -> None:
        """The gradient of an objective that is a sum over micro-batches, and gets the rows of `seen`."""
        device, columns = self._mesh.device, cast(Any, part).attention_mask.shape[1]

        def loss(number: int, output: Tensor, entropy: Tensor | None) -> Tensor:
            run = turns[number]
            assert run is not None
            inputs = take(seen, run.rows, device)
            return self._balanced(objective(output, entropy, inputs, run.of(weights, columns).to(device), metrics))

        self.descend((None if run is None else run.take(part, device) for run in turns), forward, loss)

    def two(
        self,
        part: Rows,
        turns: Sequence[Tensor | None],
        whole: ReplicatedMiniBatch,
        objective: Objective[Rows],
        forward: Forward,
        metrics: Metrics,
    ) -> None:
        """The gradient of an objective over its whole mini-batch, with the model in micro-batches."""
        mesh = self._mesh
        own = [None if run is None else whole.own.to(mesh.device)[run] for run in turns]
        inputs = [None if run is None else take(part, run, mesh.device) for run in turns]
        outputs = torch.zeros(2, *whole.weights.shape, device=mesh.device)  # log-probs and entropies, or values

        def see(number: int, output: Tensor, entropy: Tensor | None) -> None:
            outputs[:, own[number]] = torch.stack([output, torch.zeros_like(output) if entropy is None else entropy])

        with torch.no_grad():
            with_entropy = self.evaluate(inputs, forward, see)
        outputs = mesh.total(outputs).requires_grad_()
        everything, weights = take(whole.batch, slice(None), mesh.device), whole.weights.to(mesh.device)
        reported = metrics if mesh.position.reports_shared else Metrics()  # all ranks compute the same
        objective(outputs[0], outputs[1] if with_entropy else None, everything, weights, reported).backward()
        slopes = outputs.grad
        assert slopes is not None

        def loss(number: int, output: Tensor, entropy: Tensor | None) -> Tensor:
            slope = slopes[:, own[number]]
            found = (output * slope[0]).sum()
            if entropy is not None and entropy.requires_grad:
                found = found + (entropy * slope[1]).sum()
            return self._balanced(found)

        self.descend(inputs, forward, loss)

    def evaluate(self, micro_batches: Iterable[Any], forward: Forward, see: See) -> bool:
        """Compute micro-batches without gradients; returns whether they have entropy."""
        entropy = None
        for number, micro in enumerate(micro_batches):
            output, entropy = forward(self._idle if micro is None else micro)
            if micro is not None:
                see(number, output, entropy)
        return entropy is not None

    def descend(self, micro_batches: Iterable[Any], forward: Forward, loss: Loss) -> None:
        """Add up the gradients of the losses of micro-batches."""
        for number, micro in enumerate(micro_batches):
            output, entropy = forward(self._idle if micro is None else micro)
            (output.sum() if micro is None else loss(number, output, entropy)).backward()

    def _balanced(self, loss: Tensor) -> Tensor:
        return loss if self._balancing is None else loss + self._balancing.loss()

    @property
    def _idle(self) -> Any:
        return SequenceInputs.idle(self._mesh.device)
