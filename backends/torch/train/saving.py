"""Save the weights of a model as a Hugging Face folder: ranks gather them in buckets, and each writes some of the
files, so that no rank has more than its shard and a few buckets in memory."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from torch import Tensor
from transformers import PreTrainedModel

from flowrl.backends.torch.load import INDEX, WEIGHTS, quiet
from flowrl.backends.torch.passthrough import untied
from flowrl.backends.torch.train.mesh import ProcessMesh
from flowrl.backends.torch.train.tensor_file import TensorFile
from flowrl.sync.buckets import in_buckets
from flowrl.sync.pieces import in_pieces

_FILE_BYTES = 5 << 30
"""The maximum bytes of a file, which one rank writes (a larger tensor gets its own file)."""

_DRAFTS = ".draft-"
"""How the folder of the files that are being written begins."""


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
    mesh: ProcessMesh, model: PreTrainedModel, folder: str, weights: Iterator[tuple[str, Tensor]]
) -> None:
    """`PreTrainedModel.save_pretrained` of `weights`, which are in the order of `flowrl.sync.digest.named_weights` and
    gathered as they are read; a collective. The weights of `folder` are replaced when all files are complete. Ranks on
    machines that do not share the folder of the first rank write none."""
    token = mesh.max_over_ranks(secrets.randbits(48) if mesh.position.leads else 0)
    drafts = os.path.join(folder, f"{_DRAFTS}{token}")
    with mesh.all_or_none("save_pretrained"):
        if mesh.position.leads:
            for abandoned in Path(folder).glob(f"{_DRAFTS}*"):  # by a process that was killed
                shutil.rmtree(abandoned)
            os.makedirs(drafts)
    files = list(_files(mesh, model, drafts))
    with mesh.all_or_none("save_pretrained"), ExitStack() as unread:
        unread.callback(lambda: all(True for _ in weights))  # a collective, even if writing fails here
        for file in files:
            _write(file, weights)
    with mesh.all_or_none("save_pretrained"):
        if mesh.position.leads:
            _complete(model, folder, files)
            os.rmdir(drafts)


def _files(mesh: ProcessMesh, model: PreTrainedModel, drafts: str) -> Iterator[_File]:
    """The files of the folder in the order of their tensors, as `save_gathered` has them; ranks that see the folder of
    `drafts` write them in turn."""
    own, sees = mesh.position.rank, os.path.isdir(drafts)
    writers = [rank for rank in range(mesh.spec.ranks) if mesh.max_over_ranks(int(sees and rank == own))]
    stored = (named for piece in in_pieces(model, untied(model)) for named in piece.stored.items())
    for number, bucket in enumerate(in_buckets(stored, _FILE_BYTES)):
        path = os.path.join(drafts, f"{number + 1:05d}.safetensors")
        yield _File(path, dict(bucket), writers[number % len(writers)] == own)


def _write(file: _File, weights: Iterator[tuple[str, Tensor]]) -> None:
    """Write the next tensors of `weights` to a file, if it is this rank's."""
    with ExitStack() as stack:
        opened = stack.enter_context(TensorFile(file.path, file.like, {"format": "pt"})) if file.mine else None
        for _ in file.like:
            name, tensor = next(weights)
            if opened is not None:
                opened.write(name, tensor)


def _complete(model: PreTrainedModel, folder: str, files: Sequence[_File]) -> None:
    """Put the files in place of those of before, and write the index and the configuration."""
    with quiet():
        model.save_pretrained(folder, state_dict={})  # writes the configuration, and removes the parts of before
    count = len(files)
    names = [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)] if count > 1 else [WEIGHTS]
    for other in {WEIGHTS, INDEX} - {*names}:
        Path(folder, other).unlink(missing_ok=True)
    for file, name in zip(files, names, strict=True):
        os.replace(file.path, os.path.join(folder, name))
    if count > 1:
        weight_map = {tensor: name for file, name in zip(files, names, strict=True) for tensor in file.like}
        size = sum(tensor.nbytes for file in files for tensor in file.like.values())
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        Path(folder, INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
