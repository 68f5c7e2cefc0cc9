"""Weights on their way into an engine that would otherwise accept too few, or those of another model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import cast

import torch
from torch import Tensor

from flowrl.backends.torch.lora import Adapter, LoRA
from flowrl.core.protocols import Adapted, Trainer
from flowrl.errors import SyncError
from flowrl.sync.digest import combine, named_weights, tensor_digest
from flowrl.sync.received import ReceivedWeights, Weight


def weight_shapes(folder: str, lora: LoRA | None = None) -> dict[str, torch.Size]:
    """Names and shapes of the weights of a causal LM as a trainer sends them: tied ones once, nothing loaded; with
    `lora` those of its adapter alone."""
    from transformers import AutoConfig, AutoModelForCausalLM  # here, since it takes seconds

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder, local_files_only=True))
    weights = named_weights(model) if lora is None else Adapter(model, lora, folder).weights().items()
    return {name: tensor.shape for name, tensor in weights}


def refuse_other_base(adapter_of: str | None, source: Trainer) -> None:
    """Refuse a trainer without an adapter over the weights that an engine holds already.

    Args:
        adapter_of: what the engine holds, if it wants an adapter alone; see `flowrl.core.protocols.Adapted`.
        source: the trainer.

    Raises:
        SyncError: it has none, or one over other weights.
    """
    if adapter_of is None or (isinstance(source, Adapted) and source.adapter_of == adapter_of):
        return
    found = f"one over {source.adapter_of}" if isinstance(source, Adapted) else "none"
    raise SyncError(
        f"this engine takes an adapter over {adapter_of}, and {type(source).__name__} at version {source.version} "
        f"has {found}; expected the same: bind actor=TorchTrainer(model, lora=...) and a rollout with one folder "
        f"and one LoRA, TorchRollout(model, lora=...) for instance, or the rollout without lora."
    )


def weights_for(adapter_of: str | None, source: Trainer, checked: bool) -> Iterator[Weight]:
    """The weights that `source` has for an engine, with the digests that they left the trainer with.

    Args:
        adapter_of: see `refuse_other_base`.
        source: a trainer, whose weights are hashed here, or what stands in for one in another process.
        checked: whether weights from another process are hashed here, where they arrive. Otherwise the caller hashes
            each where it ends, and compares the digests.

    Raises:
        SyncError: see `refuse_other_base`.
    """
    refuse_other_base(adapter_of, source)
    if isinstance(source, ReceivedWeights):
        return source.checked() if checked else source.unchecked()
    tensors = source.weights() if adapter_of is None else cast(Adapted, source).adapter_weights()
    return (Weight(name, tensor, tensor_digest(name, tensor)) for name, tensor in tensors)


class Arrival:
    """The weights of one version, held against what must arrive, and counted as they pass.

    Args:
        source: the trainer that they come from.
        adapter_of: see `refuse_other_base`.
        shapes: what must arrive; see `weight_shapes`.
        folder: of the engine's model, for errors.

    Raises:
        SyncError: see `refuse_other_base`.
    """

    def __init__(self, source: Trainer, adapter_of: str | None, shapes: Mapping[str, torch.Size], folder: str) -> None:
        refuse_other_base(adapter_of, source)
        self.version = source.version
        """The version of the weights."""
        self.nbytes = 0
        """The bytes of the tensors that have passed, as they came."""
        self._source, self._adapter_of = source, adapter_of
        self._shapes, self._folder = shapes, folder
        self._digests: dict[str, str] = {}

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights, for an engine that takes them in this process.

        Raises:
            SyncError: one is unknown, comes twice or has another shape, or is not what was sent; or, at the end, some
                have not come.
        """
        return self._pass_on(weights_for(self._adapter_of, self._source, checked=True))

    def to_hand_over(self) -> Iterator[tuple[str, Tensor]]:
        """The weights, for an engine that hands them over to another process, which hashes them.

        Give the digests to `check`. Otherwise as `weights`.
        """
        return self._pass_on(weights_for(self._adapter_of, self._source, checked=False))

    def check(self, digests: Mapping[str, str], process: str) -> None:
        """Hold the digests that a process took of what it received against those that were sent.

        Args:
            digests: the `tensor_digest` of each tensor.
            process: what it is called in the error.

        Raises:
            SyncError: they differ.
        """
        wrong = [name for name in sorted({*self._digests, *digests}) if self._digests.get(name) != digests.get(name)]
        if wrong:
            raise self._damaged(
                f"{', '.join(wrong[:5])} ({len(wrong)} in all) came to {process} otherwise than the trainer sent it"
            )

    @property
    def digest(self) -> str:
        """The digest of all that passed."""
        return combine(self._digests)

    def _pass_on(self, weights: Iterator[Weight]) -> Iterator[tuple[str, Tensor]]:
        due = dict(self._shapes)
        for name, tensor, digest in weights:
            if due.get(name) != tensor.shape:
                if tensor_digest(name, tensor) != digest:
                    raise self._damaged(f"{name} is not what was sent")
                wanted = f"of shape {tuple(due[name])}" if name in due else "not wanted, or twice"
                raise self._misfit(f"{name} has shape {tuple(tensor.shape)}, and is {wanted}")
            del due[name]
            self._digests[name] = digest
            self.nbytes += tensor.nbytes
            yield name, tensor.detach()
        if due:
            raise self._misfit(f"{', '.join(sorted(due)[:5])} did not arrive ({len(due)} in all)")

    def _damaged(self, what: str) -> SyncError:
        return SyncError(f"the weights of version {self.version} are damaged: {what}; sync again.")

    def _misfit(self, fault: str) -> SyncError:
        return SyncError(
            f"the weights of version {self.version} are not those of {self._folder!r}: {fault}; expected all weights "
            f"of one architecture, each once. Call engine.sync(trainer) with a trainer of the same model."
        )
