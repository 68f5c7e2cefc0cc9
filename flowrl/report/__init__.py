"""Reporters: the terminal, and the trackers Weights & Biases, MLflow, Trackio and TensorBoard."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowrl.lazy import lazy

if TYPE_CHECKING:
    from flowrl.report.export import export
    from flowrl.report.mlflow import MLflow
    from flowrl.report.tensorboard import TensorBoard
    from flowrl.report.terminal import Terminal
    from flowrl.report.trackio import Trackio
    from flowrl.report.wandb import WandB
    from flowrl.run.reporting.reporter import Alarm, Given, Reporter

__all__ = ["Alarm", "Given", "MLflow", "Reporter", "TensorBoard", "Terminal", "Trackio", "WandB", "export"]

__getattr__ = lazy(
    __name__,
    {
        "Alarm": "run.reporting.reporter",
        "Given": "run.reporting.reporter",
        "MLflow": "report.mlflow",
        "Reporter": "run.reporting.reporter",
        "TensorBoard": "report.tensorboard",
        "Terminal": "report.terminal",
        "Trackio": "report.trackio",
        "WandB": "report.wandb",
        "export": "report.export",
    },
)
