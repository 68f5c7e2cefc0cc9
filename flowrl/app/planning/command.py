"""``flowrl plan``: the order of nodes and their places, predicted step times, and the memory of each slot."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console

from flowrl.app.changes.changes import Set, load_changed
from flowrl.app.targets import graph_of
from flowrl.errors import ParameterError, offer

_NAMES_A_GRAPH = "FILE.py:name, module:name, a .yaml or .json file, or an algorithm from `flowrl list`."

_Hardware = Annotated[
    str | None,
    typer.Option(help="Predict the memory of each slot: 'H100', ... or 'Hardware(memory=24)', in GiB."),
]
_Lengths = Annotated[
    str | None,
    typer.Option(help="prompt=N,response=N (or max=N for both): the most tokens; mean=N: predict times, too."),
]
_Search = Annotated[
    bool, typer.Option("--search", help="Rank places, meshes, engines and lags by predicted step time.")
]
_Gpus = Annotated[list[int] | None, typer.Option(help="Slots for --search. Repeatable. [default: the place's]", min=1)]


def add_to(app: typer.Typer, out: Console) -> None:
    """Add the command to `app`; it prints to `out`."""

    @app.command()
    def plan(
        target: Annotated[str, typer.Argument(metavar="TARGET", help=_NAMES_A_GRAPH, show_default=False)],
        costs: Annotated[
            str | None, typer.Option(help="Predict step times from the costs that this run folder recorded.")
        ] = None,
        place: Annotated[
            list[str] | None,
            typer.Option(help="Also predict for 'local', 'Colocate(gpus=2)', ... Repeatable."),
        ] = None,
        prompts: Annotated[int | None, typer.Option(help="Prompts per step. [default: the training's]", min=1)] = None,
        cost: Annotated[
            list[str] | None, typer.Option(help="NODE=SECONDS for a node without a recorded cost. Repeatable.")
        ] = None,
        machine: Annotated[
            list[str] | None,
            typer.Option(help="Runs of one job here, in one process and elsewhere: what places cost. Repeatable."),
        ] = None,
        hardware: _Hardware = None,
        lengths: _Lengths = None,
        search: _Search = False,
        gpus: _Gpus = None,
        settings: Set = None,
        imports: Annotated[
            bool,
            typer.Option("--import", help="Import (execute) the code that a .yaml or .json graph or a run names."),
        ] = False,
    ) -> None:
        """Print how a graph runs: order, parallel nodes, placement and inputs; with --costs, predicted step times; with
        --hardware, the predicted memory of each slot and, with --lengths mean=, seconds by stage; or, with --search,
        the places that are predicted to be the fastest."""
        if costs is None and (place or cost or (prompts and hardware is None)):
            needs = "predictions. Pass the run with the costs: --costs RUN."
            raise _alone("--place, --prompts and --cost", needs, "--costs")
        _refuse_lone_machine(costs, machine or ())
        if lengths is not None and hardware is None:
            raise _alone("--lengths", "the prediction of memory. Pass the hardware: --hardware H100.", "--hardware")
        if gpus and not search:
            raise _alone("--gpus", "the ranking of places. Pass --search.", "--search")
        found = load_changed(target, imports, settings)
        given = dict(map(_cost, cost or ()))
        measured = None if costs is None else _measured(costs, given, imports, machine or ())
        sized = None if hardware is None else _sized(found, target, hardware, lengths, prompts)
        if search:
            lines = _searched(found, target, gpus or (), sized, prompts, measured)
        else:
            lines = _planned(found, target, prompts)
            if costs is not None:
                lines += _times(found, target, costs, measured, place or (), prompts, given)
            if sized is not None:
                lines += _described(sized, target, measured)
        out.print("\n".join(lines), markup=False)


def _searched(
    found: Any, target: str, gpus: Sequence[int], sized: Any, prompts: int | None, measured: Any
) -> list[str]:
    """The ranking of a search."""
    from flowrl.app.planning.searching import searched

    job = _job(found, target, "--search") if sized is None else sized.job
    return searched(job, gpus, sized, prompts or getattr(found, "prompts", None), measured)


def _refuse_lone_machine(costs: str | None, machine: Sequence[str]) -> None:
    if machine and (costs is None or len(machine) == 1):
        raise ParameterError(
            "--machine needs --costs RUN, and two or more runs: one in one process, and others of the same job at "
            "other places: --costs RUN --machine runs/alone --machine runs/split.",
            code="cli.bad-option",
            option="--machine",
            found=len(machine),
        )


def _alone(options: str, what: str, missing: str) -> ParameterError:
    """The error of options that only apply with a `missing` one; `what` says to what, and how to fix it."""
    applies = "apply" if " and " in options else "applies"
    return ParameterError(f"{options} only {applies} to {what}", code="cli.bad-option", missing=missing)


def _planned(found: Any, target: str, prompts: int | None) -> list[str]:
    from flowrl.core.graphs.plan import Plan
    from flowrl.run.training.job import Job
    from flowrl.run.training.training import Training

    job = found.job if isinstance(found, Training) else found
    count = prompts or (found.prompts if isinstance(found, Training) else None)
    return [job.plan(count) if isinstance(job, Job) else str(Plan(graph_of(found, target)))]


def _times(
    found: Any,
    target: str,
    costs: str,
    measured: Any,
    places: Sequence[str],
    prompts: int | None,
    given: Mapping[str, float],
) -> list[str]:
    """Predicted step times, for the own place and the given ones."""
    from flowrl.run.prediction.prediction import predict
    from flowrl.run.training.job import Job
    from flowrl.run.training.training import Training

    job = found.job if isinstance(found, Training) else found
    graph = graph_of(found, target)
    if odd := [node for node in given if node not in graph.nodes]:
        raise ParameterError(
            f"--cost {odd[0]}=... names no node of {graph.name}; {offer(odd[0], graph.nodes)}",
            code="cli.bad-option",
            option="--cost",
            found=odd[0],
        )
    own = job.place if isinstance(job, Job) else measured.place
    count = prompts or (found.prompts if isinstance(found, Training) else measured.prompts)
    optimize = not isinstance(job, Job) or job.optimize
    every = [own, *(None if text == "local" else _place(text) for text in places)]
    predicted = (str(predict(graph, one, count, measured, optimize=optimize)) for one in every)
    return [f"predicted from {costs}, with {count} prompts per step:", *predicted]


def _measured(costs: str, given: Mapping[str, float], imports: bool, machine: Sequence[str]) -> Any:
    """The costs of a run, with those that are given, on the machine of other runs."""
    from flowrl.run.prediction.costs import Costs
    from flowrl.run.prediction.measured.machine import Machine

    found = Costs.of(costs, imports=imports).given(**given)
    return found.on(Machine.of(*machine)) if machine else found


def _job(found: Any, target: str, option: str) -> Any:
    """The job of a target."""
    from flowrl.run.training.job import Job
    from flowrl.run.training.training import Training

    job = found.job if isinstance(found, Training) else found
    if not isinstance(job, Job):
        raise ParameterError(
            f"{option} needs a job or a training, whose backends say what they load, and {target} is a graph. Bind "
            f"it: graph.bind(actor=TorchTrainer('model'), ...).",
            code="cli.bad-option",
            option=option,
            found=target,
        )
    return job


def _sized(found: Any, target: str, hardware: str, lengths: str | None, prompts: int | None) -> Any:
    """The job of a target on hardware, with the lengths of its rows."""
    from flowrl.app.planning.searching import Sized
    from flowrl.data.sources.source import Source
    from flowrl.hub.repositories import Commits
    from flowrl.run.prediction.memory import limits_of

    job, device = _job(found, target, "--hardware"), _hardware(hardware)
    data = getattr(found, "data", ())
    sources = (data,) if isinstance(data, Source) else tuple(dict(data).values())
    given = {} if lengths is None else _lengths(lengths)
    limits = limits_of(job.graph, sources, given)
    count = prompts or getattr(found, "prompts", None)
    return Sized(job.pinned(Commits()), device, limits, given.get("mean"), count)


def _described(sized: Any, target: str, measured: Any) -> list[str]:
    """The predicted memory of each slot, the cheapest change that fits, and with mean lengths the times of stages."""
    from flowrl.app.planning.memory_table import described
    from flowrl.app.planning.time_table import timed
    from flowrl.run.prediction.fitting import cheapest
    from flowrl.run.prediction.stages import times_of

    times = None
    if sized.mean is not None:
        if sized.prompts is None:
            raise ParameterError(
                f"--lengths mean={sized.mean} predicts the times of a step, and {target} does not say how many "
                f"prompts it has. Pass them: --prompts 128.",
                code="cli.bad-option",
                missing="--prompts",
            )
        times = times_of(sized.job, sized.hardware, sized.limits, sized.mean, sized.prompts, measured)
    memory = sized.memory(sized.job)
    lines = described(memory, None if memory.fits else cheapest(sized.job, memory, sized.memory))
    return lines if times is None else [*lines, *timed(times, sized.hardware)]


def _hardware(text: str) -> Any:
    """The hardware of a name, or of a Python expression."""
    from flowrl.run.prediction.hardware import Hardware, hardware_of

    if "(" not in text:
        return hardware_of(text)
    return _call(text, {"Hardware": Hardware}, "--hardware", "hardware", "H100, or such as 'Hardware(memory=24)'")


def _lengths(text: str) -> Mapping[str, int]:
    """The numbers of ``prompt=N,response=N`` or ``mean=N,max=N``."""
    try:
        found = {name: int(tokens) for name, _, tokens in (part.partition("=") for part in text.split(","))}
        odd = not found.keys() <= {"prompt", "response", "mean", "max"} or {"response", "max"} <= found.keys()
        if odd or min(found.values()) < 0:
            raise ValueError(text)
    except ValueError:
        raise ParameterError(
            f"--lengths {text} has no numbers of tokens; expected such as --lengths prompt=512,response=1024 or "
            f"--lengths mean=600,max=1536.",
            code="cli.bad-option",
            option="--lengths",
            found=text,
        ) from None
    return found


def _cost(text: str) -> tuple[str, float]:
    """Node and seconds of ``NODE=SECONDS``."""
    node, _, seconds = text.partition("=")
    try:
        return node, float(seconds)
    except ValueError:
        raise ParameterError(
            f"--cost {text} has no number of seconds; expected such as --cost {node}=0.1.",
            code="cli.bad-option",
            option="--cost",
            found=text,
        ) from None


def _place(text: str) -> Any:
    """The place of a Python expression."""
    from flowrl import Colocate, Split

    places = {place.__name__: place for place in (Colocate, Split)}
    return _call(text, places, "--place", "a place", "local, or such as 'Colocate(gpus=2)' or 'Split(train=1)'")


def _call(text: str, classes: Mapping[str, Any], option: str, what: str, expected: str) -> Any:
    """The object of a Python expression that calls one of these classes with literals."""
    from flowrl.data.files import unique

    try:
        call = ast.parse(text.strip(), mode="eval").body
        match call:
            case ast.Call(func=ast.Name(id=name), args=[]) if name in classes:
                given = unique((one.arg or "**", ast.literal_eval(one.value)) for one in call.keywords)
            case _:
                raise ValueError(text)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ParameterError(
            f"{option} {text} is not {what}; expected {expected}.",
            code="cli.bad-option",
            option=option,
            found=text,
        ) from None
    return classes[name](**given)
