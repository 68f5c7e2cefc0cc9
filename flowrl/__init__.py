"""flowrl: reinforcement-learning post-training of language models as a graph of typed operators.

Names are imported on first use, so ``import flowrl`` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowrl.lazy import hide_warnings_of_torchao, lazy

if TYPE_CHECKING:
    from flowrl.auditing.audit import audit
    from flowrl.auditing.record import Audit
    from flowrl.auditing.task import AuditTask
    from flowrl.columns import Column
    from flowrl.core.graphs.after import After
    from flowrl.core.graphs.lag import Lag
    from flowrl.core.operators.function import operator
    from flowrl.core.operators.loss import Loss
    from flowrl.core.operators.operator import Operator
    from flowrl.core.operators.ports import INJECTED
    from flowrl.core.operators.roles import Reads, Role, Writes
    from flowrl.core.operators.session import State
    from flowrl.core.operators.when import When
    from flowrl.data.keys import Key
    from flowrl.data.metrics import Metrics
    from flowrl.data.now import Now
    from flowrl.data.proto.dataproto import DataProto
    from flowrl.data.sources.demos import DemoData, PreferenceData, UnpairedData
    from flowrl.data.sources.prompts import PromptData
    from flowrl.data.sources.samplers import ByDifficulty, ReplaySampler, Sampler
    from flowrl.data.sources.source import Source
    from flowrl.distributed.place import Colocate, Split
    from flowrl.errors import FlowrlError
    from flowrl.evaluation.evaluation import Evaluation
    from flowrl.graph import Graph, algorithm, load, open, save
    from flowrl.look.comparing.compare import compare
    from flowrl.look.recorded_run import RecordedRun
    from flowrl.protocols.backend import Backend
    from flowrl.records import DemoBatch, PreferenceBatch, PromptBatch, RolloutBatch, UnpairedBatch
    from flowrl.report.mlflow import MLflow
    from flowrl.report.tensorboard import TensorBoard
    from flowrl.report.terminal import Terminal
    from flowrl.report.trackio import Trackio
    from flowrl.report.wandb import WandB
    from flowrl.run.prediction.costs import Costs
    from flowrl.run.recording.recording import Recording
    from flowrl.run.reporting.reporter import Reporter
    from flowrl.run.training.job import Job
    from flowrl.run.training.training import Training
    from flowrl.run.validation.stopping import Best, EarlyStopping
    from flowrl.run.validation.validation import Validation
    from flowrl.spec import Spec

__version__ = "0.1.0"

hide_warnings_of_torchao()

__all__ = [
    "INJECTED",
    "After",
    "Audit",
    "AuditTask",
    "Backend",
    "Best",
    "ByDifficulty",
    "Colocate",
    "Column",
    "Costs",
    "DataProto",
    "DemoBatch",
    "DemoData",
    "EarlyStopping",
    "Evaluation",
    "FlowrlError",
    "Graph",
    "Job",
    "Key",
    "Lag",
    "Loss",
    "MLflow",
    "Metrics",
    "Now",
    "Operator",
    "PreferenceBatch",
    "PreferenceData",
    "PromptBatch",
    "PromptData",
    "Reads",
    "RecordedRun",
    "Recording",
    "ReplaySampler",
    "Reporter",
    "Role",
    "RolloutBatch",
    "Sampler",
    "Source",
    "Spec",
    "Split",
    "State",
    "TensorBoard",
    "Terminal",
    "Trackio",
    "Training",
    "UnpairedBatch",
    "UnpairedData",
    "Validation",
    "WandB",
    "When",
    "Writes",
    "algorithm",
    "audit",
    "compare",
    "load",
    "open",
    "operator",
    "save",
]

__getattr__ = lazy(
    __name__,
    {
        "ByDifficulty": "data.sources.samplers",
        "DemoData": "data.sources.demos",
        "PreferenceData": "data.sources.demos",
        "UnpairedData": "data.sources.demos",
        "UnpairedBatch": "records",
        "ReplaySampler": "data.sources.samplers",
        "Sampler": "data.sources.samplers",
        "Source": "data.sources.source",
        "DemoBatch": "records",
        "PreferenceBatch": "records",
        "Audit": "auditing.record",
        "AuditTask": "auditing.task",
        "audit": "auditing.audit",
        "Backend": "protocols.backend",
        "Recording": "run.recording.recording",
        "Reporter": "run.reporting.reporter",
        "Spec": "spec",
        "Column": "columns",
        "Costs": "run.prediction.costs",
        "Colocate": "distributed.place",
        "Split": "distributed.place",
        "PromptData": "data.sources.prompts",
        "After": "core.graphs.after",
        "Evaluation": "evaluation.evaluation",
        "FlowrlError": "errors",
        "Graph": "graph",
        "Job": "run.training.job",
        "Key": "data.keys",
        "Lag": "core.graphs.lag",
        "Loss": "core.operators.loss",
        "Metrics": "data.metrics",
        "Operator": "core.operators.operator",
        "State": "core.operators.session",
        "Now": "data.now",
        "INJECTED": "core.operators.ports",
        "DataProto": "data.proto.dataproto",
        "PromptBatch": "records",
        "RolloutBatch": "records",
        "MLflow": "report.mlflow",
        "TensorBoard": "report.tensorboard",
        "Terminal": "report.terminal",
        "Trackio": "report.trackio",
        "WandB": "report.wandb",
        "Reads": "core.operators.roles",
        "Role": "core.operators.roles",
        "Writes": "core.operators.roles",
        "load": "graph",
        "open": "graph",
        "RecordedRun": "look.recorded_run",
        "compare": "look.comparing.compare",
        "operator": "core.operators.function",
        "save": "graph",
        "algorithm": "graph",
        "Training": "run.training.training",
        "Best": "run.validation.stopping",
        "EarlyStopping": "run.validation.stopping",
        "Validation": "run.validation.validation",
        "When": "core.operators.when",
    },
)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
