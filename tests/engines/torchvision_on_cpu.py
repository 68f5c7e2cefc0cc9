"""Let a torchvision built for CUDA be imported with a torch for the CPU.

Its compiled part does not load there, so its operators have no schemas, and `import torchvision` (which transformers
and SGLang do) raises ``operator torchvision::nms does not exist``. This hook defines the two schemas that its Python
part refers to, just before torchvision is first imported; no language model calls them. `make engines` installs it,
with a ``.pth`` file that imports it, into the environment of the engines and nowhere else.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    """Finds no module; before the first import of torchvision it defines the schemas and removes itself."""

    library: Any = None  # keeps the definitions alive

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            import torch

            type(self).library = torch.library.Library("torchvision", "DEF")
            for schema in SCHEMAS:
                self.library.define(schema)
        return None


sys.meta_path.insert(0, _BeforeTorchvision())
