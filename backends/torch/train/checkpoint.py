"""Checkpoints of weights and optimizer state: written on any mesh of processes, and read on any other.

Each rank writes one safetensors file, ``part-00001-of-00002.safetensors`` and so on, with flat names:
``weights.<name>``, ``optimizer.<key>.<name>``, and those of `extra`. The metadata of a file, ``boxes``, have the shape
of each tensor and the boxes of it that the file holds (`flowrl.backends.torch.train.boxes`); what several ranks hold is
in one file. Files without them, which older versions wrote, hold the rows of tensors in order. States in 8 bits are
stored as float32, which any mesh can read, also into states of other bits; ``scales.<key>.<name>.<box>``, the scales of
their blocks, give the process that has the same box the same bits again. Nothing is pickled, so a foreign checkpoint
cannot run code.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from flowrl.backends.torch.train.boxes import Box, boxes, cut_of
from flowrl.backends.torch.train.mesh import ProcessMesh
from flowrl.backends.torch.train.tensor_file import DTYPES, TensorFile
from flowrl.errors import DataError

if TYPE_CHECKING:  # it takes half a second to import
    from flowrl.backends.torch.train.sharded import Sharded

_PART = re.compile(r"part-\d{5}-of-(\d{5})\.safetensors")


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
    own = {name: tensor for name, tensor in tensors.items() if mesh.writes(tensor)}
    found = {name: _as_json(tensor.shape, _boxes(tensor, mesh)) for name, tensor in own.items()}
    scales = {_of_scales(name, x, mesh): scale for name, x in own.items() if (scale := _scales(x)) is not None}
    part = os.path.join(folder, f"part-{mesh.position.rank + 1:05d}-of-{mesh.spec.ranks:05d}.safetensors")
    with mesh.all_or_none("save_checkpoint"), _failures(folder, "written"):
        parts = {name: _local(tensor) for name, tensor in own.items()} | scales
        _write(f"{part}.draft", parts, {"boxes": json.dumps(found)})
    with mesh.all_or_none("save_checkpoint"), _failures(folder, "written"):
        os.replace(f"{part}.draft", part)


def load(
    folder: str,
    mesh: ProcessMesh,
    weights: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    zeros: Callable[[nn.Parameter], Mapping[str, Tensor]],
    extra: Mapping[str, Tensor],
) -> None:
    """Read a checkpoint into `weights`, the state of `optimizer` and `extra`, in place; a collective.

    `zeros` makes the optimizer's state of a parameter after a step, to be read into.

    Raises `DataError` and changes nothing if there is none, or a damaged one, or one of another model or optimizer.
    """
    tensors: dict[str, Tensor] = dict(extra)
    tensors |= {f"weights.{name}": parameter.detach() for name, parameter in weights.items()}
    state: dict[Tensor, dict[str, Tensor]] = {}
    for name, parameter in weights.items():
        state[parameter] = dict(zeros(parameter))
        tensors |= {f"optimizer.{key}.{name}": value for key, value in state[parameter].items()}
    expected = mesh.union({name: (DTYPES[tensor.dtype], *tensor.shape) for name, tensor in tensors.items()})
    with ExitStack() as files:
        with mesh.all_or_none("load_checkpoint"):
            stored = _pieces(folder, files)
            scales = {name: stored.pop(name) for name in [*stored] if name.startswith("scales.")}
            if not any(map(_of_optimizer, stored)):  # written before the first step
                tensors = {name: tensor for name, tensor in tensors.items() if not _of_optimizer(name)}
                expected = {name: kind for name, kind in expected.items() if not _of_optimizer(name)}
                state = {}
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
                if _scales(tensor) is None:
                    _read(stored[name], _local(tensor), _boxes(tensor, mesh))
                else:
                    _read_quantized(stored[name], scales.get(_of_scales(name, tensor, mesh)), tensor, mesh)
    optimizer.state.clear()
    optimizer.state.update(state)


def _of_optimizer(name: str) -> bool:
    return name.startswith("optimizer.")


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _write(path: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    with TensorFile(path, tensors, metadata) as file:
        for name, tensor in tensors.items():
            file.write(name, tensor if _scales(tensor) is None else cast(Any, tensor).dequantize())


def _boxes(tensor: Tensor, mesh: ProcessMesh) -> list[Box]:
    """The parts of a tensor that this process has."""
    if isinstance(tensor, DTensor):
        cut = cut_of(tensor)
        return boxes(tensor.shape, cut, cast("Sharded", mesh).place_of(cut))
    return [_whole(tensor.shape)]


def _whole(shape: Sequence[int]) -> Box:
    sides = tuple(slice(0, size) for size in shape)
    return Box(sides, sides)


def _as_json(shape: Sequence[int], boxes: Sequence[Box]) -> dict[str, Any]:
    """The shape of a tensor, and of each box the first and the last index, and one more, in the file and the tensor."""
    return {"shape": list(shape), "boxes": [[[[side.start, side.stop] for side in of] for of in box] for box in boxes]}


class _Piece(NamedTuple):
    """A lazy slice of a file, the shape of the tensor that it is of, and its boxes."""

    source: Any
    shape: tuple[int, ...]
    boxes: Sequence[Box]

    @staticmethod
    def of(source: Any, found: Mapping[str, Any]) -> _Piece:
        """A slice with what `_as_json` wrote."""
        sides = [[tuple(slice(*side) for side in of) for of in box] for box in found["boxes"]]
        return _Piece(source, tuple(found["shape"]), [Box(*box) for box in sides])

    @property
    def elements(self) -> int:
        """The number of elements in the boxes."""
        return sum(math.prod(side.stop - side.start for side in box.whole) for box in self.boxes)


def _pieces(folder: str, files: ExitStack) -> dict[str, list[_Piece]]:
    """The pieces of each tensor of a checkpoint, valid as long as `files` is open."""
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
    pieces: dict[str, list[_Piece]] = {}
    rows: dict[str, list[Any]] = {}
    with _failures(folder, "read"):
        for part in parts:
            file = files.enter_context(safe_open(os.path.join(folder, part), framework="pt"))
            found = json.loads((file.metadata() or {}).get("boxes", "{}"))
            for name in file.keys():  # noqa: SIM118
                source = file.get_slice(name)
                if name in found:
                    pieces.setdefault(name, []).append(_Piece.of(source, found[name]))
                else:
                    rows.setdefault(name, []).append(source)
    return pieces | {name: _by_rows(sources) for name, sources in rows.items()}


def _by_rows(sources: Sequence[Any]) -> list[_Piece]:
    """The pieces of a tensor whose rows are in these slices, one after the other."""
    shapes = [tuple(source.get_shape()) for source in sources]
    total, start, pieces = sum(shape[0] for shape in shapes if shape), 0, []
    for source, shape in zip(sources, shapes, strict=True):
        sides = _whole(shape).local
        whole = (slice(start, start + shape[0]), *sides[1:]) if shape else ()
        pieces.append(_Piece(source, (total, *shape[1:]) if shape else (), [Box(sides, whole)]))
        start += sum(shape[:1])
    return pieces


def _described(pieces: Sequence[_Piece]) -> tuple[Any, ...]:
    """Dtype and shape of the tensor with these pieces; another tuple if they are not all of it."""
    kinds = {(piece.source.get_dtype(), *piece.shape) for piece in pieces}
    full = all(piece.elements == math.prod(piece.source.get_shape()) for piece in pieces)
    full &= math.prod(pieces[0].shape) == sum(piece.elements for piece in pieces)
    return kinds.pop() if full and len(kinds) == 1 else ("incomplete",)


def _read(pieces: Sequence[_Piece], local: Tensor, boxes: Sequence[Box]) -> None:
    """Copy these boxes of a tensor, which a process has, into `local`."""
    for own, piece in product(boxes, pieces):
        for box in piece.boxes:
            if (common := own.common(box)) is not None:
                here, there = common
                local[here].copy_(piece.source[there] if there else piece.source[...])


def _read_quantized(
    pieces: Sequence[_Piece], scale: Sequence[_Piece] | None, tensor: Tensor, mesh: ProcessMesh
) -> None:
    """Read into a tensor in 8 bits; `scale` is what this box was stored with, if it was."""
    from flowrl.backends.torch.optimizers.eight_bit import quantize

    local = _local(tensor)
    numbers = torch.empty(local.shape)
    _read(pieces, numbers, _boxes(tensor, mesh))
    quantize(local, numbers.to(local.device), None if scale is None else scale[0].source[...].to(local.device))


def _scales(tensor: Tensor) -> Tensor | None:
    """The scales of a tensor in 8 bits."""
    return getattr(_local(tensor), "scale", None)


def _of_scales(name: str, tensor: Tensor, mesh: ProcessMesh) -> str:
    """The name of the scales of a state: they are of the boxes that a process has."""
    sides = ["x".join(f"{side.start}-{side.stop}" for side in box.whole) for box in _boxes(tensor, mesh)]
    return f"scales.{name.removeprefix('optimizer.')}.{','.join(sides)}"


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
