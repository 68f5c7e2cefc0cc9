"""The update loop that trainers and critics share: mini-batches, micro-batches, clipping, one optimiser step each."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from flowrl.backends.torch import checkpoint as torch_checkpoint
from flowrl.backends.torch.mesh import Mesh, split_rows
from flowrl.backends.torch.model import Rows, SequenceInputs, micro_batches, take
from flowrl.backends.torch.optim import Optimizer, Schedule
from flowrl.core.protocols import Loss, MiniBatch
from flowrl.data.metrics import Metrics
from flowrl.errors import DataError


class Learner:
    """Trains the parameters of a module, in float32.

    Args:
        module: whose parameters that require gradients are trained.
        optimizer, schedule: the records; the schedule counts optimiser steps.
        grad_clip: the L2 norm that the gradient of a mini-batch is scaled down to; None leaves it.
        max_tokens: padded tokens that a micro-batch may hold.
        prefix: of the metrics, ``"actor"`` or ``"critic"``.
        mesh: where the weights of the module are.
        over: of an adapter, what it is added to (`Adapted.adapter_of`); its state is of use there only.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        schedule: Schedule,
        grad_clip: float | None,
        max_tokens: int,
        prefix: str,
        mesh: Mesh,
        over: str | None = None,
    ) -> None:
        self._names = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._parameters = list(self._names.values())
        self.optimizer, self._slots = optimizer.build(self._parameters), optimizer.slots
        self._lr, self._schedule, self._grad_clip = optimizer.lr, schedule, grad_clip
        self._max_tokens, self._prefix, self._mesh, self._over = max_tokens, prefix, mesh, over
        self._steps = 0
        self.version = 0

    def update(
        self,
        batch: Rows,
        mini_batches: Sequence[MiniBatch],
        loss: Loss[Rows],
        forward: Callable[[Rows], tuple[Tensor, Tensor | None]],
    ) -> Metrics:
        """One optimiser step per mini-batch, in order; then `version` grows by one.

        Weights of a mini-batch already make its loss a sum over rows, so gradients of micro-batches and ranks simply
        add up. A micro-batch whose weights are all 0 is not run.

        Every rank is given all rows and the same mini-batches. It computes on its share of each, of about as many
        tokens as the others have (`split_rows`), and reports the metrics of these rows; what is known to all ranks
        (gradient norm, learning rate) is reported by rank 0 alone, so that the parts of all ranks merge exactly.

        Args:
            forward: output and entropy, as `loss` wants them, of the rows of one micro-batch on the module's device.

        Raises:
            DataError: the gradient of a mini-batch is not finite, on all ranks; that mini-batch has changed no weight.
        """
        metrics, mesh = Metrics(), self._mesh
        columns: Any = batch
        attended, idle = columns.attention_mask.cpu(), cast(Rows, SequenceInputs.idle(mesh.device))
        for index, (rows, weights) in enumerate(mini_batches):
            # Zeros, not None: where all micro-batches of a parameter are skipped, its momentum and decay still act.
            for parameter in self._parameters:
                parameter.grad = torch.zeros_like(parameter)
            shares = split_rows(attended[rows].sum(1), mesh.size)
            work = [self._runs(attended[rows[share]], weights[share]) for share in shares]
            mine, runs = shares[mesh.rank], work[mesh.rank]
            part, part_weights = take(batch, rows[mine]), weights[mine]
            for run in runs:
                micro = take(part, run, mesh.device)
                output, entropy = forward(micro)
                loss(output, entropy, micro, part_weights[run].to(mesh.device), metrics).backward()
            for _ in range(max(map(len, work)) - len(runs)):
                forward(idle)[0].sum().backward()
            norm, lr = self._step(f"mini-batch {index} of {len(mini_batches)} ({len(rows)} rows)")
            if mesh.rank == 0:
                metrics.mean(f"{self._prefix}/grad_norm", norm)
                metrics.mean(f"{self._prefix}/lr", lr)
        self.optimizer.zero_grad(set_to_none=True)
        self.version += 1
        return metrics

    def _runs(self, attention_mask: Tensor, weights: Tensor) -> list[slice]:
        """The micro-batches of these rows that count."""
        return [run for run in micro_batches(attention_mask, self._max_tokens) if weights[run].any()]

    def _step(self, where: str) -> tuple[float, float]:
        """Clip, step; returns the gradient norm before clipping and the learning rate of this step."""
        total = self._mesh.norm([p.grad for p in self._parameters if p.grad is not None])
        norm = float(total)
        if not math.isfinite(norm):
            self.optimizer.zero_grad(set_to_none=True)
            raise DataError(
                f"the {self._prefix}'s gradient norm is {norm} in {where}; expected a finite number, and no weight was "
                f"changed by it. Look for NaN or infinity in the advantages, returns and log-probs under response_mask "
                f"of its rows."
            )
        if self._grad_clip is not None:
            torch.nn.utils.clip_grads_with_norm_(self._parameters, self._grad_clip, total)
        lr = self._lr * self._schedule.factor(self._steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self._steps += 1
        return norm, lr

    def state_dict(self) -> dict[str, Any]:
        """``weights`` (those trained, by name, tied ones once), ``optimizer``, ``steps``, ``version``, ``over``.

        As in torch, the tensors are the live ones: write or copy them before the next update.
        """
        return {
            "weights": {name: parameter.detach() for name, parameter in self._names.items()},
            "optimizer": self.optimizer.state_dict(),
            "steps": self._steps,
            "version": self.version,
            "over": self._over,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`, bit for bit.

        Raises:
            DataError: the state is of a model with other weights.
        """
        shapes = {name: tuple(parameter.shape) for name, parameter in self._names.items()}
        found = {name: tuple(tensor.shape) for name, tensor in state["weights"].items()}
        if shapes != found:
            other = sorted({name for name, _ in shapes.items() ^ found.items()})
            raise DataError(
                f"the state holds weights of another model: {len(other)} differ in name or shape, "
                f"{', '.join(other[:3])} among them; expected those of this {self._prefix}. Bind the model folder that "
                f"the state was trained from."
            )
        if state["over"] != self._over:
            raise DataError(
                f"the state is of an adapter over {state['over']}, and this {self._prefix} trains one over "
                f"{self._over}; expected the same: bind the model folder and the LoRA that the state was trained with."
            )
        for name, parameter in self._names.items():
            if _held(parameter) != _held(state["weights"][name]):
                raise DataError(
                    f"the state holds another part of {name} than this rank of the {self._prefix} does, so it is of "
                    f"another number of ranks; expected the same: go from one to another by save_checkpoint(folder) "
                    f"and load_checkpoint(folder)."
                )
        with torch.no_grad():
            for name, parameter in self._names.items():
                parameter.copy_(state["weights"][name])
        # A copy, since torch would go on with the caller's tensors.
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        self._steps, self.version = int(state["steps"]), int(state["version"])

    def save_checkpoint(self, folder: str) -> None:
        """Write what `state_dict` holds, for any number of ranks to go on from; see `torch_checkpoint.save`."""
        extra = self._progress(torch.tensor([self._steps, self.version]))
        torch_checkpoint.save(folder, self._mesh, self._names, self.optimizer, extra)

    def load_checkpoint(self, folder: str) -> None:
        """Go on from a checkpoint; see `torch_checkpoint.load`."""
        progress = torch.zeros(2, dtype=torch.int64)
        extra = self._progress(progress)
        torch_checkpoint.load(folder, self._mesh, self._names, self.optimizer, self._slots, extra)
        self._steps, self.version = progress.tolist()

    def _progress(self, progress: Tensor) -> dict[str, Tensor]:
        """Under a name that says what an adapter is over, so that it is not read over anything else."""
        return {"progress" if self._over is None else f"progress over {self._over}": progress}


def _held(tensor: Tensor) -> tuple[int, ...] | None:
    """The shape of this rank's part of a sharded tensor; None of a whole one."""
    return tuple(tensor.to_local().shape) if isinstance(tensor, DTensor) else None
