"""flowrl: reinforcement-learning post-training of language models as a graph of typed operators.

Names are imported on first use, so ``import flowrl`` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flowrl.auditing.audit import audit
    from flowrl.auditing.record import Audit
    from flowrl.auditing.world import World
    from flowrl.columns import Column
    from flowrl.core.after import After
    from flowrl.core.backend import Backend
    from flowrl.core.function import operator
    from flowrl.core.graph_io import save
    from flowrl.core.lag import Lag
    from flowrl.core.loss import Loss
    from flowrl.core.operator import Operator
    from flowrl.core.ports import INJECTED, Step
    from flowrl.core.roles import Reads, Role, Writes
    from flowrl.core.session import State
    from flowrl.core.when import When
    from flowrl.data.dataproto import DataProto
    from flowrl.data.demos import DemoData, PreferenceData
    from flowrl.data.keys import Key
    from flowrl.data.metrics import Metrics
    from flowrl.data.prompts import PromptData
    from flowrl.data.samplers import ByDifficulty, Replay, Sampler
    from flowrl.data.sources import Source
    from flowrl.distributed.place import Colocate, Split
    from flowrl.errors import FlowrlError
    from flowrl.graph import Graph, algorithm, load
    from flowrl.records import DemoBatch, PreferenceBatch, PromptBatch, RolloutBatch
    from flowrl.run.costs import Costs
    from flowrl.run.job import Job
    from flowrl.run.report import Reporter, TensorBoard, Terminal
    from flowrl.run.training import Training
    from flowrl.run.validation import Validation
    from flowrl.spec import Spec

__version__ = "0.1.0"

__all__ = [
    "INJECTED",
    "After",
    "Audit",
    "Backend",
    "ByDifficulty",
    "Colocate",
    "Column",
    "Costs",
    "DataProto",
    "DemoBatch",
    "DemoData",
    "FlowrlError",
    "Graph",
    "Job",
    "Key",
    "Lag",
    "Loss",
    "Metrics",
    "Operator",
    "PreferenceBatch",
    "PreferenceData",
    "PromptBatch",
    "PromptData",
    "Reads",
    "Replay",
    "Reporter",
    "Role",
    "RolloutBatch",
    "Sampler",
    "Source",
    "Spec",
    "Split",
    "State",
    "Step",
    "TensorBoard",
    "Terminal",
    "Training",
    "Validation",
    "When",
    "World",
    "Writes",
    "algorithm",
    "audit",
    "load",
    "operator",
    "save",
]

_MODULES = {
    "ByDifficulty": "data.samplers",
    "DemoData": "data.demos",
    "PreferenceData": "data.demos",
    "Replay": "data.samplers",
    "Sampler": "data.samplers",
    "Source": "data.sources",
    "DemoBatch": "records",
    "PreferenceBatch": "records",
    "Audit": "auditing.record",
    "World": "auditing.world",
    "audit": "auditing.audit",
    "Backend": "core.backend",
    "Reporter": "run.report",
    "Spec": "spec",
    "Column": "columns",
    "Costs": "run.costs",
    "Colocate": "distributed.place",
    "Split": "distributed.place",
    "PromptData": "data.prompts",
    "After": "core.after",
    "FlowrlError": "errors",
    "Graph": "graph",
    "Job": "run.job",
    "Key": "data.keys",
    "Lag": "core.lag",
    "Loss": "core.loss",
    "Metrics": "data.metrics",
    "Operator": "core.operator",
    "State": "core.session",
    "Step": "core.ports",
    "INJECTED": "core.ports",
    "DataProto": "data.dataproto",
    "PromptBatch": "records",
    "RolloutBatch": "records",
    "TensorBoard": "run.report",
    "Terminal": "run.report",
    "Reads": "core.roles",
    "Role": "core.roles",
    "Writes": "core.roles",
    "load": "graph",
    "operator": "core.function",
    "save": "core.graph_io",
    "algorithm": "graph",
    "Training": "run.training",
    "Validation": "run.validation",
    "When": "core.when",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'flowrl' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"flowrl.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
