"""``flowrl look``: a page of one or more runs, live or as one file; the same as text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from flowrl.app.printing import print_json
from flowrl.errors import ParameterError, StorageError

if TYPE_CHECKING:
    from flowrl.look.page.api import Api


def add_to(app: typer.Typer, out: Console) -> None:
    """Add the command to a command line that prints to `out`."""

    @app.command()
    def look(
        runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders.", show_default=False)],
        to: Annotated[Path | None, typer.Option(help="Write the page with its data to this .html file.")] = None,
        rows: Annotated[str, typer.Option(help="With --to: 'some' prompts and responses, or 'none'.")] = "some",
        text: Annotated[bool, typer.Option("--text", help="Print the state as text.")] = False,
        as_json: Annotated[bool, typer.Option("--json", help="Print the state as JSON.")] = False,
        port: Annotated[int, typer.Option(help="Port of the page. [default: any free one]", min=0, max=65535)] = 0,
        trace: Annotated[
            Path | None, typer.Option(help="Write the first run's spans in Chrome's trace format.")
        ] = None,
        imports: Annotated[bool, typer.Option("--import", help="Import the code that the graphs name.")] = False,
    ) -> None:
        """Show runs in a browser: graph, curves, rows, prompts and time; also while they run."""
        from flowrl.graph import Graph
        from flowrl.look.page.api import Api
        from flowrl.look.page.watched import watched
        from flowrl.look.recorded_run import open_run

        if rows not in ("some", "none"):
            raise ParameterError(
                f"--rows {rows} is neither 'some' nor 'none'. Pass one of the two.",
                code="cli.bad-option",
                option="--rows",
                found=rows,
            )
        api = Api(watched([open_run(run, imports, Graph) for run in runs]))
        if text or as_json:
            _print(api, out, as_json)
        if to is not None:
            _export(api, to, rows == "some", out)
        if trace is not None:
            _write_trace(api, trace, out)
        if not (text or as_json or to or trace):
            _serve(api, port, out)


def _print(api: Api, out: Console, as_json: bool) -> None:
    from flowrl.look.page.text import shown

    if as_json:
        states = {name: api.answer("now", {"run": name}) for name in api.named}
        print_json(out, {"runs": api.answer("runs", {}), "now": states})
        return
    for name in api.named:
        out.print(shown(api, name), soft_wrap=False)


def _export(api: Api, to: Path, rows: bool, out: Console) -> None:
    from flowrl.look.page.export import export

    document, note = export(api, rows)
    with _writing(to, "--to"):
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_text(document, encoding="utf-8")
    out.print(f"{to}: {to.stat().st_size / 1e6:.1f} MB. {note}", markup=False)


def _write_trace(api: Api, to: Path, out: Console) -> None:
    from flowrl.look.page.views.times import timeline

    found = timeline(next(iter(api.named.values())))
    with _writing(to, "--trace"):
        to.parent.mkdir(parents=True, exist_ok=True)
        found.save(to)
    out.print(f"{to}: {len(found.spans)} spans; open it in Perfetto, https://ui.perfetto.dev.", markup=False)


def _serve(api: Api, port: int, out: Console) -> None:
    from flowrl.look.page.server import HOST, Server

    server = Server(api, port)
    api.warm_up()
    out.print(f"{', '.join(api.named)}: {server.address}", markup=False)
    out.print(
        f"Only this machine reaches it. Over ssh, forward the port: ssh -L {server.port}:{HOST}:{server.port} HOST. "
        f"Ctrl-C ends it.",
        markup=False,
        style="dim",
    )
    server.serve()


@contextmanager
def _writing(path: Path, option: str) -> Iterator[None]:
    """Name the option of a file that cannot be written."""
    try:
        yield
    except (OSError, StorageError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ParameterError(
            f"{option} {path} cannot be written: {reason}. Pass another file.",
            code="cli.bad-option",
            option=option,
            found=path,
        ) from error
