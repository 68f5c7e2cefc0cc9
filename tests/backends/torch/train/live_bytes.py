"""The live bytes of the tensors that a block creates, on a CPU."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """Counts the live bytes of tensors created in the block, shards included: `now` and their `peak`."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._live: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = map(_local, args)
        inputs = {tensor.untyped_storage()._cdata for tensor in given if type(tensor) in (Tensor, Parameter)}
        for tensor in map(_local, out if isinstance(out, tuple | list) else [out]):
            if type(tensor) is Tensor and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                if storage._cdata not in self._live and storage._cdata not in inputs:
                    self._live[storage._cdata] = storage.nbytes()
                    self.now += storage.nbytes()
                    self.peak = max(self.peak, self.now)
                    weakref.finalize(storage, self._forget, storage._cdata)
        return out

    def _forget(self, key: int) -> None:
        self.now -= self._live.pop(key)


def _local(value: Any) -> Any:
    return value._local_tensor if isinstance(value, DTensor) else value
