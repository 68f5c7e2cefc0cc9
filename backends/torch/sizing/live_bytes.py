"""`LiveBytes`: counts the bytes of the tensors that operations make, while they are alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """In its block, the bytes of storages that operations allocate, until they are freed; views and the tensors that
    were given to `ignore` count nothing.

    It also counts tensors without data (`torch._subclasses.FakeTensorMode`), for which alone it stands in for grouped
    matrix products: torch has their shapes in bfloat16 only.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        """Bytes now."""
        self.peak = 0
        """The most bytes since `mark`."""
        self._sizes: dict[int, int] = {}
        self._counts = True

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Do not count the memory of `tensors`."""
        self._sizes |= {tensor.untyped_storage()._cdata: 0 for tensor in tensors}

    def elsewhere(self, tensor: Tensor) -> Tensor:
        """A copy in memory that does not count."""
        self._counts = False
        try:
            return torch.empty_like(tensor)
        finally:
            self._counts = True

    def mark(self) -> int:
        """The peak so far; starts again from here."""
        peak, self.peak = self.peak, self.live
        return peak

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        call = _grouped_product if func is torch.ops.aten._grouped_mm.default and _is_fake(args[0]) else func
        found = call(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage())
        return found

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes() * self._counts
        if key in self._sizes or not storage.nbytes():
            return
        self._sizes[key] = size
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self.live -= self._sizes.pop(key, 0)


def _is_fake(tensor: Tensor) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


_Product = Callable[..., Tensor]


def _grouped_product(a: Tensor, b: Tensor, offs: Tensor, *rest: Any, **settings: Any) -> Tensor:
    """An empty product of a group each: ``[rows in] x [group in out]``, or ``[in rows] x [rows out]`` of each group."""
    return a.new_empty(len(a), b.shape[-1]) if b.ndim == 3 else a.new_empty(len(offs), a.shape[0], b.shape[1])
