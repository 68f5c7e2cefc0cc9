"""External forms of a `DataProto`: its digest, its folder on disk, TensorDict, verl's three dicts. Nothing is pickled.

Everything here works on plain columns and meta; `DataProto` puts the methods on top. Nothing is ever pickled.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load as parse_tensors
from safetensors.torch import save_file
from torch import Tensor

from flowrl.columns import lookup
from flowrl.data.files import file_digest, parse_json, reading, replaced, writing
from flowrl.data.proto.column_math import Columns, Objects, bits, objects
from flowrl.errors import DataError, type_of

Meta = Mapping[str, Any]

FORMAT = "flowrl.DataProto/1"
TENSORS, OBJECTS, MANIFEST = "tensors.safetensors", "objects.json", "manifest.json"


def check_json(value: Any, where: str) -> None:
    """Refuse what does not survive a round trip through JSON: tuples, NumPy numbers, enums, keys that are not strings,
    ...

    NaN and the infinities are written as Python's `json` writes them, and do survive.
    """
    try:
        _check_json(value, where)
    except RecursionError:
        raise DataError(
            f"{where} is nested too deeply for Python. Flatten it.", code="data.not-json", where=where
        ) from None


def _check_json(value: Any, where: str) -> None:
    if type(value) is list:
        for i, item in enumerate(value):
            _check_json(item, f"{where}[{i}]")
    elif type(value) is dict:
        for key, item in value.items():
            if type(key) is not str:
                raise DataError(
                    f"{where} has the key {key!r}, {type_of(key)}, but JSON keys are str. Use {str(key)!r}.",
                    code="data.not-json",
                    where=where,
                    found=repr(key),
                )
            _check_json(item, f"{where}[{key!r}]")
    elif type(value) not in (str, int, float, bool, type(None)):
        raise DataError(
            f"{where} is {type_of(value)}, which JSON does not restore exactly. Expected str, int, float, bool, None, "
            f"list or dict; convert NumPy values with .item() or .tolist(), tuples with list(...).",
            code="data.not-json",
            where=where,
            found=type(value).__name__,
        )


def digest(columns: Columns, meta: Meta) -> str:
    """The xxh3-128 hex digest of the content: per column (sorted by name) dtype, shape and bytes; meta.

    Objects are hashed as canonical JSON (sorted keys), whatever the insertion order, strides and device.
    """
    hasher = xxhash.xxh3_128()
    for name in sorted(columns):
        column = columns[name]
        if isinstance(column, Tensor):
            dtype, content = str(column.dtype).removeprefix("torch."), bits(column).numpy()
        else:
            for row, item in enumerate(column):
                check_json(item, f"column {name!r}, row {row}: the object")
            dtype, content = "object", np.frombuffer(_canonical(column.tolist()), np.uint8)
        # the size in front of the bytes keeps one column from running into the next
        hasher.update(_canonical([name, dtype, list(column.shape), content.nbytes]))
        hasher.update(content.data)
    hasher.update(_canonical(dict(meta)))
    return hasher.hexdigest()


def save(folder: str | Path, columns: Columns, meta: Meta) -> None:
    """Write ``tensors.safetensors``, ``objects.json`` and ``manifest.json`` (digests) as a new folder, atomically."""
    folder = _path(folder)
    if os.path.lexists(folder) and not (folder.is_dir() and not any(folder.iterdir())):
        raise DataError(
            f"{folder} exists and is not an empty folder. Save to a new folder, or remove this one first.",
            code="data.folder-exists",
            path=folder,
        )
    content_digest = digest(columns, meta)  # refuses what cannot be written before anything is
    listing = {
        "columns": list(columns),
        "objects": {name: c.tolist() for name, c in columns.items() if not isinstance(c, Tensor)},
        "meta": dict(meta),
    }
    # safetensors requires a separate storage for every tensor
    tensors = {name: c.detach().cpu().contiguous().clone() for name, c in columns.items() if isinstance(c, Tensor)}
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with replaced(folder) as draft:
            draft.mkdir()
            save_file(tensors, draft / TENSORS)
            (draft / OBJECTS).write_bytes(json.dumps(listing, indent=1).encode())
            files = {name: file_digest(draft / name) for name in (TENSORS, OBJECTS)}
            (draft / MANIFEST).write_bytes(_manifest(content_digest, files))


def load(folder: str | Path) -> tuple[dict[str, Tensor | Objects], dict[str, Any]]:
    """Columns and meta as `save` wrote them, tensors on the CPU."""
    folder = _path(folder)
    for name in (MANIFEST, TENSORS, OBJECTS):
        if not (folder / name).is_file():
            raise DataError(
                f"{folder / name} is missing. Pass a folder that DataProto.save has written.",
                code="data.damaged",
                path=folder / name,
            )
    content_digest, files = _read_manifest(folder / MANIFEST)
    # what is verified is what is used: a memory map would follow (or crash on) later changes of the file
    raw = {name: _bytes(folder / name) for name in files}
    for name, expected in files.items():
        if (found := xxhash.xxh3_128_hexdigest(raw[name])) != expected:
            raise DataError(
                f"{folder / name} is damaged: its xxh3-128 is {found}, but {folder / MANIFEST} has {expected}. "
                f"Save the DataProto again.",
                code="data.damaged",
                path=folder / name,
            )
    try:
        tensors, listing = parse_tensors(raw[TENSORS]), parse_json(raw[OBJECTS])
        columns: dict[str, Tensor | Objects] = {
            name: tensors[name] if name in tensors else objects(listing["objects"][name]) for name in listing["columns"]
        }
        meta, found = dict(listing["meta"]), digest(columns, listing["meta"])
    except (ValueError, LookupError, TypeError, AttributeError, SafetensorError) as error:
        raise DataError(
            f"{folder} is damaged, although its digests match ({type(error).__name__}: {error}). Save the DataProto "
            f"again.",
            code="data.damaged",
            path=folder,
        ) from error
    if found != content_digest:
        raise DataError(
            f"{folder / MANIFEST} is damaged: its digest is {content_digest}, but the content has {found}. Save the "
            f"DataProto again.",
            code="data.damaged",
            path=folder / MANIFEST,
        )
    return columns, meta


def to_tensordict(columns: Columns, meta: Meta, rows: int) -> Any:
    """A `tensordict.TensorDict` of batch size ``[rows]``: objects as `NonTensorStack`, meta as `NonTensorData`."""
    tensordict = _import_tensordict()
    if clash := [key for key in meta if key in columns]:
        raise DataError(
            f"{clash[0]!r} is both a column and a meta key, which a TensorDict cannot store. Rename the column.",
            code="data.conversion",
            column=clash[0],
        )
    entries: dict[str, Any] = {}
    for name, column in columns.items():
        if isinstance(column, Tensor):
            entries[name] = column
        elif rows == 0:
            raise DataError(
                f"Column {name!r} has no rows, but a NonTensorStack needs at least one. Use drop({name!r}) first.",
                code="data.conversion",
                column=name,
            )
        else:
            entries[name] = tensordict.NonTensorStack(*[tensordict.NonTensorData(item) for item in column])
    for key, value in meta.items():
        entries[key] = tensordict.NonTensorData(value, batch_size=[rows])
    return tensordict.TensorDict(entries, batch_size=[rows])


def from_tensordict(data: Any) -> tuple[dict[str, Tensor | Objects], dict[str, Any]]:
    """Columns and meta of a TensorDict with one batch axis.

    A `NonTensorStack` is an object column. A `NonTensorData` (one value for all rows) is meta, unless its name is that
    of a known object column (``td["data_source"] = "gsm8k"``): then every row has it.
    """
    tensordict = _import_tensordict()
    if not isinstance(data, tensordict.TensorDictBase):
        raise DataError(
            f"from_tensordict got {type_of(data)}. Pass a TensorDict, or call DataProto(columns, meta).",
            code="data.conversion",
            found=type(data).__name__,
        )
    if len(data.batch_size) != 1:
        raise DataError(
            f"The TensorDict has the batch size {list(data.batch_size)}. Make it one number with reshape(-1).",
            code="data.conversion",
            found=list(data.batch_size),
        )
    columns: dict[str, Tensor | Objects] = {}
    meta: dict[str, Any] = {}
    for name in data.keys():  # noqa: SIM118 (a TensorDict iterates over its rows)
        entry, known = data.get(name), lookup(name)
        if isinstance(entry, Tensor):
            columns[name] = entry
        elif isinstance(entry, tensordict.NonTensorStack):
            columns[name] = objects(entry.tolist())
        elif not isinstance(entry, tensordict.NonTensorData):
            raise DataError(
                f"Entry {name!r} of the TensorDict is {type_of(entry)}. Flatten it with flatten_keys().",
                code="data.conversion",
                column=name,
                found=type(entry).__name__,
            )
        elif known is not None and known.dtype == "object":
            columns[name] = objects([entry.data] * data.batch_size[0])
        else:
            meta[name] = entry.data
    return columns, meta


def to_verl(columns: Columns, meta: Meta) -> dict[str, dict[str, Any]]:
    """``{"batch", "non_tensor_batch", "meta_info"}`` as verl has them; known masks become int64, as in verl."""
    tensors = {name: c for name, c in columns.items() if isinstance(c, Tensor)}
    return {
        "batch": {name: tensor.long() if _is_mask(name) else tensor for name, tensor in tensors.items()},
        "non_tensor_batch": {name: c.copy() for name, c in columns.items() if not isinstance(c, Tensor)},
        "meta_info": dict(meta),
    }


def from_verl(data: Any) -> tuple[dict[str, Tensor | Objects], dict[str, Any]]:
    """Columns and meta of verl's three dicts, or of an object with these as attributes (`verl.DataProto`).

    Known masks of zeros and ones become bool; a NumPy array with more axes, or of another dtype, one object per row.
    """
    parts: dict[str, Any] = {}
    for part in ("batch", "non_tensor_batch", "meta_info"):
        if not (part in data if isinstance(data, Mapping) else hasattr(data, part)):
            raise DataError(
                f"{type(data).__name__} has no {part!r}. Expected verl's batch, non_tensor_batch and meta_info.",
                code="data.conversion",
                part=part,
            )
        found = data[part] if isinstance(data, Mapping) else getattr(data, part)
        parts[part] = {} if found is None else found  # verl has batch=None where there are no tensors
        if not hasattr(parts[part], "items"):  # a TensorDict is no Mapping
            raise DataError(
                f"{part} is {type_of(found)}. Expected a dict of columns.", code="data.conversion", part=part
            )
    columns: dict[str, Tensor | Objects] = {}
    for name, tensor in parts["batch"].items():
        if _is_mask(name) and isinstance(tensor, Tensor) and tensor.dtype != torch.bool:
            odd = tensor[(tensor != 0) & (tensor != 1)]
            if odd.numel():
                raise DataError(
                    f"Column {name!r} is a mask, but it contains {odd[0].item()}. Expected only 0 and 1.",
                    code="data.conversion",
                    column=name,
                    found=odd[0].item(),
                )
            tensor = tensor.bool()
        columns[name] = tensor
    for name, array in parts["non_tensor_batch"].items():
        if name in columns or not isinstance(array, np.ndarray):
            what = "is in batch as well" if name in columns else f"is {type_of(array)}"
            raise DataError(
                f"{name!r} in non_tensor_batch {what}. Expected a NumPy array with a name that batch does not have.",
                code="data.conversion",
                column=name,
            )
        columns[name] = objects(array.tolist())
    return columns, dict(parts["meta_info"])


def _import_tensordict() -> Any:
    try:
        import tensordict
    except ImportError as error:
        raise ImportError("tensordict is not installed: pip install 'flowrl[tensordict]'.") from error
    return tensordict


def _is_mask(name: str) -> bool:
    known = lookup(name)
    return known is not None and known.dtype == "bool"


def _path(folder: Any) -> Path:
    if not isinstance(folder, str | os.PathLike) or "\0" in str(folder):
        raise DataError(
            f"{folder!r} is not a path. Pass a str or a Path to a folder.", code="data.wrong-type", found=repr(folder)
        )
    return Path(folder)


def _bytes(path: Path) -> bytes:
    with reading(path):
        return path.read_bytes()


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _manifest(content_digest: str, files: Mapping[str, str]) -> bytes:
    return json.dumps({"format": FORMAT, "digest": content_digest, "files": dict(files)}, indent=1).encode()


def _read_manifest(path: Path) -> tuple[str, dict[str, str]]:
    """The digests of content and files; written in one way only, so that any change to the manifest shows."""
    raw = _bytes(path)
    try:
        manifest = parse_json(raw)
        content_digest = str(manifest["digest"])
        files = {name: str(manifest["files"][name]) for name in (TENSORS, OBJECTS)}
    except (ValueError, LookupError, TypeError) as error:
        raise DataError(
            f"{path} is damaged ({error!r}). Expected the manifest that DataProto.save writes.",
            code="data.damaged",
            path=path,
        ) from error
    if raw != _manifest(content_digest, files):
        raise DataError(
            f"{path} is damaged, or not {FORMAT}. Expected the manifest that DataProto.save writes.",
            code="data.damaged",
            path=path,
        )
    return content_digest, files
