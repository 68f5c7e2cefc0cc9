"""The step of an optimizer whose states, or parameters, are in CPU memory: some parameters at a time move to the
device, step there, and move back (as the optimizer of ZeRO-Infinity does from NVMe: Rajbhandari et al. 2021,
arXiv:2104.07857, section 5.2.2)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from flowrl.sync.buckets import in_buckets

BUCKET_BYTES = 256 << 20
"""The most bytes of the parameters that step together, counted whole if processes share them, so that all processes
have the same buckets; a larger parameter steps alone."""

Offload = Literal[False, True, "optimizer", "parameters"]
"""What is in CPU memory; see `flowrl.backends.torch.train.learner.TrainedSpec`."""


class Streamed:
    """Steps an optimizer on `device`. The arithmetic is that of a step of all parameters there, to the bit.

    Args:
        parameters: they and their gradients are in CPU memory, and the states are on the device; otherwise the states
            are in CPU memory, and all else is on the device.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device, parameters: bool) -> None:
        self._optimizer, self._device, self._parameters = optimizer, device, parameters
        self._homes: dict[nn.Parameter, dict[str, Tensor]] = {}

    @torch.no_grad()
    def step(self) -> None:
        """One step of all parameters."""
        groups = self._optimizer.param_groups
        whole = [group["params"] for group in groups]
        for group in groups:
            group["params"] = []
        try:
            for group, parameters in zip(groups, whole, strict=True):
                for bucket in buckets(parameters):
                    try:
                        for parameter in bucket:
                            group["params"].append(self._fetch(parameter))
                        self._optimizer.step()
                    finally:  # also if memory was short: no state is lost
                        for parameter, moved in zip(bucket, group["params"], strict=False):
                            self._return(parameter, moved)
                        group["params"] = []
        finally:
            for group, parameters in zip(groups, whole, strict=True):
                group["params"] = parameters

    def at_rest(self, state: dict[str, Any]) -> dict[str, Any]:
        """The states of a parameter where they are between steps."""
        device = self._device if self._parameters else torch.device("cpu")
        return state | {key: value.to(device) for key, value in _moving(state)}

    def _fetch(self, parameter: nn.Parameter) -> nn.Parameter:
        """A parameter to step on the device, with its gradient and its states."""
        state = self._optimizer.state
        if not self._parameters:
            home = self._homes[parameter] = dict(_moving(state[parameter]))
            state[parameter] |= {key: value.to(self._device, copy=True) for key, value in home.items()}
            return parameter
        moved = nn.Parameter(parameter.detach().to(self._device, copy=True))
        assert parameter.grad is not None
        moved.grad = parameter.grad.to(self._device)
        state[moved] = state.pop(parameter, {})
        return moved

    def _return(self, parameter: nn.Parameter, moved: nn.Parameter) -> None:
        """What `_fetch` fetched goes back."""
        state = self._optimizer.state
        if self._parameters:
            parameter.copy_(moved)
            state[parameter] = state.pop(moved)
            return
        home = self._homes.pop(parameter)
        for key, value in _moving(state[parameter]):
            home[key] = home[key].copy_(value) if key in home else value.to("cpu", copy=True)
        state[parameter] |= home


def buckets(parameters: Sequence[Any]) -> Iterator[list[Any]]:
    """Parameters, or anything with ``nbytes``, that step together."""
    for bucket in in_buckets([("", parameter) for parameter in parameters], BUCKET_BYTES):
        yield [parameter for _, parameter in bucket]


def _moving(state: dict[str, Any]) -> list[tuple[str, Tensor]]:
    """The states of a parameter that move; torch counts steps on the CPU."""
    return [(key, value) for key, value in state.items() if isinstance(value, Tensor) and key != "step"]
