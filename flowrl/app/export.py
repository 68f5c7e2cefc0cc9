"""``flowrl export``: a run's folder to a tracker."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def add_to(app: typer.Typer, out: Console) -> None:
    """Add the command to a command line that prints to `out`."""

    @app.command()
    def export(
        run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.", show_default=False)],
        to: Annotated[list[str], typer.Option(help="wandb, mlflow, trackio or tensorboard. Repeatable.")],
    ) -> None:
        """Export a run that is over to a tracker, or what the tracker lacks of it."""
        from flowrl.report.export import export as export_run
        from flowrl.report.names import reporter

        export_run(run, [reporter(name, "--to") for name in to])
        out.print(f"{run} is exported to {', '.join(to)}", markup=False)
