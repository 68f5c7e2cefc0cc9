"""``flowrl run``: trains, and prints how to resume what was ended."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.console import Console

from flowrl.app.changes.arguments import EXTRA
from flowrl.app.changes.changes import Changes, EngineName, Import, Set
from flowrl.errors import ParameterError

INTERRUPTED = 130
"""The exit code in shells of a process that Ctrl-C ended."""

Names = Annotated[list[str] | None, typer.Option(help="Report to wandb, mlflow, trackio or tensorboard. Repeatable.")]
Metrics = Annotated[list[str] | None, typer.Option(help="Show this metric in the terminal. Repeatable.")]
Target = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="FILE.py:name, module:name, or a .yaml or .json file of a training. Arguments of a function: --n=2.",
        show_default=False,
    ),
]


def complain(message: str) -> None:
    """Print a line on stderr."""
    Console(stderr=True, soft_wrap=True, highlight=False, emoji=False).print(f"flowrl: {message}", markup=False)


def add_to(app: typer.Typer, out: Console) -> None:
    """Add the command to a command line that prints to `out`."""

    @app.command(context_settings=EXTRA)
    def run(
        context: typer.Context,
        target: Target,
        steps: Annotated[int | None, typer.Option(help="Training steps. [default: the training's]")] = None,
        epochs: Annotated[int | None, typer.Option(help="Passes over the data, instead of steps.")] = None,
        seed: Annotated[int | None, typer.Option(help="Random seed. [default: the training's]")] = None,
        folder: Annotated[str | None, typer.Option(help="Output folder. [default: the training's]")] = None,
        costs: Annotated[str | None, typer.Option(help="Predict step times from the costs in this run folder.")] = None,
        settings: Set = None,
        engine: EngineName = None,
        resume: Annotated[
            bool, typer.Option("--resume", help="Resume from the newest checkpoint in the folder.")
        ] = False,
        or_start: Annotated[
            bool, typer.Option("--resume-or-start", help="The same; start if there is no run.")
        ] = False,
        accept: Annotated[
            list[str] | None, typer.Option(help="'data': resume with corrected data. Repeatable.")
        ] = None,
        report: Names = None,
        metric: Metrics = None,
        imports: Import = False,
    ) -> None:
        """Run a training. TARGET is a Training, its file, or a function that returns one."""
        refuse_both(context, ("resume", "or_start"), ("steps", "epochs"))
        fields: dict[str, Any] = {"steps": steps, "epochs": epochs, "seed": seed, "costs": costs, "folder": folder}
        fields |= {"resume": "or-start" if or_start else resume or None, "accept": tuple(accept) if accept else None}
        changes = Changes.of(context, imports, engine, settings, **fields)
        train(out, target, changes, options_of(context), report or (), metric or ())


def options_of(context: typer.Context) -> list[str]:
    """The options of a command, such as ``--steps``."""
    return [option for parameter in context.command.params for option in parameter.opts if option.startswith("--")]


def refuse_both(context: typer.Context, *pairs: tuple[str, str]) -> None:
    """Refuse both options of a pair, by the names of their parameters."""
    named = {parameter.name: parameter.opts[0] for parameter in context.command.params}
    for first, second in pairs:
        if context.params[first] and context.params[second]:
            raise ParameterError(
                f"flowrl {context.info_name} got both {named[first]} and {named[second]}. Pass one of the two.",
                code="cli.bad-option",
                option=named[first],
            )


def train(
    out: Console, target: str, changes: Changes, options: Sequence[str], report: Sequence[str], metrics: Sequence[str]
) -> None:
    """Run a training with other settings."""
    from flowrl.report.names import reporter
    from flowrl.report.terminal import Terminal
    from flowrl.run.settings import resumed
    from flowrl.run.training.signals import Ended

    training, lines = changes.training(target, options)
    if training.resume:
        lines += resumed.changes(training, changes.settings, training.accept)
    for line in lines:
        out.print(line, markup=False)
    terminal = Terminal(out, metrics=metrics)
    trackers = [reporter(name, "--report") for name in report]
    try:
        result = training.run([terminal, *trackers])
    except (KeyboardInterrupt, Ended) as error:
        what, code = ended(error)
        advice = f"resume with: {_resuming(target, changes, str(terminal.folder), report, metrics)}"
        if terminal.folder is None:
            advice = "the run had not started."
        elif training.checkpoint_every is None and training.keep_best is None:
            advice = "it has no checkpoint. Pass Training(checkpoint_every=...) to resume such a run."
        complain(f"{what}; {advice}")
        raise typer.Exit(code) from None
    out.print(f"The run is in {result.folder}", markup=False)


def ended(error: BaseException) -> tuple[str, int]:
    """What ended a run, and the exit code: Ctrl-C, or a signal."""
    number = getattr(error, "number", None)
    return ("interrupted", INTERRUPTED) if number is None else (f"ended by {error}", 128 + number)


def _resuming(target: str, changes: Changes, folder: str, report: Sequence[str], metrics: Sequence[str]) -> str:
    """The command that resumes a run."""
    fields = {**changes.fields, "folder": folder}
    named = {name: fields[name] for name in ("steps", "epochs", "seed", "costs", "folder")}
    options = [f"--{name}={value}" for name, value in named.items() if value is not None]
    for name, values in {"accept": fields["accept"] or (), "report": report, "metric": metrics}.items():
        options += [f"--{name}={value}" for value in values]
    return shlex.join(["flowrl", "run", target, "--resume", *changes.words(), *options])
