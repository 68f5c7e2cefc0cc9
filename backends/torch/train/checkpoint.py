"""Checkpoints of weights and optimizer state: written by any number of ranks, and read by any other number.

Each rank writes one safetensors file, ``part-00001-of-00002.safetensors`` and so on, with flat names:
``weights.<name>``, ``optimizer.<key>.<name>``, and those of `extra`. For a sharded tensor it contains the rank's rows,
so the parts in order are the full tensor; an unsharded tensor is in the first. Nothing is pickled, so a foreign
checkpoint cannot run code.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from flowrl.backends.torch.train.mesh import ProcessMesh
from flowrl.errors import DataError

if TYPE_CHECKING:  # it takes half a second to import
    from flowrl.backends.torch.train.sharded import Sharded

_PART = re.compile(r"part-\d{5}-of-(\d{5})\.safetensors")
_DTYPES = {torch.float32: "F32", torch.int64: "I64"}


def save(
    folder: str,
    mesh: ProcessMesh,
    weights: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    extra: Mapping[str, Tensor],
) -> None:
    """Write a checkpoint to a folder without one; a collective. `extra` are further tensors."""
    with mesh.all_or_none("save_checkpoint"):
        if os.path.isdir(folder) and any(map(_PART.fullmatch, os.listdir(folder))):
            raise DataError(
                f"The folder {folder!r} already contains a checkpoint. Pass a new folder.",
                code="checkpoint.exists",
                path=folder,
            )
        os.makedirs(folder, exist_ok=True)
    tensors: dict[str, Tensor] = dict(extra)
    for name, parameter in weights.items():
        tensors[f"weights.{name}"] = parameter.detach()
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{key}.{name}"] = value
    own = {
        name: _local(tensor) for name, tensor in tensors.items() if mesh.position.leads or isinstance(tensor, DTensor)
    }
    part = os.path.join(folder, f"part-{mesh.position.rank + 1:05d}-of-{mesh.spec.ranks:05d}.safetensors")
    with mesh.all_or_none("save_checkpoint"), _failures(folder, "written"):
        _write(part, own)


def load(
    folder: str,
    mesh: ProcessMesh,
    weights: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    state_keys: Sequence[str],
    extra: Mapping[str, Tensor],
) -> None:
    """Read a checkpoint into `weights`, the state of `optimizer` and `extra`, in place; a collective.

    `state_keys` name the optimizer's state of each parameter after a step.

    Raises `DataError` and changes nothing if there is none, or a damaged one, or one of another model or optimizer.
    """
    tensors: dict[str, Tensor] = dict(extra)
    tensors |= {f"weights.{name}": parameter.detach() for name, parameter in weights.items()}
    state: dict[Tensor, dict[str, Tensor]] = {}
    with ExitStack() as files:
        with mesh.all_or_none("load_checkpoint"):
            stored = _pieces(folder, files)
            if any(name.startswith("optimizer.") for name in stored):
                for name, parameter in weights.items():
                    state[parameter] = {key: _blank(key, parameter) for key in state_keys}
                    tensors |= {f"optimizer.{key}.{name}": value for key, value in state[parameter].items()}
            expected = {name: (_DTYPES[tensor.dtype], *tensor.shape) for name, tensor in tensors.items()}
            found = {name: _described(pieces) for name, pieces in stored.items()}
            if expected != found:
                other = sorted({name for name, _ in expected.items() ^ found.items()})
                raise DataError(
                    f"The checkpoint {folder!r} is of another model or optimizer: {len(other)} tensors differ in name, "
                    f"dtype or shape, such as {', '.join(other[:3])}. Bind the model folder, the adapter and the "
                    f"optimizer that the checkpoint was written with.",
                    code="checkpoint.mismatch",
                    path=folder,
                    differ=other,
                )
        with mesh.all_or_none("load_checkpoint"), _failures(folder, "read"), torch.no_grad():
            for name, tensor in tensors.items():
                _read(stored[name], tensor, mesh)
    optimizer.state.clear()
    optimizer.state.update(state)


def _blank(key: str, parameter: nn.Parameter) -> Tensor:
    return torch.tensor(0.0) if key == "step" else torch.zeros_like(parameter, requires_grad=False)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _write(path: str, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file one tensor at a time: `safetensors.torch.save_file` needs all of them in CPU memory at
    once, three times the weights if they are on a GPU."""
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())  # each at a multiple of its element
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in ordered:
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in ordered:
            file.write(tensor.detach().cpu().contiguous().view(-1).numpy().data)


def _pieces(folder: str, files: ExitStack) -> dict[str, list[Any]]:
    """Lazy slices of each tensor of a checkpoint in the order of their rows, valid as long as `files` is open."""
    parts = sorted(filter(_PART.fullmatch, os.listdir(folder))) if os.path.isdir(folder) else []
    if not parts:
        raise DataError(
            f"The folder {folder!r} contains no checkpoint. Pass a folder that save_checkpoint has written.",
            code="checkpoint.missing",
            path=folder,
        )
    count = int(_PART.sub(r"\1", parts[0]))
    if parts != [f"part-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]:
        raise DataError(
            f"The folder {folder!r} contains {', '.join(parts[:3])}{', …' if len(parts) > 3 else ''}; expected all "
            f"{count} parts of one checkpoint. Restore the missing files, or use another checkpoint.",
            code="checkpoint.damaged",
            path=folder,
            found=parts,
            expected=count,
        )
    pieces: dict[str, list[Any]] = {}
    with _failures(folder, "read"):
        for part in parts:
            file = files.enter_context(safe_open(os.path.join(folder, part), framework="pt"))
            for name in file.keys():  # noqa: SIM118
                pieces.setdefault(name, []).append(file.get_slice(name))
    return pieces


def _described(pieces: Sequence[Any]) -> tuple[Any, ...]:
    """Dtype and shape of the tensor with these slices."""
    shapes = [piece.get_shape() for piece in pieces]
    kinds = {(piece.get_dtype(), len(shape), *shape[1:]) for piece, shape in zip(pieces, shapes, strict=True)}
    if len(kinds) > 1:
        return ("mixed",)
    dtype, axes, *rest = kinds.pop()
    return (dtype, *([sum(shape[0] for shape in shapes)] if axes else []), *rest)


def _read(pieces: Sequence[Any], tensor: Tensor, mesh: ProcessMesh) -> None:
    """Copy this rank's rows into `tensor`."""
    if tensor.ndim == 0:
        tensor.copy_(pieces[0][...])
        return
    sharded = isinstance(tensor, DTensor)
    first, last = cast("Sharded", mesh).rows(tensor.shape[0]) if sharded else (0, tensor.shape[0])
    local, start = _local(tensor), 0
    for piece in pieces:
        end = start + piece.get_shape()[0]
        low, high = max(first, start), min(last, end)
        if low < high:
            local[low - first : high - first].copy_(piece[low - start : high - start])
        start = end


@contextmanager
def _failures(folder: str, done: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise DataError(
            f"The checkpoint {folder!r} could not be {done} ({type(error).__name__}: {error}). Check for a full disk "
            f"or a damaged file, or use another folder.",
            code="checkpoint.damaged",
            path=folder,
            error=type(error).__name__,
        ) from error
