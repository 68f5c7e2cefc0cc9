"""The command line:
``flowrl list | show | check | audit | plan | diff | run | sweep | evaluate | serve | operators | demo``, and those on
run folders: ``look | runs | rows | why | blame | compare | replay | alarms | export | push``.

`flowrl.app.targets` defines the targets of commands. Misuse prints one paragraph and exits with code 2; ``--debug``
shows the traceback. Commands import the heavy modules that they need.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from flowrl.app import ask as ask_commands
from flowrl.app import audit as audit_command
from flowrl.app import compare as compare_commands
from flowrl.app import export as export_command
from flowrl.app import look as look_command
from flowrl.app import rows as rows_commands
from flowrl.app import run as run_command
from flowrl.app import runs as runs_commands
from flowrl.app.changes.changes import Set, load_changed
from flowrl.app.evaluate import command as evaluate_command
from flowrl.app.importing import command as importing_command
from flowrl.app.memory import out_of_memory
from flowrl.app.planning import command as planning_command
from flowrl.app.printing import print_table
from flowrl.app.serve import command as serve_command
from flowrl.app.sweep import command as sweep_command
from flowrl.app.targets import graph_of, load_target, refuse_namesakes
from flowrl.errors import FlowrlError, HubError, ParameterError, is_of_a_user

out = Console(soft_wrap=True, highlight=False, emoji=False)


class Commands(TyperGroup):
    """All commands; Ctrl-C prints one line."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            run_command.complain("interrupted.")
            raise typer.Exit(run_command.INTERRUPTED) from None


