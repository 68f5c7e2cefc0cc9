"""``flowrl run``: trains, and prints how to resume what was ended."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console

from flowrl.app.targets import load_target
from flowrl.errors import ParameterError, type_of

INTERRUPTED = 130
"""The exit code in shells of a process that Ctrl-C ended."""

Names = Annotated[list[str] | None, typer.Option(help="Report to wandb, mlflow, trackio or tensorboard. Repeatable.")]
Metrics = Annotated[list[str] | None, typer.Option(help="Show this metric in the terminal. Repeatable.")]


def complain(message: str) -> None:
    """Print a line on stderr."""
    Console(stderr=True, soft_wrap=True, highlight=False, emoji=False).print(f"flowrl: {message}", markup=False)


def add_to(app: typer.Typer, out: Console) -> None:
    """Add the command to a command line that prints to `out`."""

    @app.command()
    def run(
        target: Annotated[
            str,
            typer.Argument(
                metavar="TARGET",
                help="FILE.py:name, module:name, a .yaml or .json graph, or an algorithm from `flowrl list`.",
                show_default=False,
            ),
        ],
        steps: Annotated[int | None, typer.Option(help="Training steps. [default: the training's]")] = None,
        seed: Annotated[int | None, typer.Option(help="Random seed. [default: the training's]")] = None,
        folder: Annotated[str | None, typer.Option(help="Output folder. [default: the training's]")] = None,
        costs: Annotated[str | None, typer.Option(help="Predict step times from the costs in this run folder.")] = None,
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
    ) -> None:
        """Run a training. TARGET is a Training, or a function that returns one."""
        if resume and or_start:
            raise ParameterError(
                "flowrl run got both --resume and --resume-or-start. Pass one of the two.",
                code="cli.bad-option",
                option="--resume",
            )
        given: dict[str, Any] = {"steps": steps, "seed": seed, "costs": costs, "folder": folder}
        given |= {"resume": "or-start" if or_start else resume or None, "accept": tuple(accept) if accept else None}
        train(out, target, given, report or (), metric or ())


def train(out: Console, target: str, given: Mapping[str, Any], report: Sequence[str], metrics: Sequence[str]) -> None:
    """Run a training with other settings."""
    from flowrl.report.names import reporter
    from flowrl.report.terminal import Terminal
    from flowrl.run.training.signals import Ended
    from flowrl.run.training.training import Training

    training = load_target(target)
    if not isinstance(training, Training):
        raise ParameterError(
            f"{target} is {type_of(training)}, which has neither data nor a number of steps; expected a training: "
            f"Training(graph.bind(...), data, steps=..., prompts=...).",
            code="cli.wrong-target",
            target=target,
            found=type(training).__name__,
            expected="Training",
        )
    training = dataclasses.replace(training, **{k: v for k, v in given.items() if v is not None})
    terminal = Terminal(out, metrics=metrics)
    trackers = [reporter(name, "--report") for name in report]
    try:
        result = training.run([terminal, *trackers])
    except (KeyboardInterrupt, Ended) as error:
        what, code = (
            (f"ended by {error}", 128 + error.number) if isinstance(error, Ended) else ("interrupted", INTERRUPTED)
        )
        again = {**given, "folder": terminal.folder}
        options = [
            f"--{name}={again[name]}" for name in ("steps", "seed", "costs", "folder") if again[name] is not None
        ]
        options += [f"--report={name}" for name in report] + [f"--metric={key}" for key in metrics]
        advice = f"resume with: {shlex.join(['flowrl', 'run', target, '--resume', *options])}"
        if terminal.folder is None:
            advice = "the run had not started."
        elif training.checkpoint_every is None:
            advice = "it has no checkpoint. Pass Training(checkpoint_every=...) to resume such a run."
        complain(f"{what}; {advice}")
        raise typer.Exit(code) from None
    out.print(f"The run is in {result.folder}", markup=False)


def _resuming(target: str, given: Mapping[str, Any], report: Sequence[str], metrics: Sequence[str]) -> str:
    """The command that resumes a run."""
    options = [f"--{name}={given[name]}" for name in ("steps", "seed", "costs", "folder") if given[name] is not None]
    for name, values in {"accept": given["accept"] or (), "report": report, "metric": metrics}.items():
        options += [f"--{name}={value}" for value in values]
    return shlex.join(["flowrl", "run", target, "--resume", *options])
