"""Reporters: the terminal, and the trackers Weights & Biases, MLflow, Trackio and TensorBoard."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowrl.lazy import lazy
from flowrl.run.reporting.reporter import Alarm, Given, Reporter, Tracker

if TYPE_CHECKING:
    from flowrl.report.export import export
    from flowrl.report.mlflow import MLflow
    from flowrl.report.tensorboard import TensorBoard
    from flowrl.report.terminal import Terminal
    from flowrl.report.trackio import Trackio
    from flowrl.report.wandb import WandB

__all__ = ["Alarm", "Given", "MLflow", "Reporter", "TensorBoard", "Terminal", "Tracker", "Trackio", "WandB", "export"]

__getattr__ = lazy(
    __name__,
    {
        "MLflow": "mlflow",
        "TensorBoard": "tensorboard",
        "Terminal": "terminal",
        "Trackio": "trackio",
        "WandB": "wandb",
        "export": "export",
    },
)