app = typer.Typer(
    cls=Commands,
    help="Reinforcement learning for language models as a graph of typed operators.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

_NAMES_A_GRAPH = "FILE.py:name, module:name, a .yaml or .json file, or an algorithm from `flowrl list`."
Target = Annotated[str, typer.Argument(metavar="TARGET", help=_NAMES_A_GRAPH, show_default=False)]

Import = Annotated[
    bool,
    typer.Option("--import", help="Import (execute) the code that a .yaml or .json graph or a run names."),
]


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script; always ends in `SystemExit`, except for an error under ``--debug``."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given  # anywhere: users add it to the end of a failed command
    try:
        app([argument for argument in given if argument != "--debug"], prog_name="flowrl")
    except Exception as error:
        found = out_of_memory(error, next((word for word in given if not word.startswith("-")), "")) or error
        if debug:
            raise found from error.__cause__ if found is error else error
        if isinstance(found, FlowrlError):
            run_command.complain(f"{found}{_at(found)}")
            sys.exit(2)
        if isinstance(error, OSError) and _is_closed(1):
            run_command.complain("standard output is closed. Redirect it to a file, or to /dev/null.")
            sys.exit(1)
        file, line, *_ = traceback.extract_tb(error.__traceback__)[-1]
        run_command.complain(
            f"{file}:{line} raises {type(error).__name__}: {str(error).rstrip('.')}. --debug shows the traceback."
        )
        sys.exit(1)


def _is_closed(descriptor: int) -> bool:
    """Whether a file descriptor of this process is closed."""
    try:
        os.fstat(descriptor)
    except OSError:
        return True
    return False


def _at(error: FlowrlError) -> str:
    """The user's line that led to an error; empty without one, or if the message names its file."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if is_of_a_user(f.filename)]
    named = not frames or frames[-1].filename in str(error)
    return "" if named else f" At {frames[-1].filename}:{frames[-1].lineno}."


def _version(requested: bool) -> None:
    if requested:
        from flowrl import __version__

        out.print(f"flowrl {__version__}")
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Options of every command; `main` removes ``--debug``."""


@app.command()
def show(
    target: Target,
    to: Annotated[Path | None, typer.Option(help="Write to this .md, .html, .svg, .json or .yaml file.")] = None,
    imports: Import = False,
) -> None:
    """Print a graph as Mermaid, or write it to a file."""
    write = None if to is None else _writer(to, (".md", ".html", ".svg", ".json", ".yaml", ".yml"))
    graph = graph_of(load_target(target, imports), target)
    if write is None:
        out.print(graph.mermaid(), markup=False)
    else:
        write(graph, graph.name)
        out.print(f"{graph.name}: {len(graph.nodes)} nodes, written to {to}", markup=False)


@app.command()
def check(
    target: Target,
    prompts: Annotated[int | None, typer.Option(help="Prompts per step, to check mini-batch sizes.", min=1)] = None,
    settings: Set = None,
    imports: Import = False,
) -> None:
    """Check a graph, job or training; list its problems and exit with 1 if there are any."""
    from flowrl.core.graphs.plan import Plan
    from flowrl.files.graph_io import not_imported
    from flowrl.run.training.job import Job, ends_of_responses
    from flowrl.run.training.training import Training

    found = load_changed(target, imports, settings)
    graph = graph_of(found, target)
    skipped = not_imported(graph)
    if prompts is None and isinstance(found, Training):
        prompts = found.prompts
    problems, ends = [str(finding) for finding in graph.check(prompts=prompts)], None
    for allowance in graph.allowances(prompts=prompts):
        out.print(str(allowance), markup=False)
    try:
        if not problems and not skipped and isinstance(found, Job | Training):
            found = _with_metadata(found)
            graph = graph_of(found, target)
            found.refuse_unready()
            (found.whole if isinstance(found, Training) else found).refuse_missing()
            if isinstance(found, Training):
                found.refuse_unfit_data()
        graph.refuse_idle()
        _ = Plan(graph).order
        ends = ends_of_responses(graph)
    except FlowrlError as error:
        problems.append(str(error))
    if problems:
        for problem in problems:
            out.print(problem, markup=False)
        raise typer.Exit(1)
    bound = "" if found is graph else ", all roles are bound"
    out.print(f"{graph.name}: {len(graph.nodes)} nodes, all connections match{bound} and no rule is violated.")
    if skipped:
        out.print(f"Not imported, so not checked: {', '.join(skipped)}. Pass --import to check.", markup=False)
    if isinstance(found, Training) and (absent := found.missing_here()):
        names = ", ".join(absent)
        out.print(
            f"Not verified: the rows of {names}, which are not on this machine. A run downloads them.", markup=False
        )
    if ends is not None:
        out.print(f"Responses end with {ends}.", markup=False)


planning_command.add_to(app, out)


@app.command()
def diff(
    before: Annotated[str, typer.Argument(metavar="BEFORE", help=_NAMES_A_GRAPH, show_default=False)],
    after: Annotated[str, typer.Argument(metavar="AFTER", help=_NAMES_A_GRAPH, show_default=False)],
    to: Annotated[Path | None, typer.Option(help="Write to this .md, .html or .svg file.")] = None,
    imports: Import = False,
) -> None:
    """Show the changes from one graph to another."""
    write = None if to is None else _writer(to, (".md", ".html", ".svg"))
    first = graph_of(load_target(before, imports), before)
    refuse_namesakes(before, after)
    difference = first.diff(graph_of(load_target(after, imports), after))
    if write is None:
        out.print(str(difference), markup=False)
    else:
        title = f"{difference.before.name} -> {difference.after.name}"
        write(difference, title)
        out.print(f"{title}, written to {to}", markup=False)


run_command.add_to(app, out)
sweep_command.add_to(app, out)
evaluate_command.add_to(app, out)
serve_command.add_to(app, out)
importing_command.add_to(app, out)


@app.command("list")
def list_() -> None:
    """List the built-in algorithms with their papers and changes. Their names are targets."""
    from flowrl.app.algorithms import listed

    print_table(out, ("algorithm", "summary", "edit of", "changes"), listed())


audit_command.add_to(app, out)
runs_commands.add_to(app, out)
rows_commands.add_to(app, out)
ask_commands.add_to(app, out)
look_command.add_to(app, out)
compare_commands.add_to(app, out)
export_command.add_to(app, out)


@app.command()
def operators() -> None:
    """List the installed operators with their inputs and outputs."""
    from flowrl.core.operators import entry_points as installed

    rows = []
    for name, point in sorted(installed.names().items()):
        signature = installed.load(name).usual_signature()
        record = signature.output_record
        writes = ", ".join(signature.outputs) if record is None else record.__name__
        rows.append((name, ", ".join(signature.ports), writes, point.value.partition(":")[0]))
    print_table(out, ("operator", "reads", "writes", "from"), rows)


@app.command()
def demo(
    steps: Annotated[
        int | None, typer.Option(help="Most steps per algorithm; it ends early once solved. [default: 100]", min=1)
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed of the warm start and the training.")] = 0,
    folder: Annotated[Path, typer.Option(help="Output folder.")] = Path("runs/demo"),
    quick: Annotated[bool, typer.Option("--quick", help="Only GRPO, 12 steps by default: under a minute.")] = False,
) -> None:
    """Train a small model to think, with GRPO and PPO, on the CPU."""
    from flowrl.demo.run import QUICK_STEPS, run_demo, run_quick

    _quiet()
    if quick:
        run_quick(out, folder, QUICK_STEPS if steps is None else steps, seed)
    else:
        run_demo(out, folder, 100 if steps is None else steps, seed)


def _with_metadata(found: Any) -> Any:
    """A job or training with the metadata of its repositories; prints those that cannot be verified without the Hub."""
    from flowrl.hub.repositories import Commits

    try:
        return found.pinned(Commits())
    except HubError as error:
        if error.code not in ("hub.offline", "hub.unreachable"):
            raise
        out.print(f"Not verified: {error.message}", markup=False)
        return found


def _writer(to: Path, suffixes: Sequence[str]) -> Callable[[Any, str], None]:
    """A function that writes a graph or a diff, with its title, in the format of the suffix of `to`."""
    if to.suffix not in suffixes:
        raise ParameterError(
            f"--to {to} has the suffix {to.suffix!r}; expected one of {', '.join(suffixes)}.",
            code="cli.bad-option",
            option="--to",
            found=to,
        )

    def text(value: Any, title: str) -> str:
        if to.suffix == ".html":
            from flowrl.draw.html import page

            return page(value)
        if to.suffix == ".svg":
            from flowrl.draw.svg import svg

            return svg(value)
        return f"# {title}\n\n```mermaid\n{value.mermaid()}\n```\n"

    def write(value: Any, title: str) -> None:
        from flowrl.files.graph_io import save

        try:
            to.parent.mkdir(parents=True, exist_ok=True)
            if to.suffix in (".json", ".yaml", ".yml"):
                save(value, to)
            else:
                to.write_text(text(value, title), encoding="utf-8")
        except OSError as error:
            raise ParameterError(
                f"--to {to} cannot be written: {error.strerror}. Pass another file.",
                code="cli.bad-option",
                option="--to",
                found=to,
            ) from error

    return write


def _quiet() -> None:
    """Hide the loading bars of transformers, which would break the progress display."""
    from transformers.utils import logging

    logging.disable_progress_bar()
