"""``flowrl push``: the trained model of a run to the Hub, with a card that says what trained it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def add_to(app: typer.Typer, out: Console) -> None:
    """Add the command to a command line that prints to `out`."""

    @app.command()
    def push(
        run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.", show_default=False)],
        repository: Annotated[str, typer.Argument(metavar="REPO", help="Such as org/name.", show_default=False)],
        role: Annotated[str | None, typer.Option(help="The trained role, if there are several.")] = None,
        private: Annotated[
            bool | None,
            typer.Option(
                "--private/--public", help="Of a new repository. [default: the account's]", show_default=False
            ),
        ] = None,
        card: Annotated[Path | None, typer.Option(help="Only write the model card to this file.")] = None,
        imports: Annotated[
            bool, typer.Option("--import", help="Import (execute) the code that the run names.")
        ] = False,
    ) -> None:
        """Upload the trained model of a run to the Hugging Face Hub, with a model card."""
        from flowrl.data.files import write
        from flowrl.hub.upload import upload
        from flowrl.look.model_card import model_card, trained_role
        from flowrl.look.recorded_run import open_run

        opened = open_run(run, imports)
        name = trained_role(opened, role)
        text = model_card(opened, name, repository)
        if card is not None:
            write(card, text.encode())
            out.print(f"The model card is in {card}", markup=False)
            return
        out.print(f"{run / name} is uploaded: {upload(run / name, text, repository, private)}", markup=False)
