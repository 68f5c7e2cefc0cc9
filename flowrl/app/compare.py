"""``flowrl blame``, ``flowrl compare``: the rows that make a number, and runs side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from flowrl.app.printing import excerpt, number, print_json, print_table, printable

if TYPE_CHECKING:
    from flowrl.look.comparing.comparison import Comparison

CURVES = ("reward/mean", "kl/ref", "response_length/mean", "actor/entropy", "actor/grad_norm")
"""Metrics that are compared if the runs have them."""


def add_to(app: typer.Typer, out: Console) -> None:
    """Add the commands to a command line that prints to `out`."""

    @app.command()
    def blame(
        run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.", show_default=False)],
        metric: Annotated[str, typer.Argument(metavar="METRIC", help="Such as kl/ref.", show_default=False)],
        step: Annotated[int | None, typer.Option(help="Step. [default: the newest]")] = None,
        against: Annotated[int | None, typer.Option(help="Shares of the change since this step.")] = None,
        count: Annotated[int, typer.Option(help="Most rows to show.", min=1)] = 20,
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    ) -> None:
        """Show the rows of a step by their share in a metric, or in its change."""
        from flowrl.look.run_files import open_files

        found = open_files(run).blame(metric, step, against)
        if as_json:
            print_json(out, {**vars(found), "rows": found.rows.to_pylist()})
            return
        out.print(str(found), markup=False)
        rows = found.rows.slice(0, count)
        names = [name for name in rows.column_names if rows[name].null_count < len(rows)]
        print_table(out, names, ([number(row[name]) for name in names] for row in rows.to_pylist()))

    @app.command()
    def compare(
        runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Run folders.", show_default=False)],
        x: Annotated[str, typer.Option(help="Axis of the curves in --json: step, rows, tokens, seconds.")] = "step",
        count: Annotated[int, typer.Option(help="Most prompts to show that changed sides.", min=0)] = 5,
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
        imports: Annotated[
            bool, typer.Option("--import", help="Import (execute) the code that the runs name.")
        ] = False,
    ) -> None:
        """Compare runs: parameters, curves, held-out responses, time and alarms. Seeds of one configuration count as
        one side."""
        from flowrl.errors import ParameterError, offer
        from flowrl.look.comparing.compare import compare
        from flowrl.look.comparing.comparison import AXES

        if x not in AXES:
            raise ParameterError(
                f"--x {x} is no axis; {offer(x, AXES, 'there are')}", code="cli.bad-option", option="--x", found=x
            )
        found = compare(runs, imports)
        if as_json:
            print_json(out, as_data(found, x))
        else:
            _print(out, found, count)


def as_data(found: Comparison, x: str = "step") -> dict[str, Any]:
    """A comparison as plain data."""
    held_out = found.held_out
    return {
        "basis": found.basis,
        "sides": {side.name: [str(run.path) for run in side.runs] for side in found.sides},
        "differences": found.differences,
        "graphs": None if found.graphs is None else str(found.graphs),
        "final": {metric: {side.name: side.final(metric) for side in found.sides} for metric in CURVES},
        "intervals": {metric: found.interval(metric) for metric in CURVES},
        "curves": {metric: found.curves(metric, x).to_pylist() for metric in CURVES},
        "held_out": None
        if held_out is None
        else {
            "validation": held_out.validation,
            "steps": held_out.steps,
            "better": held_out.better,
            "worse": held_out.worse,
            "equal": held_out.equal,
            "p": held_out.p,
            "alone": held_out.alone,
            "changed": [vars(pair) for pair in held_out.changed],
        },
        "seconds": {side.name: side.seconds() for side in found.sides},
        "alarms": {side.name: [alarm for run in side.runs for alarm in run.alarms] for side in found.sides},
    }


def _print(out: Console, found: Comparison, count: int) -> None:
    names = [side.name for side in found.sides]
    for side in found.sides:
        out.print(f"{side.name}: {', '.join(str(run.path) for run in side.runs)}", markup=False)
    out.print(f"Basis: {found.basis}.\n", markup=False)
    drawn = found.graphs is not None  # then the diff of the graphs shows nodes and wires
    values = {name: some for name, some in found.differences.items() if not (drawn and found.is_of_graph(name))}
    if values:
        print_table(out, ("parameter", *names), ([name, *map(_value, some)] for name, some in values.items()))
    if found.graphs is not None and str(found.graphs).strip():
        out.print(str(found.graphs), markup=False)
    finals = [(metric, [side.final(metric) for side in found.sides]) for metric in CURVES]
    rows = [[metric, *map(_band, values), _interval(found, metric)] for metric, values in finals if all(values)]
    print_table(out, ("final value", *names, "difference (95 %)"), rows)
    _print_held_out(out, found, count)
    seconds = [side.seconds() for side in found.sides]
    nodes = sorted(seconds[0], key=lambda node: -seconds[0][node])
    print_table(out, ("seconds", *names), ([node, *(number(one.get(node)) for one in seconds)] for node in nodes))
    for side in found.sides:
        alarms = [alarm for run in side.runs for alarm in run.alarms]
        for alarm in alarms:
            out.print(f"alarm in {side.name}, step {alarm.get('step')}: {alarm.get('message')}", markup=False)
        if not alarms:
            out.print(f"no alarm in {side.name}", markup=False)


def _print_held_out(out: Console, found: Comparison, count: int) -> None:
    paired = found.held_out
    if paired is None:
        out.print("No shared validation, so no held-out responses are compared.", markup=False)
        return
    first, second = (side.name for side in found.sides[:2])
    out.print(
        f"held-out {paired.validation}, {len(paired.pairs)} prompts ({first} after {paired.steps[0]} steps, {second} "
        f"after {paired.steps[1]}): {second} is better on {paired.better}, worse on {paired.worse}, equal on "
        f"{paired.equal}; sign test p = {paired.p:.3g}",
        markup=False,
    )
    if paired.alone:
        out.print(f"{paired.alone} prompts are in one side only and left out", markup=False)
    for pair in paired.changed[:count]:
        question = pair.prompt[-1].get("content") if isinstance(pair.prompt, list) and pair.prompt else pair.prompt
        out.print(
            f"  {printable(excerpt(str(question)))}  (right: {printable(excerpt(str(pair.ground_truth)))})",
            markup=False,
        )
        for name, score, response in zip((first, second), (pair.before, pair.after), pair.responses, strict=True):
            out.print(f"    {name} {score:.2f}: {printable(excerpt(response, 100))}", markup=False)


def _value(value: Any) -> str:
    return "-" if value is None else number(value)


def _band(values: list[float]) -> str:
    mean = sum(values) / len(values)
    return f"{mean:.4g}" if len(values) == 1 else f"{mean:.4g} ({min(values):.4g} to {max(values):.4g})"


def _interval(found: Comparison, metric: str) -> str:
    interval = found.interval(metric)
    return "" if interval is None else f"{interval[0]:+.4g} ({interval[1]:+.4g} to {interval[2]:+.4g})"
