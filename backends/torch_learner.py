"""The update loop that trainers and critics share: mini-batches, micro-batches, clipping, one optimiser step each."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.backends.optim import Optimizer, Schedule
from flowrl.backends.torch_model import Rows, micro_batches, take
from flowrl.engines import Loss, MiniBatch
from flowrl.errors import DataError
from flowrl.metrics import Metrics


class Learner:
    """Trains the parameters of a module, in float32.

    Args:
        module: whose parameters that require gradients are trained.
        optimizer, schedule: the records; the schedule counts optimiser steps.
        grad_clip: the L2 norm that the gradient of a mini-batch is scaled down to; None leaves it.
        max_tokens: padded tokens that a micro-batch may hold.
        prefix: of the metrics, ``"actor"`` or ``"critic"``.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        schedule: Schedule,
        grad_clip: float | None,
        max_tokens: int,
        prefix: str,
    ) -> None:
        self._names = dict(module.named_parameters())
        self._parameters = [p for p in self._names.values() if p.requires_grad]
        self._optimizer = optimizer.build(self._parameters)
        self._lr, self._schedule, self._grad_clip = optimizer.lr, schedule, grad_clip
        self._max_tokens, self._prefix = max_tokens, prefix
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

        Weights of a mini-batch already make its loss a sum over rows, so gradients of micro-batches simply add up. A
        micro-batch whose weights are all 0 is not run.

        Args:
            forward: output and entropy, as `loss` wants them, of the rows of one micro-batch on the module's device.

        Raises:
            DataError: the gradient of a mini-batch is not finite; that mini-batch has changed no weight.
        """
        metrics, device = Metrics(), self._parameters[0].device
        for index, (rows, weights) in enumerate(mini_batches):
            # Zeros, not None: where all micro-batches of a parameter are skipped, its momentum and decay still act.
            for parameter in self._parameters:
                parameter.grad = torch.zeros_like(parameter)
            part: Any = take(batch, rows)
            for run in micro_batches(part.attention_mask, self._max_tokens):
                if weights[run].any():
                    micro = take(part, run, device)
                    output, entropy = forward(micro)
                    loss(output, entropy, micro, weights[run].to(device), metrics).backward()
            norm, lr = self._step(f"mini-batch {index} of {len(mini_batches)} ({len(rows)} rows)")
            metrics.mean(f"{self._prefix}/grad_norm", norm)
            metrics.mean(f"{self._prefix}/lr", lr)
        self._optimizer.zero_grad(set_to_none=True)
        self.version += 1
        return metrics

    def _step(self, where: str) -> tuple[float, float]:
        """Clip, step; returns the gradient norm before clipping and the learning rate of this step."""
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        total = torch.nn.utils.get_total_norm(gradients)
        norm = float(total)
        if not math.isfinite(norm):
            self._optimizer.zero_grad(set_to_none=True)
            raise DataError(
                f"the {self._prefix}'s gradient norm is {norm} in {where}; expected a finite number, and no weight was "
                f"changed by it. Look for NaN or infinity in the advantages, returns and log-probs under response_mask "
                f"of its rows."
            )
        if self._grad_clip is not None:
            torch.nn.utils.clip_grads_with_norm_(self._parameters, self._grad_clip, total)
        lr = self._lr * self._schedule.factor(self._steps)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._steps += 1
        return norm, lr

    def state_dict(self) -> dict[str, Any]:
        """``weights`` (by name, tied ones once), ``optimizer``, ``steps``, ``version``.

        As in torch, the tensors are the live ones: write or copy them before the next update.
        """
        return {
            "weights": {name: parameter.detach() for name, parameter in self._names.items()},
            "optimizer": self._optimizer.state_dict(),
            "steps": self._steps,
            "version": self.version,
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
        with torch.no_grad():
            for name, parameter in self._names.items():
                parameter.copy_(state["weights"][name])
        # A copy, since torch would go on with the caller's tensors.
        self._optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        self._steps, self.version = int(state["steps"]), int(state["version"])
