"""Checkpoints of weights and optimiser state that any number of ranks can write and any other can read.

Tensors lie in a folder in the layout of `torch.distributed.checkpoint`, each rank writing the shards that it holds,
under flat names: ``weights.<name>``, ``optimizer.<key>.<name>``, and those of `extra`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as read_shards
from torch.distributed.checkpoint.state_dict_saver import save as write_shards

from flowrl.backends.torch.mesh import Mesh
from flowrl.errors import DataError


def save(
    folder: str,
    mesh: Mesh,
    weights: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    extra: Mapping[str, Tensor],
) -> None:
    """Write a checkpoint; a collective.

    Args:
        folder: a new folder, or one that holds no checkpoint.
        mesh: where the weights are.
        weights: what is trained, by name.
        optimizer: whose state is written.
        extra: whatever else there is to know.

    Raises:
        DataError: the folder holds a checkpoint, or cannot be written.
    """
    with mesh.all_or_none("save_checkpoint"):
        if os.path.exists(os.path.join(folder, ".metadata")):
            raise DataError(f"{folder!r} holds a checkpoint already; expected a new folder: name another one.")
        os.makedirs(folder, exist_ok=True)
    tensors: dict[str, Tensor] = dict(extra)
    for name, parameter in weights.items():
        tensors[f"weights.{name}"] = parameter.detach()
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{key}.{name}"] = value
    with _failures(folder, "written"):
        write_shards(tensors, checkpoint_id=folder, **_across(mesh))


def load(
    folder: str,
    mesh: Mesh,
    weights: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    state_keys: Sequence[str],
    extra: Mapping[str, Tensor],
) -> None:
    """Read a checkpoint into `weights`, the state of `optimizer` and `extra`, in place; a collective.

    Args:
        folder, mesh, weights, optimizer, extra: as in `save`.
        state_keys: what the optimiser keeps of each parameter, once it has taken a step.

    Raises:
        DataError: the folder holds no checkpoint, or one of another model or optimiser (nothing is changed then); or it
            is damaged, and the engine must read another one or be built anew.
    """
    tensors: dict[str, Tensor] = dict(extra)
    tensors |= {f"weights.{name}": parameter.detach() for name, parameter in weights.items()}
    state: dict[Tensor, dict[str, Tensor]] = {}
    with mesh.all_or_none("load_checkpoint"):
        stored = _stored_shapes(folder)
        if any(name.startswith("optimizer.") for name in stored):
            for name, parameter in weights.items():
                state[parameter] = {key: _blank(key, parameter) for key in state_keys}
                tensors |= {f"optimizer.{key}.{name}": value for key, value in state[parameter].items()}
        wanted = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if wanted != stored:
            other = sorted({name for name, _ in wanted.items() ^ stored.items()})
            raise DataError(
                f"{folder!r} holds a checkpoint of another model or optimiser: {len(other)} tensors differ in name or "
                f"shape, {', '.join(other[:3])} among them; expected what this engine trains. Bind the model folder "
                f"and the optimiser that the checkpoint was made with."
            )
    with _failures(folder, "read"):
        read_shards(tensors, checkpoint_id=folder, **_across(mesh))
    optimizer.state.clear()
    optimizer.state.update(state)


def _blank(key: str, parameter: nn.Parameter) -> Tensor:
    return torch.tensor(0.0) if key == "step" else torch.zeros_like(parameter, requires_grad=False)


def _stored_shapes(folder: str) -> dict[str, tuple[int, ...]]:
    if not os.path.isfile(os.path.join(folder, ".metadata")):
        raise DataError(f"{folder!r} holds no checkpoint; expected a folder that save_checkpoint has written.")
    with _failures(folder, "read"):
        entries = FileSystemReader(folder).read_metadata().state_dict_metadata
    return {name: tuple(getattr(entry, "size", ())) for name, entry in entries.items()}


@contextmanager
def _failures(folder: str, done: str) -> Iterator[None]:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # a single process is meant
            yield
    except (CheckpointException, Exception) as error:  # the former is no Exception
        raise DataError(
            f"the checkpoint {folder!r} could not be {done} ({type(error).__name__}: {error}); look for a full disk or "
            f"a damaged file, and take another folder."
        ) from error


def _across(mesh: Mesh) -> dict[str, Any]:
    return {"process_group": mesh.group} if mesh.sharded else {"no_dist": True}
