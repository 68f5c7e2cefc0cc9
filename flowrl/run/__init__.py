"""Running a graph: jobs, schedules, steps, training and the folder that it leaves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowrl.lazy import lazy

if TYPE_CHECKING:
    from flowrl.run.engine.steps import Steps
    from flowrl.run.prediction.prediction import Prediction, predict
    from flowrl.run.reporting.reporter import Reporter

__all__ = [
    "Prediction",
    "Reporter",
    "Steps",
    "predict",
]

__getattr__ = lazy(
    __name__,
    {
        "Prediction": "prediction.prediction",
        "Reporter": "reporting.reporter",
        "Steps": "engine.steps",
        "predict": "prediction.prediction",
    },
)
