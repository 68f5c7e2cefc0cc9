"""Let SGLang's LoRA run without a GPU in tests: it requests pinned memory, which a CPU build does not have.

Python imports this module in any process with this folder in its PYTHONPATH.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from typing import Any


class Unpin(MetaPathFinder):
    """Patches torch when SGLang's LoRA is imported; finds no module itself."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        if name == "sglang.srt.lora.layers":
            sys.meta_path.remove(self)
            _unpin()


def _unpin() -> None:
    import torch

    def unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(make)
        def made(*args: Any, pin_memory: bool = False, **named: Any) -> Any:
            return make(*args, **named)

        return made

    for name in ("tensor", "arange", "zeros", "empty"):
        setattr(torch, name, unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *device: self  # type: ignore[method-assign]


sys.meta_path.insert(0, Unpin())
