"""Checks of weights that arrive at an engine, which by itself might accept too few, or those of another model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import cast

import torch
from torch import Tensor

from flowrl.backends.torch.conversions import targets_of
from flowrl.backends.torch.load import skeleton, stored_tensors
from flowrl.backends.torch.lora import Adapter, LoRA
from flowrl.errors import SyncError
from flowrl.protocols.protocols import Adapted, Trainer
from flowrl.sync.digest import Algorithm, algorithm_for, algorithm_of, combine, has_digest, named_weights, tensor_digest
from flowrl.sync.received import ReceivedWeights, Weight
from flowrl.sync.weight_selection import dtype_mismatch, rounded


def expected_weights(folder: str, lora: LoRA | None = None) -> dict[str, Tensor]:
    """The weights of a causal LM as a trainer sends them, on the meta device, tied ones once; with `lora` only those of
    the adapter."""
    with ExitStack() as files:
        model = skeleton(folder)
        targets_of(model, stored_tensors(folder, files))
    return dict(named_weights(model)) if lora is None else Adapter(model, lora, folder).weights()


def refuse_other_base(adapter_of: str | None, source: Trainer) -> None:
    """Raise `SyncError` if a trainer has no adapter over the engine's base weights `adapter_of` (`Adapted`)."""
    if adapter_of is None or (isinstance(source, Adapted) and source.adapter_of == adapter_of):
        return
    found = source.adapter_of if isinstance(source, Adapted) else None
    raise SyncError(
        f"The engine needs an adapter over {adapter_of}, but {type(source).__name__} at version {source.version} has "
        f"{f'one over {found}' if found else 'none'}. Bind actor=TorchTrainer(model, lora=...) and a rollout with the "
        f"same folder and LoRA, such as TorchRollout(model, lora=...), or drop the rollout's lora.",
        code="checkpoint.mismatch",
        found=found,
        expected=adapter_of,
        version=source.version,
    )


def weights_for(
    adapter_of: str | None, source: Trainer, checked: bool, dtype: torch.dtype | None = None
) -> Iterator[Weight]:
    """The weights that `source` sends to an engine, with the digests that they had at the trainer.

    Args:
        checked: whether to hash weights from another process here; otherwise the caller hashes each at its destination
            and compares the digests.
        dtype: that matrices of a trainer in this process are rounded to.
    """
    refuse_other_base(adapter_of, source)
    if isinstance(source, ReceivedWeights):
        return source.checked() if checked else source.unchecked()
    if adapter_of is not None:
        return _hashed(cast(Adapted, source).adapter_weights(), source)
    return _hashed(rounded(source.weights(), dtype), source)


def _hashed(weights: Iterable[tuple[str, Tensor]], source: Trainer) -> Iterator[Weight]:
    sent: set[str] = set()
    for name, tensor in weights:
        if name in sent:
            raise SyncError(
                f"{type(source).__name__} sends {name} twice at version {source.version}; expected each tensor once. "
                f"Let its weights() yield every name once, tied ones too.",
                code="engine.weights-mismatch",
                name=name,
                version=source.version,
            )
        sent.add(name)
        yield Weight(name, tensor, tensor_digest(name, tensor, algorithm_for(tensor)))


class IncomingWeights:
    """The weights of one version: checks them against those expected, and counts their bytes.

    `due` are the weights that must arrive; see `expected_weights`.
    """

    def __init__(
        self, source: Trainer, adapter_of: str | None, due: Mapping[str, Tensor], dtype: torch.dtype, folder: str
    ) -> None:
        refuse_other_base(adapter_of, source)
        self.version = source.version
        """The version of the weights."""
        self.nbytes = 0
        """The bytes of the tensors that arrived, as sent."""
        self._source, self._adapter_of = source, adapter_of
        self._due, self._dtype, self._folder = due, dtype, folder
        self._digests: dict[str, str] = {}

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights, for an engine that loads them in this process.

        Raises `SyncError` if one is unknown, arrives twice, has another shape or a coarser dtype than the engine, or is
        not what was sent, and at the end if some are missing.
        """
        return self._check_each(weights_for(self._adapter_of, self._source, True, self._dtype))

    def to_send(self) -> Iterator[tuple[str, Tensor]]:
        """As `weights`, for an engine that sends them to another process, which hashes them: pass its digests to
        `check`."""
        return self._check_each(weights_for(self._adapter_of, self._source, False, self._dtype))

    def algorithm(self, name: str) -> Algorithm:
        """How the process that receives a tensor must hash it; known once `to_send` returned it."""
        return algorithm_of(self._digests[name])

    def check(self, digests: Mapping[str, str], process: str) -> None:
        """Raise `SyncError` if the digests of the tensors that `process` received are not those of the ones sent."""
        wrong = [name for name in sorted({*self._digests, *digests}) if self._digests.get(name) != digests.get(name)]
        if wrong:
            raise SyncError(
                f"The weights of version {self.version} have the digest {self.digest}, but {process} received "
                f"{combine(digests)}: {', '.join(wrong[:5])} differ ({len(wrong)} in all). Call engine.sync(trainer) "
                f"again.",
                code="sync.damaged",
                process=process,
                version=self.version,
                names=wrong,
            )

    @property
    def digest(self) -> str:
        """The digest of all tensors that arrived."""
        return combine(self._digests)

    def _check_each(self, weights: Iterator[Weight]) -> Iterator[tuple[str, Tensor]]:
        due = dict(self._due)
        for name, tensor, digest in weights:
            place = due.get(name)
            if place is None or place.shape != tensor.shape:
                if not has_digest(name, tensor, digest):
                    raise SyncError(
                        f"The weights of version {self.version} are damaged: {name} is not what was sent. Call "
                        f"engine.sync(trainer) again.",
                        code="sync.damaged",
                        name=name,
                        version=self.version,
                    )
                if place is None:
                    raise self._mismatch(f"{name} is unknown, or arrived twice", [name])
                raise self._mismatch(f"{name} has shape {tuple(tensor.shape)}, not {tuple(place.shape)}", [name])
            if wrong := dtype_mismatch(tensor.dtype, self._dtype if place.is_floating_point() else place.dtype):
                raise self._mismatch(f"{name} {wrong}", [name])
            del due[name]
            self._digests[name] = digest
            self.nbytes += tensor.nbytes
            yield name, tensor.detach()
        if due:
            raise self._mismatch(f"{', '.join(sorted(due)[:5])} did not arrive ({len(due)} in all)", sorted(due))

    def _mismatch(self, fault: str, names: Sequence[str]) -> SyncError:
        return SyncError(
            f"The weights of version {self.version} are not those of {self._folder!r}: {fault}; expected all weights "
            f"of one architecture, each once, in the precision of training. Call engine.sync(trainer) with a trainer "
            f"of the same model.",
            code="engine.weights-mismatch",
            path=self._folder,
            version=self.version,
            names=names,
        )
