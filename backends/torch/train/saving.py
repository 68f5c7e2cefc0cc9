"""Save the weights of a model as a Hugging Face folder: ranks gather them in buckets, and each writes some of the
files, so that no rank has more than its shard and a few buckets in memory."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import NamedTuple

from torch import Tensor
from transformers import PreTrainedModel

from flowrl.backends.torch.load import INDEX, WEIGHTS, quiet
from flowrl.backends.torch.lora import Adapter
from flowrl.backends.torch.passthrough import untied
from flowrl.backends.torch.train.mesh import ProcessMesh
from flowrl.backends.torch.train.shards import gathered_weights
from flowrl.backends.torch.train.tensor_file import TensorFile
from flowrl.errors import DataError
from flowrl.sync.buckets import in_buckets
from flowrl.sync.pieces import in_pieces

_FILE_BYTES = 5 << 30
"""The maximum bytes of a file, which one rank writes (a larger tensor gets its own file)."""


class _File(NamedTuple):
    """A file of the folder.

    Args:
        path: where it is written before all files are complete.
        like: its tensors on the meta device.
        mine: whether this rank writes it.
    """

    path: str
    like: dict[str, Tensor]
    mine: bool


def save_gathered(
    mesh: ProcessMesh, model: PreTrainedModel, folder: str, bucket_bytes: int, adapter: Adapter | None = None
) -> None:
    """`PreTrainedModel.save_pretrained` of `gathered_weights`; a collective. Ranks write to one folder in turn, which
    all must see; its weights are replaced when those of all ranks are complete.

    Raises:
        DataError: the first rank does not see the files of another one.
    """
    files = list(_files(mesh, model, folder))
    weights = gathered_weights(mesh, model, bucket_bytes, adapter)
    with mesh.all_or_none("save_pretrained"):
        os.makedirs(folder, exist_ok=True)
        with ExitStack() as unread:
            unread.callback(lambda: all(True for _ in weights))  # a collective, even if writing fails here
            for file in files:
                _write(file, weights)
    with mesh.all_or_none("save_pretrained"):
        if mesh.position.leads:
            _complete(model, folder, files)


def _files(mesh: ProcessMesh, model: PreTrainedModel, folder: str) -> Iterator[_File]:
    """The files of the folder in the order of their tensors, those of `gathered_weights`."""
    stored = (named for piece in in_pieces(model, untied(model)) for named in piece.stored.items())
    for number, bucket in enumerate(in_buckets(stored, _FILE_BYTES)):
        mine = number % mesh.spec.ranks == mesh.position.rank
        yield _File(os.path.join(folder, f"draft-{number + 1:05d}.safetensors"), dict(bucket), mine)


def _write(file: _File, weights: Iterator[tuple[str, Tensor]]) -> None:
    """Write the next tensors of `weights` to a file, if it is this rank's."""
    with ExitStack() as stack:
        opened = stack.enter_context(TensorFile(file.path, file.like, {"format": "pt"})) if file.mine else None
        for _ in file.like:
            name, tensor = next(weights)
            if opened is not None:
                opened.write(name, tensor)


def _complete(model: PreTrainedModel, folder: str, files: Sequence[_File]) -> None:
    """Give the files their names, and write the index and the configuration."""
    if missing := [os.path.basename(file.path) for file in files if not os.path.isfile(file.path)]:
        raise DataError(
            f"Ranks have written {len(files)} files of the model to {folder!r}, but rank 0 does not see {len(missing)} "
            f"of them ({', '.join(missing[:3])}). Pass a folder on a disk that all machines share.",
            code="trainer.folder-not-shared",
            path=folder,
            missing=missing,
        )
    with quiet():
        model.save_pretrained(folder, state_dict={})  # writes the configuration, and removes the weights of before
    count = len(files)
    names = [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)] if count > 1 else [WEIGHTS]
    for other in (WEIGHTS, INDEX):
        if other not in names and os.path.exists(path := os.path.join(folder, other)):
            os.remove(path)
    for file, name in zip(files, names, strict=True):
        os.replace(file.path, os.path.join(folder, name))
    if count > 1:
        weight_map = {tensor: name for file, name in zip(files, names, strict=True) for tensor in file.like}
        size = sum(tensor.nbytes for file in files for tensor in file.like.values())
        with open(os.path.join(folder, INDEX), "w", encoding="utf-8") as index:
            index.write(json.dumps({"metadata": {"total_size": size}, "weight_map": weight_map}, indent=2) + "\n")
