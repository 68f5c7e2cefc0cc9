"""``flowrl runs``, ``flowrl alarms``: the runs of a folder, and the alarms of a run."""

from __future__ import annotations

import dataclasses
import operator
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from flowrl.app.printing import number, print_json, print_table
from flowrl.errors import DataError, ParameterError, offer

NAMES = ("name", "status", "steps", "age", "reward", "held-out", "alarms", "s/step", "size")
_COMPARE = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "=": operator.eq}
_EVERY = 2.0
"""Seconds between two looks with ``--watch``."""


def add_to(app: typer.Typer, out: Console) -> None:
    """Add the commands to a command line that prints to `out`."""

    @app.command()
    def runs(
        folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder with runs in it.")] = Path("runs"),
        sort: Annotated[str, typer.Option(help=f"Sort by {', '.join(NAMES)}, or by a metric.")] = "age",
        where: Annotated[list[str] | None, typer.Option(help="Only runs with 'reward > 0.5'. Repeatable.")] = None,
        watch: Annotated[bool, typer.Option("--watch", help="Print it again every two seconds.")] = False,
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    ) -> None:
        """List runs: status, steps, age, reward, held-out score, alarms, seconds per step and size."""
        conditions = [_condition(text) for text in where or ()]
        while True:
            found = listed(folder, sort, conditions)
            if as_json:
                print_json(out, found)
            else:
                if watch and out.is_terminal:
                    out.clear()
                print_table(out, NAMES, ([_cell(name, run.get(name)) for name in NAMES] for run in found))
            if not watch:
                return
            time.sleep(_EVERY)

    @app.command()
    def alarms(
        run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.", show_default=False)],
        rules: Annotated[str | None, typer.Option(help="Judge the run by FILE.py:name, a tuple of rules.")] = None,
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    ) -> None:
        """Show the alarms of a run; with --rules, those that other rules would have fired."""
        from flowrl.look.alarms import judge_run
        from flowrl.look.run_files import open_files

        opened = open_files(run)
        found: Sequence[Mapping[str, Any]] = opened.alarms
        if rules is not None:
            found = [dataclasses.asdict(alarm) for alarm in judge_run(opened, _rules(rules))]
        if as_json:
            print_json(out, found)
            return
        of = "" if rules is None else f" by the rules of {rules}"
        out.print(f"{run}: {opened.status}, {len(opened.steps)} steps, {len(found)} alarms{of}", markup=False)
        for alarm in found:
            out.print(f"\nstep {alarm.get('step')}: {alarm.get('message')}", markup=False)
            out.print(f"  at {alarm.get('address')}, rule {alarm.get('rule')}", markup=False)
            if alarm.get("command"):
                out.print(f"  {alarm['command']}", markup=False)


def listed(folder: Path, sort: str = "age", conditions: Sequence[Any] = ()) -> list[dict[str, Any]]:
    """The runs in a folder, and in folders in it, as records with `NAMES`, ``path`` and the newest metrics."""
    if not folder.is_dir():
        raise DataError(f"{folder} is no folder. Pass one with runs in it.", code="look.no-run", path=folder)
    paths = [path.parent for path in sorted(folder.rglob("run.json"))]
    found = [record(path, folder) for path in paths]
    known = {*NAMES, *(name for one in found for name in one)}
    for name in (sort, *(condition[0] for condition in conditions)):
        if found and name not in known:
            raise ParameterError(
                f"The runs in {folder} have no {name!r}; {offer(name, sorted(known), 'they have')}",
                code="look.invalid-query",
                found=name,
            )
    for name, compare, value in conditions:
        found = [one for one in found if one.get(name) is not None and compare(one[name], value)]
    return sorted(found, key=lambda one: (one.get(sort) is None, one.get(sort)))


def record(path: Path, folder: Path) -> dict[str, Any]:
    """What is listed of a run; of a damaged one what can be read."""
    from flowrl.look.run_files import RunFiles

    run = RunFiles(path)
    found: dict[str, Any] = {"name": str(path.relative_to(folder)) if path != folder else path.name, "path": str(path)}
    found["size"] = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    found["status"] = run.status
    metrics, validations = run.metrics, run.validations
    newest = metrics.slice(len(metrics) - 1).to_pylist()[0] if len(metrics) else {}
    found |= {"steps": len(metrics), "alarms": len(run.alarms), "reward": newest.get("reward/mean")}
    described = {} if found["status"] == "damaged" else run.description
    if isinstance(began := described.get("started"), int | float):
        found["age"] = time.time() - began
    held_out = [name for name in validations.column_names if name.endswith("/reward/mean")]
    if held_out and (scores := validations[held_out[0]].drop_null().to_pylist()):
        found["held-out"] = scores[-1]
    if "timing/step" in metrics.column_names:
        seconds = sorted(metrics["timing/step"].to_pylist())
        found["s/step"] = seconds[len(seconds) // 2]
    return {**{name: value for name, value in newest.items() if name not in found}, **found}


def _condition(text: str) -> tuple[str, Any, float | str]:
    """Name, comparison and value of ``reward > 0.5``."""
    found = re.fullmatch(r"\s*(\S+?)\s*(<=|>=|<|>|==?)\s*(.+?)\s*", text)
    if found is None:
        raise ParameterError(
            f"--where {text!r} is no condition; expected such as 'reward > 0.5' or 'status = failed'.",
            code="cli.bad-option",
            option="--where",
            found=text,
        )
    value: float | str = found[3]
    try:
        value = float(found[3])
    except ValueError:
        value = found[3].strip("'\"")
    return found[1], _COMPARE["=" if found[2] == "==" else found[2]], value


def _rules(target: str) -> Sequence[Any]:
    """The rules of ``FILE.py:name``."""
    from flowrl.errors import type_of
    from flowrl.references import load_object
    from flowrl.run.alarms.rule import Check, Rule

    found = load_object(target)
    rules = [found] if isinstance(found, Rule) or callable(found) else found
    if not isinstance(rules, list | tuple) or not all(isinstance(one, Rule) or callable(one) for one in rules):
        raise ParameterError(
            f"--rules {target} is {type_of(found)}; expected a tuple of rules, such as (Above('kl/ref', 1.0),).",
            code="cli.wrong-target",
            target=target,
            found=type(found).__name__,
            expected="rules",
        )
    return [one if isinstance(one, Rule) else Check(one) for one in rules]


def _cell(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name == "age":
        return next(f"{value / unit:.0f}{sign}" for unit, sign in _AGES if value >= unit or unit == 1)
    if name == "size":
        return f"{value / 1e6:.1f} MB"
    return number(value)


_AGES = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
