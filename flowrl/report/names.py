"""Reporters by name: those of flowrl, and those that installed packages add."""

from __future__ import annotations

import importlib
from importlib import metadata
from typing import Any

from flowrl.errors import ParameterError, offer
from flowrl.run.reporting.reporter import Reporter

BUILT_IN = {
    "mlflow": "flowrl.report.mlflow:MLflow",
    "tensorboard": "flowrl.report.tensorboard:TensorBoard",
    "trackio": "flowrl.report.trackio:Trackio",
    "wandb": "flowrl.report.wandb:WandB",
}

GROUP = "flowrl.reporters"
"""The entry points of packages: a name, and a reporter that can be made without arguments."""


def reporter(name: str, option: str) -> Reporter:
    """The reporter of a name that was passed as this command-line option.

    Raises:
        ParameterError: no reporter has this name, or its package is not installed.
    """
    known = BUILT_IN | {point.name: point.value for point in metadata.entry_points(group=GROUP)}
    if name not in known:
        raise ParameterError(
            f"{option} {name} names no reporter; {offer(name, sorted(known), 'there are')}",
            code="cli.bad-option",
            option=option,
            found=name,
        )
    module, _, attribute = known[name].partition(":")
    made: Reporter = getattr(importlib.import_module(module), attribute)()
    return made


def package(module: str, tracker: str, extra: str) -> Any:
    """The package of a tracker.

    Raises:
        ParameterError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ParameterError(
            f"{tracker} is not installed ({error}). Run: pip install 'flowrl[{extra}]'.",
            code="package.not-installed",
            package=extra,
        ) from error
