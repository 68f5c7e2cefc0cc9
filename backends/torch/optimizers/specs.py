"""The settings of optimizers: `AdamW`, `Muon` and `SGD`."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from flowrl.backends.torch.train.mesh import ProcessMesh
from flowrl.errors import BindError
from flowrl.spec import Spec


class Group(NamedTuple):
    """Parameters that torch's multi-tensor kernels take together.

    Args:
        matrices: those of `parameters` that are matrices of transformer blocks.
    """

    parameters: list[nn.Parameter]
    matrices: list[nn.Parameter]

    @property
    def others(self) -> list[nn.Parameter]:
        """Those that are not `matrices`."""
        matrices = set(self.matrices)
        return [parameter for parameter in self.parameters if parameter not in matrices]


def is_matrix(shape: Sequence[int]) -> bool:
    """Whether a parameter of a block is a matrix, or a stack of them, with several rows and columns."""
    return len(shape) > 1 and min(shape[-2:]) > 1


_Beta = Annotated[float, Field(ge=0, lt=1)]


class AdamW(Spec):
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101, algorithm 2).

    Weight decay applies to every parameter, norms and biases included, as in torch and verl.

    Args:
        bits: of a number of the states. 8 is torchao's ``AdamW8bit`` (Dettmers et al. 2022, arXiv:2110.02861), with a
            float32 scale for each 256 numbers; states whose part on a process has fewer than 4096 numbers, or a number
            that 256 does not divide, stay float32. Needs ``pip install 'flowrl[torchao]'``.
    """

    schedulable: ClassVar[bool] = False

    lr: float = Field(gt=0)
    betas: tuple[_Beta, _Beta] = (0.9, 0.999)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.01, ge=0)
    bits: Literal[8, 32] = 32

    def state_keys(self, matrix: bool) -> tuple[str, ...]:
        """The optimizer's state of a parameter after its first step; `matrix`: it is a matrix of a block."""
        return ("step", "exp_avg", "exp_avg_sq")

    def require_installed(self) -> None:
        """Raise `BindError` if torchao is needed and not installed."""
        if self.bits == 8 and importlib.util.find_spec("torchao") is None:
            raise BindError(
                "AdamW(bits=8) needs the package torchao, which is not installed. Run pip install 'flowrl[torchao]'.",
                code="package.not-installed",
                package="torchao",
                extra="torchao",
            )

    def build(self, groups: Sequence[Group], mesh: ProcessMesh) -> torch.optim.Optimizer:
        """The torch optimizer over the parameters of a model on `mesh`."""
        parameters = _in_groups(groups)
        if self.bits == 8:
            from flowrl.backends.torch.optimizers.eight_bit import EightBit  # here, since it imports torchao

            return EightBit(parameters, self.lr, self.betas, self.eps, self.weight_decay)
        return torch.optim.AdamW(
            parameters,
            lr=self.lr,
            betas=self.betas,
            eps=self.eps,
            weight_decay=self.weight_decay,
            foreach=_foreach(mesh),
        )


class Muon(Spec):
    """Muon for the matrices of transformer blocks, and AdamW for all else: embedding, head, norms and biases.

    Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) makes the singular values of the momentum
    nearly equal. Its step is scaled by ``0.2 sqrt(max(rows, columns))`` (Liu et al. 2025, arXiv:2502.16982, equation
    4), which is the size of a step of AdamW, so one learning rate serves both, and one that fits AdamW fits here.
    Experts that a layer stores together are one matrix each.

    Args:
        momentum: of Muon, in Nesterov's form.
        betas, eps: of AdamW.
        weight_decay: of both.
    """

    schedulable: ClassVar[bool] = False

    lr: float = Field(gt=0)
    momentum: _Beta = 0.95
    betas: tuple[_Beta, _Beta] = (0.9, 0.999)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)

    def state_keys(self, matrix: bool) -> tuple[str, ...]:
        """See `AdamW.state_keys`."""
        return ("momentum_buffer",) if matrix else ("step", "exp_avg", "exp_avg_sq")

    def require_installed(self) -> None:
        """It needs no package."""

    def build(self, groups: Sequence[Group], mesh: ProcessMesh) -> torch.optim.Optimizer:
        """See `AdamW.build`."""
        from flowrl.backends.torch.optimizers.muon import MuonAdamW

        matrices = [{"params": group.matrices, "momentum": self.momentum} for group in groups if group.matrices]
        others = [{"params": group.others, "momentum": None} for group in groups if group.others]
        return MuonAdamW([*matrices, *others], mesh, self.lr, self.betas, self.eps, self.weight_decay, _foreach(mesh))


class SGD(Spec):
    """Stochastic gradient descent with heavy-ball momentum (0: none) and no weight decay."""

    schedulable: ClassVar[bool] = False

    lr: float = Field(gt=0)
    momentum: float = Field(default=0.0, ge=0, lt=1)

    def state_keys(self, matrix: bool) -> tuple[str, ...]:
        """See `AdamW.state_keys`."""
        return ("momentum_buffer",) if self.momentum else ()

    def require_installed(self) -> None:
        """It needs no package."""

    def build(self, groups: Sequence[Group], mesh: ProcessMesh) -> torch.optim.Optimizer:
        """See `AdamW.build`."""
        return torch.optim.SGD(_in_groups(groups), lr=self.lr, momentum=self.momentum, foreach=_foreach(mesh))


Optimizer = AdamW | Muon | SGD


def zeros_of(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, key: str) -> Tensor:
    """The state `key` of a parameter before its first step."""
    if key == "step":  # torch counts steps on the CPU
        return torch.tensor(0.0)
    own = getattr(optimizer, "zeros", None)
    return torch.zeros_like(parameter, requires_grad=False) if own is None else own(parameter, key)


def _in_groups(groups: Sequence[Group]) -> list[nn.Parameter] | list[dict[str, list[nn.Parameter]]]:
    """The parameters as torch takes them."""
    return groups[0].parameters if len(groups) == 1 else [{"params": group.parameters} for group in groups]


def _foreach(mesh: ProcessMesh) -> bool | None:
    """By default, torch steps plain tensors on a GPU in few kernels, but shards one by one."""
    return True if mesh.sharded else None
