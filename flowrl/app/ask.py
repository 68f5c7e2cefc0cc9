"""``flowrl why`` and ``flowrl replay``: ask a recorded step where a number comes from, and recompute its nodes."""

from __future__ import annotations

import ast
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from flowrl.app.printing import printable
from flowrl.errors import FlowrlError, ParameterError, offer

Run = Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.", show_default=False)]
Import = Annotated[bool, typer.Option("--import", help="Import (execute) the code that the run names.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def add_to(app: typer.Typer, out: Console) -> None:
    """Add the commands to a command line that prints to `out`."""

    @app.command()
    def why(
        run: Run,
        address: Annotated[str, typer.Argument(metavar="ADDRESS", help="STEP/NODE.COLUMN[ROW]", show_default=False)],
        imports: Import = False,
        as_json: Json = False,
    ) -> None:
        """Show where a number of a recorded step comes from: every node with what it read and wrote for the row."""
        from flowrl.graph import open

        _print(out, [open(run, imports=imports).why(address)], as_json)

    @app.command()
    def replay(
        run: Run,
        step: Annotated[int | None, typer.Option(help="Step. [default: the newest recorded]", min=1)] = None,
        node: Annotated[str | None, typer.Option(help="Only this node.")] = None,
        set: Annotated[list[str] | None, typer.Option(help="What if: NODE.PARAMETER=VALUE. Repeatable.")] = None,
        replace: Annotated[list[str] | None, typer.Option(help="What if: NODE=Operator(...). Repeatable.")] = None,
        from_checkpoint: Annotated[
            bool, typer.Option("--from-checkpoint", help="Also nodes that read weights, from a checkpoint of the step.")
        ] = False,
        all_steps: Annotated[bool, typer.Option("--all", help="Every recorded step.")] = False,
        imports: Import = False,
        as_json: Json = False,
    ) -> None:
        """Recompute nodes of a recorded step and compare the bits, or show the effect of an edit.

        The exit code is 1 if a recomputed column differs from the recorded one.
        """
        from flowrl.graph import open

        opened = open(run, imports=imports)
        if all_steps and step is not None:
            raise ParameterError(
                "--all and --step exclude each other. Pass one of the two.", code="cli.bad-option", option="--all"
            )
        steps = opened.recorded_steps if all_steps else [step or max(opened.recorded_steps, default=1)]
        verbs = {"set": [*map(_parameter, set or ())], "replace": [*map(_operator, replace or ())]}
        edits: dict[str, Any] = {verb: dict(values) for verb, values in verbs.items() if values}
        place = "" if node is None else f"/{node}"
        results = [opened.replay(f"{number}{place}", from_checkpoint=from_checkpoint, **edits) for number in steps]
        if not results:
            opened.columns(1)  # raises
        _print(out, results, as_json)
        if not all(getattr(result, "same", True) or edits for result in results):
            raise typer.Exit(1)


def _print(out: Console, results: Sequence[Any], as_json: bool) -> None:
    """Print results as text, or as JSON: one object, or a list of several."""
    if as_json:
        from flowrl.run.training.run_folder import jsonable

        found = [jsonable(result.to_dict()) for result in results]
        out.print(json.dumps(found[0] if len(found) == 1 else found, indent=1), markup=False)
    for result in () if as_json else results:
        for line in str(result).split("\n"):
            out.print(printable(line), markup=False)


def _parameter(text: str) -> tuple[str, Any]:
    """Path and value of ``gae.lam=0.5``; a value that is no Python literal is text."""
    path, equals, value = text.partition("=")
    if not equals or "." not in path:
        raise ParameterError(
            f"--set {text} names no parameter of a node. Write NODE.PARAMETER=VALUE, such as --set gae.lam=0.5.",
            code="cli.bad-option",
            option="--set",
            found=text,
        )
    try:
        return path, ast.literal_eval(value)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return path, value


def _operator(text: str) -> tuple[str, Any]:
    """Node and operator of ``gae=GroupAdvantage(eps=1e-4)``."""
    node, _, call = text.partition("=")
    try:
        return node, _built(ast.parse(call.strip(), mode="eval").body)
    except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
        if isinstance(error, FlowrlError):
            raise
        raise ParameterError(
            f"--replace {text} is not NODE=Operator(...). Write the name of a node and a call of an operator of flowrl "
            f"with plain values, such as --replace 'group_advantage=RLOOAdvantage()'.",
            code="cli.bad-option",
            option="--replace",
            found=text,
        ) from None


def _built(expression: ast.expr) -> Any:
    """The value of a literal, or of a call of a class by its name with such values."""
    if not isinstance(expression, ast.Call):
        return ast.literal_eval(expression)
    from flowrl import operators

    name = getattr(expression.func, "id", "")
    if name not in operators.__all__:
        raise ParameterError(
            f"--replace names {name!r}, which is no operator or loss of flowrl; {offer(name, operators.__all__)}",
            code="cli.bad-option",
            option="--replace",
            found=name,
        )
    positional = [_built(one) for one in expression.args]
    return getattr(operators, name)(*positional, **{str(k.arg): _built(k.value) for k in expression.keywords})
