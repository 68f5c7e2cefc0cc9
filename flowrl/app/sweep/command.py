"""``flowrl sweep``: runs a grid or samples ranges, and continues where it was ended."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from flowrl.app.changes.arguments import EXTRA
from flowrl.app.changes.changes import Changes, EngineName, Import, split
from flowrl.app.run import Target, options_of, refuse_both
from flowrl.errors import ParameterError


def add_to(app: typer.Typer, out: Console) -> None:
    """Add the command to a command line that prints to `out`."""

    @app.command(context_settings=EXTRA)
    def sweep(
        context: typer.Context,
        target: Target,
        settings: Annotated[
            list[str] | None,
            typer.Option("--set", help="PATH=A,B,C or PATH=LOW..HIGH or PATH=log:LOW..HIGH. Repeatable."),
        ] = None,
        seeds: Annotated[int, typer.Option(help="Runs of each trial, with seeds from the training's on.", min=1)] = 1,
        trials: Annotated[int | None, typer.Option(help="Trials, for ranges.", min=1)] = None,
        maximize: Annotated[str | None, typer.Option(help="Metric. [default: the first validation's reward]")] = None,
        minimize: Annotated[str | None, typer.Option(help="Metric to minimize.")] = None,
        steps: Annotated[int | None, typer.Option(help="Training steps. [default: the training's]")] = None,
        epochs: Annotated[int | None, typer.Option(help="Passes over the data, instead of steps.")] = None,
        folder: Annotated[Path | None, typer.Option(help="Output folder. [default: sweeps/GRAPH]")] = None,
        engine: EngineName = None,
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
        imports: Import = False,
    ) -> None:
        """Run a training with all combinations of settings, or with sampled ones. The same command continues it."""
        from flowrl.app.sweep import runs
        from flowrl.app.sweep.axes import axes_of
        from flowrl.app.sweep.sweep import Sweep, run
        from flowrl.run.settings.changes import with_settings

        refuse_both(context, ("maximize", "minimize"), ("steps", "epochs"))
        changes = Changes.of(context, imports, engine, None, steps=steps, epochs=epochs)
        training, _ = changes.training(target, options_of(context))
        fixed, axes = axes_of(training, split(settings or ()))
        if seeds > 1 and any(axis.path == "seed" for axis in axes):
            raise ParameterError(
                "flowrl sweep got both --seeds and --set seed=.... Pass one of the two.",
                code="cli.bad-option",
                option="--seeds",
            )
        if fixed:
            training = with_settings(training, fixed)
        metric = maximize or minimize or runs.default_metric(training)
        where = folder or Path("sweeps") / training.job.graph.name
        planned = Sweep(training, axes, seeds, metric, minimize is None, where)
        if not run(planned, trials, out, as_json):
            raise typer.Exit(1)
