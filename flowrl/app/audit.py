"""``flowrl audit``: the expected direction of a graph's update; and the table of all algorithms in the docs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from flowrl.app.targets import graph_of, load_target
from flowrl.errors import FlowrlError, ParameterError

if TYPE_CHECKING:
    from flowrl.auditing.record import Audit

AGE = 0.5
"""The policy's age in the last column of the table."""

_TARGET = "FILE.py:name, module:name, a .yaml or .json graph, or an algorithm from `flowrl list`."

_HEADINGS = ("method", "on-policy", "cause", "KL in the loss is closest to", "scale", "variance", f"at age {AGE:g}")


def add_to(app: typer.Typer, out: Console) -> None:
    """Add the command to a command line that prints to `out`."""

    @app.command()
    def audit(
        target: Annotated[str | None, typer.Argument(metavar="TARGET", help=_TARGET, show_default=False)] = None,
        tokens: Annotated[int | None, typer.Option(help="Vocabulary size without the end token. [default: 1]")] = None,
        steps: Annotated[int | None, typer.Option(help="Longest response, in tokens. [default: 3]")] = None,
        prompts: Annotated[int | None, typer.Option(help="Prompts per step. [default: 2]")] = None,
        age: Annotated[float | None, typer.Option(help="Change in logits since sampling (std). [default: 0]")] = None,
        mismatch: Annotated[float | None, typer.Option(help="Engine minus trainer logits (std). [default: 0]")] = None,
        right_or_wrong: Annotated[bool, typer.Option("--right-or-wrong", help="Use rewards of 0 and 1 only.")] = False,
        seed: Annotated[int | None, typer.Option(help="Random seed of the task. [default: 0]")] = None,
        n: Annotated[int | None, typer.Option(help="Responses per prompt. [default: the graph's]")] = None,
        role: Annotated[str | None, typer.Option(help="Role to audit if several policies are trained.")] = None,
        critic: Annotated[str, typer.Option(help="Values of critics: exact or zero.")] = "exact",
        limit: Annotated[int, typer.Option(help="Most possible runs to enumerate; sample if there are more.")] = 3000,
        samples: Annotated[int, typer.Option(help="Number of sampled runs.")] = 1000,
        every: Annotated[bool, typer.Option("--all", help="Audit all built-in algorithms; print a table.")] = False,
        imports: Annotated[bool, typer.Option("--import", help="Import the code that the graph names.")] = False,
    ) -> None:
        """Compare the expected update of a graph with the gradient of its objective."""
        from flowrl.auditing.audit import audit
        from flowrl.auditing.task import AuditTask

        if every == (target is not None):
            raise ParameterError(
                "flowrl audit got both or neither of a graph and --all (all built-in algorithms). Pass one of the two.",
                code="cli.bad-option",
                option="--all",
            )
        if target is None:
            for line in table():
                out.print(line, markup=False)
            return
        given: dict[str, Any] = {"tokens": tokens, "steps": steps, "prompts": prompts, "age": age, "seed": seed}
        given |= {"mismatch": mismatch, "right_or_wrong": right_or_wrong or None}
        task = AuditTask(**{name: value for name, value in given.items() if value is not None})
        graph = graph_of(load_target(target, imports), target)
        found = audit(graph, task, n=n, role=role, critic=critic, limit=limit, samples=samples)
        out.print(found, soft_wrap=False)


def table() -> Iterator[str]:
    """The table of all algorithms in Markdown, line by line as it is computed."""
    from flowrl.app.algorithms import names

    yield f"| {' | '.join(_HEADINGS)} |"
    yield f"|{'---|' * len(_HEADINGS)}"
    for name in names():
        yield row(name)


def row(name: str) -> str:
    """The line of one algorithm: exact with one prompt and three responses if possible, else sampled."""
    from flowrl.app import algorithms
    from flowrl.auditing.audit import audit
    from flowrl.auditing.task import AuditTask

    try:
        graph = algorithms.graph(name)
        try:
            found, n = audit(graph, AuditTask(prompts=1), n=3, samples=400), 3
        except FlowrlError:
            found, n = audit(graph, AuditTask(prompts=1), samples=400), None
        aged = audit(graph, AuditTask(prompts=1, age=AGE), n=n, samples=400, explain=False)
    except FlowrlError as error:
        return f"| `{name}` | cannot be audited: {error.message.partition(';')[0].splitlines()[0]} | | | | | |"
    cells = (_bias(found), _cause(found), _kl(found), str(found.whole.scale), _variance(found), _bias(aged))
    return f"| `{name}` | {' | '.join(cells)} |"


def _bias(found: Audit) -> str:
    from flowrl.auditing.gradient_error import percent

    loss = found.parts["loss"]
    return percent(loss.bias) if loss.biased and not loss.against else str(loss)


def _cause(found: Audit) -> str:
    from flowrl.auditing.gradient_error import EXACT, percent

    if not found.causes:
        return "none of these" if found.parts["loss"].biased else ""
    best = min(found.causes, key=lambda cause: cause.bias.value)
    return best.name if best.bias.high < EXACT else f"{best.name} (leaves {percent(best.bias)})"


def _kl(found: Audit) -> str:
    if not found.kl_follows:
        return ""
    nearest = max(found.kl_follows, key=lambda name: found.kl_follows[name].value)
    cell = f"{nearest} (cosine {found.kl_follows[nearest]})"
    return cell.replace("||", "\\|\\|")  # a bar would end the cell


def _variance(found: Audit) -> str:
    return "" if found.variance is None else f"{found.variance:.2f}"
