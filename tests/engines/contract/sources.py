"""Trainers as sources of a sync, with optional faults."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.multiprocessing
from torch import Tensor

from flowrl.backends.torch.score.engine import TorchTrainerEngine


@contextmanager
def shared_by_name() -> Iterator[None]:
    """Share CPU tensors by file names instead of descriptors, so that unrelated processes can open them."""
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        torch.multiprocessing.set_sharing_strategy(before)


class Batch(NamedTuple):
    """The columns that `log_probs` reads."""

    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    response_mask: Tensor
    temperature: Tensor


class Altered:
    """A trainer with another version, or with a fault in its exported weights.

    Args:
        trainer: the real one.
        version: of the weights.
        fault: ``"missing"``, ``"unknown"``, ``"twice"``, ``"shape"`` or ``"raises"``: in the middle weight.
    """

    def __init__(self, trainer: TorchTrainerEngine, version: int = 1, fault: str | None = None) -> None:
        self._trainer, self.version, self.fault = trainer, version, fault

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)

    def log_probs(self, batch: Any) -> Tensor:
        return self._trainer.log_probs(batch)

    # Explicit members: checks of a Protocol do not use __getattr__.
    @property
    def adapter_of(self) -> str:
        return str(self._trainer.adapter_of)  # type: ignore[attr-defined]

    def adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._trainer.adapter_weights()  # type: ignore[attr-defined]

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        weights = list(self._trainer.weights())
        for i, (name, tensor) in enumerate(weights):
            match self.fault if i == len(weights) // 2 else None:
                case None:
                    yield name, tensor
                case "missing":
                    continue
                case "unknown":
                    yield name + ".lora_A", tensor
                case "twice":
                    yield from [(name, tensor)] * 2
                case "shape":
                    yield name, torch.cat([tensor, tensor])
                case "raises":
                    raise ConnectionError("the link broke")
                case unknown:
                    raise ValueError(f"no fault {unknown!r}")


class SendsOtherWeights(Altered):
    """A trainer that sends weights other than those it scores with.

    Args:
        trainer: whose weights score.
        sent: the weights to send, with their names.
        version: of the weights.
    """

    def __init__(self, trainer: TorchTrainerEngine, sent: Iterable[tuple[str, Tensor]], version: int = 1) -> None:
        super().__init__(trainer, version)
        self._sent = list(sent)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._sent
