"""Weights on their way into an engine that would take too few, or those of another model, without a word."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flowrl.backends.torch.lora import Adapter, LoRA
from flowrl.core.protocols import Adapted, Trainer
from flowrl.errors import SyncError
from flowrl.sync.digest import combine, named_weights, tensor_digest


def weight_shapes(folder: str, lora: LoRA | None = None) -> dict[str, torch.Size]:
    """Names and shapes of the weights of a causal LM as a trainer sends them: tied ones once, nothing loaded; with
    `lora` those of its adapter alone."""
    from transformers import AutoConfig, AutoModelForCausalLM  # here, since it takes seconds

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder, local_files_only=True))
    weights = named_weights(model) if lora is None else Adapter(model, lora, folder).weights().items()
    return {name: tensor.shape for name, tensor in weights}


def weights_for(adapter_of: str | None, source: Trainer) -> Iterator[tuple[str, Tensor]]:
    """The weights that `source` has for an engine.

    Args:
        adapter_of: what the engine holds already, if it wants an adapter alone; see `flowrl.core.protocols.Adapted`.
        source: the trainer.

    Raises:
        SyncError: the engine wants an adapter, and `source` has none over the same weights.
    """
    if adapter_of is None:
        return source.weights()
    if not isinstance(source, Adapted) or source.adapter_of != adapter_of:
        found = f"one over {source.adapter_of}" if isinstance(source, Adapted) else "none"
        raise SyncError(
            f"this engine takes an adapter over {adapter_of}, and {type(source).__name__} at version {source.version} "
            f"has {found}; expected the same: bind actor=TorchTrainer(model, lora=...) and a rollout with one folder "
            f"and one LoRA, TorchRollout(model, lora=...) for instance, or the rollout without lora."
        )
    return source.adapter_weights()


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

    def pass_on(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Iterator[tuple[str, Tensor]]:
        """The weights of a version, one at a time.

        Raises:
            SyncError: one is unknown, comes twice or has another shape; or, at the end, some have not come.
        """
        due = dict(self.shapes)
        for name, tensor in weights:
            if due.get(name) != tensor.shape:
                wanted = f"of shape {tuple(due[name])}" if name in due else "not wanted, or twice"
                raise self._damaged(version, f"{name} has shape {tuple(tensor.shape)}, and is {wanted}")
            del due[name]
            self._digests[name] = tensor_digest(name, tensor)
            self.nbytes += tensor.nbytes
            yield name, tensor.detach()
        if due:
            raise self._damaged(version, f"{', '.join(sorted(due)[:5])} did not arrive ({len(due)} in all)")

    @property
    def digest(self) -> str:
        """Of all that passed."""
        return combine(self._digests)

    def _damaged(self, version: int, fault: str) -> SyncError:
        return SyncError(
            f"the weights of version {version} are not those of {self.folder!r}: {fault}; expected all weights "
            f"of one architecture, each once. Call engine.sync(trainer) with a trainer of the same model."
        )
