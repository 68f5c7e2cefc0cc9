"""Weights on their way into an engine that would take too few, or those of another model, without a word."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flowrl.digest import combine, named_weights, tensor_digest
from flowrl.engines import Trainer
from flowrl.errors import SyncError


def weight_shapes(folder: str) -> dict[str, torch.Size]:
    """Names and shapes of the weights of a causal LM as a trainer sends them: tied ones once, nothing loaded."""
    from transformers import AutoConfig, AutoModelForCausalLM  # here, since it takes seconds

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder, local_files_only=True))
    return {name: tensor.shape for name, tensor in named_weights(model)}


@dataclass
class Arrival:
    """The weights of one version, checked and counted as they pass.

    Args:
        shapes: what must arrive; see `weight_shapes`.
        folder: of the engine's model, for errors.
        nbytes: of the tensors so far, as they came.
    """

    shapes: Mapping[str, torch.Size]
    folder: str
    nbytes: int = 0
    _digests: dict[str, str] = field(default_factory=dict)

    def pass_on(self, source: Trainer) -> Iterator[tuple[str, Tensor]]:
        """The weights of `source`, one at a time.

        Raises:
            SyncError: one is unknown, comes twice or has another shape; or, at the end, some have not come.
        """
        due = dict(self.shapes)
        for name, tensor in source.weights():
            if due.get(name) != tensor.shape:
                wanted = f"of shape {tuple(due[name])}" if name in due else "not wanted, or twice"
                raise self._damaged(source, f"{name} has shape {tuple(tensor.shape)}, and is {wanted}")
            del due[name]
            self._digests[name] = tensor_digest(name, tensor)
            self.nbytes += tensor.nbytes
            yield name, tensor.detach()
        if due:
            raise self._damaged(source, f"{', '.join(sorted(due)[:5])} did not arrive ({len(due)} in all)")

    @property
    def digest(self) -> str:
        """Of all that passed."""
        return combine(self._digests)

    def _damaged(self, source: Trainer, fault: str) -> SyncError:
        return SyncError(
            f"the weights of version {source.version} are not those of {self.folder!r}: {fault}; expected all weights "
            f"of one architecture, each once. Call engine.sync(trainer) with a trainer of the same model."
        )
