"""The command line: ``flowrl show | check | diff | run | demo``.

A target is ``FILE.py:name`` or ``package.module:name``: a graph, a job, a training, or an algorithm that needs no
arguments; graph files (``.yaml``, ``.json``) are targets too. Misuse is answered in one paragraph; ``--debug`` shows
the traceback.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from flowrl.errors import FlowrlError, GraphError, ParameterError

app = typer.Typer(
    help="Reinforcement learning of language models as a graph of typed operators.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
out = Console(soft_wrap=True, highlight=False)

Target = Annotated[str, typer.Argument(metavar="TARGET", help="FILE.py:name, module:name, or a graph in .yaml or .json")]


@app.callback()
def options(debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False) -> None:
    """Options of every command; `main` reads ``--debug`` itself."""


@app.command()
def show(
    target: Target,
    to: Annotated[Path | None, typer.Option(help="Write to .md, .html, .svg, .json or .yaml instead.")] = None,
) -> None:
    """Print a graph as Mermaid, or write it to a file."""
    graph = _graph(target)
    if to is None:
        out.print(graph.mermaid(), markup=False)
        return
    _write(graph, to)
    out.print(f"{graph.name}: {len(graph.nodes)} nodes, written to {to}")


@app.command()
def check(
    target: Target,
    prompts: Annotated[int | None, typer.Option(help="Prompts a step, to check that mini-batches divide.")] = None,
) -> None:
    """Check a graph against all rules; exits with 1 where one is broken."""
    found = _load(target)
    graph, prompts = _as_graph(found, target), prompts or getattr(found, "prompts", None)
    findings = graph.check(prompts=prompts)
    for finding in findings:
        out.print(str(finding), markup=False)
    if findings:
        raise typer.Exit(1)
    out.print(f"{graph.name}: {len(graph.nodes)} nodes, every connection fits and no rule is broken.")


@app.command()
def diff(
    before: Target,
    after: Target,
    to: Annotated[Path | None, typer.Option(help="Write to .md, .html or .svg instead.")] = None,
) -> None:
    """Tell what changes from one graph to another."""
    difference = _graph(before).diff(_graph(after))
    if to is None:
        out.print(str(difference), markup=False)
    else:
        _write(difference, to)
        out.print(f"{difference.before.name} -> {difference.after.name}, written to {to}")


@app.command()
def run(
    target: Target,
    steps: Annotated[int | None, typer.Option(help="Instead of the training's own.")] = None,
    seed: Annotated[int | None, typer.Option(help="Instead of the training's own.")] = None,
    folder: Annotated[str | None, typer.Option(help="Where the run is written.")] = None,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Log to TensorBoard in the run's folder.")] = False,
) -> None:
    """Train: TARGET names a Training."""
    from flowrl.report import TensorBoard, Terminal
    from flowrl.training import Training

    training = _load(target)
    if callable(training) and not isinstance(training, Training):
        training = _called(training, target)
    if not isinstance(training, Training):
        raise ParameterError(
            f"{target} is a {type(training).__name__}, which says what to compute but not on which data or how long; expected a "
            f"training: Training(graph.bind(...), data, steps=..., prompts=...)."
        )
    given = {"steps": steps, "seed": seed, "folder": folder}
    training = dataclasses.replace(training, **{k: v for k, v in given.items() if v is not None})  # type: ignore[type-var]
    _quiet()
    result = training.run([Terminal(out), *([TensorBoard()] if tensorboard else [])])
    out.print(f"The run is in {result.folder}")


@app.command()
def demo(
    steps: Annotated[int, typer.Option(help="Steps of each algorithm.")] = 100,
    seed: Annotated[int, typer.Option(help="Of warm start and training.")] = 0,
    folder: Annotated[Path, typer.Option(help="Where everything is written.")] = Path("runs/demo"),
) -> None:
    """Teach a small model to think, by GRPO and by PPO, on this machine's CPU."""
    from flowrl.demo.run import tell

    _quiet()
    tell(out, folder, steps, seed)


def main() -> None:
    """The console script."""
    debug = "--debug" in sys.argv
    try:
        app()
    except FlowrlError as error:
        if debug:
            raise
        Console(stderr=True, soft_wrap=True, highlight=False).print(f"flowrl: {error}", markup=False)
        sys.exit(2)


def _load(target: str) -> Any:
    """The object that a target names.

    Raises:
        GraphError: a graph file that cannot be read.
        ParameterError: a name that is not there, or a file that raises as it is imported.
    """
    from flowrl.functions import load_object
    from flowrl.serial import load

    if target.endswith((".yaml", ".yml", ".json")):
        return load(target)
    return load_object(target)


def _called(function: Any, target: str) -> Any:
    try:
        return function()
    except TypeError as error:
        raise GraphError(
            f"{target} cannot be called without arguments: {error}; name a graph instead, such as `graph = ppo(reward_fn)` in your "
            f"file and FILE.py:graph here."
        ) from error


def _as_graph(found: Any, target: str) -> Any:
    from flowrl.graph import Graph
    from flowrl.job import Job
    from flowrl.training import Training

    if callable(found) and not isinstance(found, Graph | Job | Training):
        found = _called(found, target)
    if isinstance(found, Training):
        found = found.job
    if isinstance(found, Job):
        found = found.graph
    if not isinstance(found, Graph):
        raise GraphError(f"{target} is a {type(found).__name__}; expected a graph, a job, a training or an algorithm.")
    return found


def _graph(target: str) -> Any:
    return _as_graph(_load(target), target)


def _write(drawn: Any, to: Path) -> None:
    """Write a graph or a diff in the form that the ending of `to` names."""
    from flowrl.graph import Graph
    from flowrl.html import page
    from flowrl.serial import save
    from flowrl.svg import svg

    to.parent.mkdir(parents=True, exist_ok=True)
    if to.suffix in (".json", ".yaml", ".yml") and isinstance(drawn, Graph):
        save(drawn, to)
    elif to.suffix in (".md", ".html", ".svg"):
        title = drawn.name if isinstance(drawn, Graph) else f"{drawn.before.name} to {drawn.after.name}"
        text = {
            ".md": lambda: f"# {title}\n\n```mermaid\n{drawn.mermaid()}\n```\n",
            ".html": lambda: page(drawn),
            ".svg": lambda: svg(drawn),
        }[to.suffix]()
        to.write_text(text, encoding="utf-8")
    else:
        raise ParameterError(f"--to {to} has the ending {to.suffix!r}; expected .md, .html, .svg, or for a graph .json or .yaml.")


def _quiet() -> None:
    """Loading bars of transformers would tear the progress display."""
    from transformers.utils import logging

    logging.disable_progress_bar()
