"""`Audit`: the result, as a record and as text."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from torch import Tensor

from flowrl.auditing.gradient_error import EXACT, GradientComparison, Interval, percent
from flowrl.auditing.task import AuditTask


@dataclass(frozen=True)
class Cause:
    """A cause of a bias.

    Args:
        name: ``"length"``, ``"group spread"``, ``"off-policy age"``, ``"engine mismatch"``, ``"clip"``,
            ``"selection"`` or ``"distance to the reference"``; several of them, joined by ``" and "``, if together they
            leave the least bias; or ``"unstated 0.5 · KL(actor || ref)"``, KL that the objective does not state.
        bias: the remaining bias without it.
    """

    name: str
    bias: Interval


@dataclass(frozen=True, eq=False)
class Audit:
    """The expected update of a graph, compared with its stated objective.

    Args:
        graph: its name.
        objective: the stated objective.
        task: of the audit.
        exact: whether all possible runs were summed; otherwise `runs` were sampled, and numbers have intervals.
        runs: their number.
        rows: of the update, in a run.
        expected: float64 ``[prompts states tokens]``, the expected gradient of what the update maximizes.
        true: the gradient of the objective, of the same shape.
        whole: the comparison of these two.
        parts: the same for each part of the update: ``"loss"`` (with KL in the reward), ``"kl"`` and ``"entropy"``.
        kl_follows: the cosines of a KL term in the loss with possible targets, by name; empty without one.
        causes: of the bias of the loss, each with the remaining bias without it, which is at least 10 % smaller; empty
            if there is no bias, or none explains it.
        lengthens: the cosine of that bias with the gradient of the expected length: above 0 it lengthens responses.
        variance: of the update, at the scale of the true gradient, in units of the variance of plain REINFORCE from as
            many rows; None if the update follows nothing.
        notes: changes that fit the graph to the task, uncertainties, and what this audit cannot show.
    """

    graph: str
    objective: str
    task: AuditTask
    exact: bool
    runs: int
    rows: int
    expected: Tensor
    true: Tensor
    whole: GradientComparison
    parts: Mapping[str, GradientComparison]
    kl_follows: Mapping[str, Interval]
    causes: tuple[Cause, ...]
    lengthens: float | None
    variance: float | None
    notes: tuple[str, ...]

    @property
    def biased(self) -> bool:
        """Whether the update points elsewhere with certainty, or follows nothing."""
        return self.whole.biased or self.whole.follows_nothing

    def __rich__(self) -> RenderableType:
        how = f"all {self.runs:,} runs" if self.exact else f"{self.runs:,} sampled runs, intervals of 95 %"
        head = Text.assemble((self.graph, "bold"), f" · {self.objective}\n{how}, {self.rows} rows each: ")
        head.append(str(self.whole), "bold red" if self.biased else "bold green")
        table = Table("", "bias", "cosine", "scale", "error", box=None, pad_edge=False, padding=(0, 3, 0, 0))
        judged = {"update": self.whole, **(self.parts if len(self.parts) > 1 else {})}
        for name, one in judged.items():
            table.add_row(name, *(str(x) for x in (one.bias, one.cosine, one.scale, one.error)))
        below = [Padding(table, (0, 2))]
        return Group(head, *below, *(Padding(Text(line), (0, 2)) for line in self._lines()))

    def _lines(self) -> list[str]:
        found = []
        if self.variance is not None:
            found.append(f"variance: {self.variance:.3g} times that of plain REINFORCE from as many rows")
        if self.lengthens is not None:
            own = percent(self.parts["loss"].bias)
            remaining = ", ".join(f"{percent(one.bias)} without {one.name}" for one in self.causes)
            found.append(f"remaining bias of the loss, of {own}: {remaining or own + ' without any possible cause'}")
        if self.lengthens is not None and abs(self.lengthens) > 0.1:
            way = "longer" if self.lengthens > 0 else "shorter"
            found.append(
                f"this bias makes responses {way} (cosine with the gradient of the length: {self.lengthens:.2f})"
            )
        if self.kl_follows:
            cosines = ", ".join(f"{name} {cosine}" for name, cosine in self.kl_follows.items())
            found.append(f"KL in the loss {_follows(self.parts['kl'], self.kl_follows)}; cosines: {cosines}")
        return [*found, *(f"note: {note}" for note in self.notes)]

    def __str__(self) -> str:
        written = io.StringIO()
        Console(file=written, width=120).print(self)
        return "\n".join(line.rstrip() for line in written.getvalue().splitlines())


def _follows(kl: GradientComparison, cosines: Mapping[str, Interval]) -> str:
    """The target that a KL term follows, if any."""
    if kl.follows_nothing:
        return "follows nothing"
    exact = [name for name, cosine in cosines.items() if cosine.high > 1 - EXACT]
    return f"follows {exact[0]}" if exact else "follows none of these"
