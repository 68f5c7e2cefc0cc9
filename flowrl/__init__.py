"""flowrl: reinforcement-learning post-training of language models as a graph of typed operators.

Names are imported on first use, so ``import flowrl`` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flowrl.columns import Column
    from flowrl.data import PromptData
    from flowrl.distributed.place import Colocate, Split
    from flowrl.edit import After
    from flowrl.errors import FlowrlError
    from flowrl.graph import Graph
    from flowrl.job import Job
    from flowrl.keys import Key
    from flowrl.metrics import Metrics
    from flowrl.operator import Operator, State
    from flowrl.ports import INJECTED
    from flowrl.proto import DataProto
    from flowrl.records import PromptBatch, RolloutBatch
    from flowrl.report import TensorBoard, Terminal
    from flowrl.roles import Reads, Role, Writes
    from flowrl.serial import load, save
    from flowrl.trace import algorithm
    from flowrl.training import Training
    from flowrl.validation import Validation

__version__ = "0.1.0"

__all__ = [
    "INJECTED",
    "After",
    "Colocate",
    "Column",
    "DataProto",
    "FlowrlError",
    "Graph",
    "Job",
    "Key",
    "Metrics",
    "Operator",
    "PromptBatch",
    "PromptData",
    "Reads",
    "Role",
    "RolloutBatch",
    "Split",
    "State",
    "TensorBoard",
    "Terminal",
    "Training",
    "Validation",
    "Writes",
    "algorithm",
    "load",
    "save",
]

_MODULES = {
    "Column": "columns",
    "Colocate": "distributed.place",
    "Split": "distributed.place",
    "PromptData": "data",
    "After": "edit",
    "FlowrlError": "errors",
    "Graph": "graph",
    "Job": "job",
    "Key": "keys",
    "Metrics": "metrics",
    "Operator": "operator",
    "State": "operator",
    "INJECTED": "ports",
    "DataProto": "proto",
    "PromptBatch": "records",
    "RolloutBatch": "records",
    "TensorBoard": "report",
    "Terminal": "report",
    "Reads": "roles",
    "Role": "roles",
    "Writes": "roles",
    "load": "serial",
    "save": "serial",
    "algorithm": "trace",
    "Training": "training",
    "Validation": "validation",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'flowrl' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"flowrl.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
