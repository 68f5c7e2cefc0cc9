"""Weights on their way into an engine that would otherwise accept too few, or those of another model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import cast

import torch
from torch import Tensor

from flowrl.backends.torch.lora import Adapter, LoRA
from flowrl.errors import SyncError
from flowrl.protocols.protocols import Adapted, Trainer
from flowrl.sync.digest import combine, named_weights, tensor_digest
from flowrl.sync.received import ReceivedWeights, Weight
from flowrl.sync.wanted import misfit, rounded


def due_weights(folder: str, lora: LoRA | None = None) -> dict[str, Tensor]:
    """The weights of a causal LM as a trainer sends them, on the meta device: tied ones once, nothing loaded; with
    `lora` those of its adapter alone."""
    from transformers import AutoConfig, AutoModelForCausalLM  # here, since it takes seconds

    with torch.device("meta"):
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return dict(named_weights(model)) if lora is None else Adapter(model, lora, folder).weights()


def refuse_other_base(adapter_of: str | None, source: Trainer) -> None:
    """Refuse a trainer without an adapter over the weights that an engine holds already.

    Args:
        adapter_of: what the engine holds, if it wants an adapter alone; see `flowrl.protocols.protocols.Adapted`.
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


def weights_for(
    adapter_of: str | None, source: Trainer, checked: bool, dtype: torch.dtype | None = None
) -> Iterator[Weight]:
    """The weights that `source` has for an engine, with the digests that they left the trainer with.

    Args:
        adapter_of: see `refuse_other_base`.
        source: a trainer, whose weights are hashed here, or what stands in for one in another process.
        checked: whether weights from another process are hashed here, where they arrive. Otherwise the caller hashes
            each where it ends, and compares the digests.
        dtype: that matrices of a trainer in this process are rounded to before; see `flowrl.sync.wanted.rounded`.

    Raises:
        SyncError: see `refuse_other_base`; or a tensor comes twice.
    """
    refuse_other_base(adapter_of, source)
    if isinstance(source, ReceivedWeights):
        return source.checked() if checked else source.unchecked()
    if adapter_of is not None:
        return _leaving(cast(Adapted, source).adapter_weights(), source)
    return _leaving(rounded(source.weights(), dtype), source)


def _leaving(weights: Iterable[tuple[str, Tensor]], source: Trainer) -> Iterator[Weight]:
    gone: set[str] = set()
    for name, tensor in weights:
        if name in gone:
            raise SyncError(
                f"{type(source).__name__} sends {name} twice at version {source.version}, and nobody knows which of "
                f"them counts; expected each tensor once: let its weights() give every name once, tied ones too."
            )
        gone.add(name)
        yield Weight(name, tensor, tensor_digest(name, tensor))


class IncomingWeights:
    """The weights of one version, held against what must arrive, and counted as they pass.

    Args:
        source: the trainer that they come from.
        adapter_of: see `refuse_other_base`.
        due: what must arrive; see `due_weights`.
        dtype: that the engine computes in.
        folder: of the engine's model, for errors.

    Raises:
        SyncError: see `refuse_other_base`.
    """

    def __init__(
        self, source: Trainer, adapter_of: str | None, due: Mapping[str, Tensor], dtype: torch.dtype, folder: str
    ) -> None:
        refuse_other_base(adapter_of, source)
        self.version = source.version
        """The version of the weights."""
        self.nbytes = 0
        """The bytes of the tensors that have passed, as they came."""
        self._source, self._adapter_of = source, adapter_of
        self._due, self._dtype, self._folder = due, dtype, folder
        self._digests: dict[str, str] = {}

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights, for an engine that takes them in this process.

        Raises:
            SyncError: one is unknown, comes twice or has another shape, is coarser than the engine or no float, or is
                not what was sent; or, at the end, some have not come.
        """
        return self._pass_on(weights_for(self._adapter_of, self._source, True, self._dtype))

    def to_hand_over(self) -> Iterator[tuple[str, Tensor]]:
        """The weights, for an engine that hands them over to another process, which hashes them.

        Give the digests to `check`. Otherwise as `weights`.
        """
        return self._pass_on(weights_for(self._adapter_of, self._source, False, self._dtype))

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
            raise SyncError(
                f"the weights of version {self.version} have the digest {self.digest}, and {process} received "
                f"{combine(digests)}, with other tensors: {', '.join(wrong[:5])} ({len(wrong)} in all); expected the "
                f"same on both sides: call engine.sync(trainer) again."
            )

    @property
    def digest(self) -> str:
        """The digest of all that passed."""
        return combine(self._digests)

    def _pass_on(self, weights: Iterator[Weight]) -> Iterator[tuple[str, Tensor]]:
        due = dict(self._due)
        for name, tensor, digest in weights:
            place = due.get(name)
            if place is None or place.shape != tensor.shape:
                if tensor_digest(name, tensor) != digest:
                    raise SyncError(
                        f"the weights of version {self.version} are damaged: {name} is not what was sent; sync again."
                    )
                wanted = "not wanted, or twice" if place is None else f"of shape {tuple(place.shape)}"
                raise self._misfit(f"{name} has shape {tuple(tensor.shape)}, and is {wanted}")
            if wrong := misfit(tensor.dtype, self._dtype if place.is_floating_point() else place.dtype):
                raise self._misfit(f"{name} {wrong}")
            del due[name]
            self._digests[name] = digest
            self.nbytes += tensor.nbytes
            yield name, tensor.detach()
        if due:
            raise self._misfit(f"{', '.join(sorted(due)[:5])} did not arrive ({len(due)} in all)")

    def _misfit(self, fault: str) -> SyncError:
        return SyncError(
            f"the weights of version {self.version} are not those of {self._folder!r}: {fault}; expected all weights "
            f"of one architecture, each once, in the precision that they are trained in. Call engine.sync(trainer) "
            f"with a trainer of the same model."
        )
