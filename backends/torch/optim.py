"""Optimisers and learning-rate schedules as records.

An optimiser record builds the torch optimiser over given parameters; a schedule record is a pure function of the number
of optimiser steps taken, so a resumed run needs nothing but that number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Self

import torch
from pydantic import Field, model_validator
from torch import nn

from flowrl.spec import Spec


class AdamW(Spec):
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101, algorithm 2).

    Weight decay falls on every parameter, norms and biases included, as in torch and verl.
    """

    lr: float = Field(ge=0)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.01, ge=0)

    @property
    def state_keys(self) -> tuple[str, ...]:
        """What the optimiser keeps of each parameter after its first step."""
        return ("step", "exp_avg", "exp_avg_sq")

    def build(self, parameters: Sequence[nn.Parameter], sharded: bool = False) -> torch.optim.Optimizer:
        """The torch optimiser over `parameters`, which are `sharded` over ranks or not."""
        return torch.optim.AdamW(
            parameters,
            lr=self.lr,
            betas=self.betas,
            eps=self.eps,
            weight_decay=self.weight_decay,
            foreach=_foreach(sharded),
        )


class SGD(Spec):
    """Stochastic gradient descent with heavy-ball momentum (0: none) and no weight decay."""

    lr: float = Field(ge=0)
    momentum: float = Field(default=0.0, ge=0, lt=1)

    @property
    def state_keys(self) -> tuple[str, ...]:
        """What the optimiser keeps of each parameter after its first step."""
        return ("momentum_buffer",) if self.momentum else ()

    def build(self, parameters: Sequence[nn.Parameter], sharded: bool = False) -> torch.optim.Optimizer:
        """The torch optimiser over `parameters`, which are `sharded` over ranks or not."""
        return torch.optim.SGD(parameters, lr=self.lr, momentum=self.momentum, foreach=_foreach(sharded))


class Constant(Spec):
    """The full learning rate, after a linear warm-up from 0 over `warmup_steps` optimiser steps.

    As in transformers and verl, a warm-up takes its very first step at learning rate 0.
    """

    warmup_steps: int = Field(default=0, ge=0)

    def factor(self, step: int) -> float:
        """What the learning rate is multiplied with when `step` steps have been taken."""
        return _warmup(step, self.warmup_steps)


class _Decay(Spec):
    """Warm-up, then a fall from 1 to `min_ratio` that ends at `total_steps` optimiser steps and stays there."""

    total_steps: int = Field(ge=1)
    warmup_steps: int = Field(default=0, ge=0)
    min_ratio: float = Field(default=0.0, ge=0, le=1)

    @model_validator(mode="after")
    def _warmup_ends(self) -> Self:
        if self.warmup_steps > self.total_steps:
            raise ValueError(f"warmup_steps={self.warmup_steps} exceeds total_steps={self.total_steps}; shorten it")
        return self

    def _share_left(self, step: int) -> float:
        """1 at the end of the warm-up, 0 from `total_steps` on."""
        span = max(1, self.total_steps - self.warmup_steps)
        return 1.0 - min(1.0, max(0, step - self.warmup_steps) / span)


class Linear(_Decay):
    """Linear warm-up over `warmup_steps`, then linear decay to ``min_ratio * lr`` at `total_steps` optimiser steps."""

    def factor(self, step: int) -> float:
        """What the learning rate is multiplied with when `step` steps have been taken."""
        return _warmup(step, self.warmup_steps) * (self.min_ratio + (1 - self.min_ratio) * self._share_left(step))


class Cosine(_Decay):
    """Linear warm-up over `warmup_steps`, then half a cosine to ``min_ratio * lr`` at `total_steps` optimiser steps
    (Loshchilov & Hutter 2017, arXiv:1608.03983, eq. 5, without restarts)."""

    def factor(self, step: int) -> float:
        """What the learning rate is multiplied with when `step` steps have been taken."""
        cosine = 0.5 * (1 + math.cos(math.pi * (1 - self._share_left(step))))
        return _warmup(step, self.warmup_steps) * (self.min_ratio + (1 - self.min_ratio) * cosine)


def _foreach(sharded: bool) -> bool | None:
    """Left to itself, torch steps plain tensors on a GPU in few kernels, but shards one by one."""
    return True if sharded else None


def _warmup(step: int, warmup_steps: int) -> float:
    return min(1.0, step / warmup_steps) if warmup_steps else 1.0


Optimizer = AdamW | SGD
Schedule = Constant | Linear | Cosine
