"""Write safetensors files one tensor at a time: `safetensors.torch.save_file` needs all of them in CPU memory at once,
three times the weights if they are on a GPU."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The names of dtypes in a file."""


class TensorFile:
    """A safetensors file that is being written.

    Args:
        like: the tensors that it will have; only their dtypes and shapes are used, so they may be on the meta device.
        metadata: further strings of its header.
    """

    def __init__(self, path: str, like: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
        header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
        self._places: dict[str, int] = {}
        end = 0
        for name, tensor in sorted(like.items(), key=lambda item: -item[1].element_size()):  # so that each is aligned
            start, end = end, end + tensor.nbytes
            header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
            self._places[name] = start
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self._start = 8 + len(text)
        self._file = open(path, "wb")  # noqa: SIM115
        self._file.write(len(text).to_bytes(8, "little") + text)
        self._file.truncate(self._start + end)

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one tensor."""
        self._file.seek(self._start + self._places[name])
        self._file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
