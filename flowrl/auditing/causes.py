"""The causes of a bias: possible ones, and the bias that remains without each.

- Length: forced tokens extend ended responses until all are equally long.
- Group spread: each prompt's gradient is multiplied by the standard deviation of its responses' rewards.
- Off-policy age, and the mismatch of the engine: set to 0.
- Clip: clips and bounds on ratios are too wide to have an effect; on-policy they have none.
- Selection: gates let all rows pass.
- Distance to the reference: frozen policies are equal to the policy, so KL is 0 and ratios to them are 1.
- Unstated KL: added to the objective with the weight that fits the update best; a cause if no bias remains.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowrl.auditing.gradient_error import EXACT, Interval, compare_gradients
from flowrl.auditing.objective import StatedObjective, behind_gates, without_gates
from flowrl.auditing.record import Cause
from flowrl.auditing.task import AuditTask
from flowrl.auditing.trial import Runs, Trial
from flowrl.auditing.truth import gradient
from flowrl.core.graphs.gate import Gate
from flowrl.core.graphs.graph import Graph
from flowrl.edits.edit import edit
from flowrl.errors import AuditError
from flowrl.operators import RolloutCorrection
from flowrl.spec import parameters

_WIDE = 1e6
_WIDEST = {
    "clip_low": 1 - 1e-9,
    "clip_high": _WIDE,
    "clip": 19.0,
    "dual_clip": None,
    "within": _WIDE,
    "within_high": None,
}
"""The clip parameters of losses, and values without effect."""

_EXPLAINS = 0.9
"""A cause leaves less than this share of the bias."""


@dataclass(frozen=True)
class Without:
    """An audit without a cause.

    Args:
        by_spread: whether each prompt's gradient is multiplied by the spread of its rewards.
    """

    name: str
    task: Callable[[AuditTask], AuditTask] = lambda task: task
    graph: Callable[[Graph], Graph] = lambda graph: graph
    by_spread: bool = False


def possible(graph: Graph, stated: StatedObjective, task: AuditTask, frozen: Set[str]) -> Iterator[Without]:
    """The possible causes of a bias of this graph, with some frozen policies, in this task."""
    if task.ends and task.steps > 1:
        yield Without("length", task=lambda task: dataclasses.replace(task, even=True))
    yield Without("group spread", by_spread=True)
    if task.age:
        yield Without("off-policy age", task=lambda task: dataclasses.replace(task, age=0.0))
    if task.mismatch:
        yield Without("engine mismatch", task=lambda task: dataclasses.replace(task, mismatch=0.0))
    if (task.age or task.mismatch) and unclipped(graph) is not graph:
        yield Without("clip", graph=unclipped)
    if any(isinstance(node.operator, Gate) for node in graph.nodes.values()):
        scores = [edge.node for edge in stated.scores]
        yield Without("selection", graph=lambda graph: without_gates(graph, (*graph.sinks, *scores)))
    if task.reference and _reads(graph, frozen):
        yield Without("distance to the reference", task=lambda task: dataclasses.replace(task, reference=0.0))


def unclipped(graph: Graph) -> Graph:
    """The graph without clips and bounds; itself if it has none."""
    changed: dict[str, Any] = {}
    for node in graph.nodes.values():
        loss = getattr(node.initial_operator, "loss", None)
        for name in parameters(loss) if loss is not None else ():
            if name in _WIDEST:
                changed[f"{node.name}.loss.{name}"] = _WIDEST[name]
        if isinstance(node.initial_operator, RolloutCorrection):
            changed[f"{node.name}.high"] = _WIDE
            if node.initial_operator.low is not None:
                changed[f"{node.name}.low"] = 1 / _WIDE
    return edit(graph, set=changed) if changed else graph


def _reads(graph: Graph, frozen: Set[str]) -> bool:
    """Whether anything reads what a frozen policy computes, except KL terms of losses, which are judged separately."""
    for node in graph.nodes.values():
        for field, edge in node.inputs.items():
            computed = frozen & {use.role for use in graph[behind_gates(graph, edge).node].uses}
            loss = getattr(node.operator, "loss", None)
            of_kl = field.name == "ref_log_prob" and loss is not None and field.name not in loss.signature.ports
            if computed and not of_kl and not isinstance(node.operator, Gate):
                return True
    return False


class Explanation:
    """Finds the causes of the bias of a loss.

    Args:
        trial: the audit itself, and its `runs`.
        audited: runs a graph in a task, as the audit does.
        radius: bounds the error of the mean of some gradients, one for each run.
    """

    def __init__(
        self,
        trial: Trial,
        runs: Runs,
        audited: Callable[[Graph, AuditTask], tuple[Trial, Runs]],
        radius: Callable[[Runs, Tensor], float],
    ) -> None:
        self._trial, self._runs, self._audited, self._radius = trial, runs, audited, radius
        self.notes: list[str] = []

    def causes(self) -> tuple[Cause, ...]:
        """The causes that leave less of the bias alone, and several together if they leave the least."""
        trial = self._trial
        own = self._bias(trial, self._runs, self._runs.parts["loss"]).value
        candidates = possible(trial.graph, trial.stated, trial.task, trial.truth.references.keys())
        tried = {one: self._remaining([one]) for one in candidates}
        found = {one: bias for one, bias in tried.items() if bias is not None}
        helping = {one: bias for one, bias in found.items() if bias.value < _EXPLAINS * own}
        causes = [Cause(one.name, bias) for one, bias in helping.items()]
        causes += [Cause(name, bias) for name, bias in self._unstated_kl()]
        together = [tuple(some) for some in (helping, found) if len(some) > 1]  # biases may cancel
        several = {some: bias for some in together if (bias := self._remaining(some)) is not None}
        best = min(several, key=lambda some: several[some].value, default=())
        if best and several[best].value < _EXPLAINS * min([own, *(cause.bias.value for cause in causes)]):
            names, bias = self._needed(best, several[best])
            causes.append(Cause(names, bias))
        return tuple(causes)

    def _needed(self, together: tuple[Without, ...], bias: Interval) -> tuple[str, Interval]:
        """Those of several causes without which more bias would remain, and what remains without them."""
        for one in together:
            fewer = tuple(other for other in together if other is not one)
            remaining = self._remaining(fewer) if len(fewer) > 1 else None
            if remaining is not None and remaining.value <= max(bias.value / _EXPLAINS, EXACT):
                together, bias = fewer, remaining
        return " and ".join(one.name for one in together), bias

    def _bias(self, trial: Trial, runs: Runs, each: Tensor) -> Interval:
        true = gradient(trial.truth.parts(trial.now)["loss"], trial.now)
        return compare_gradients(runs.mean(each), true, self._radius(runs, each)).bias

    def _remaining(self, without: Sequence[Without]) -> Interval | None:
        """The bias without some causes; None, and a note, if the graph cannot run without them."""
        task, graph = self._trial.task, self._trial.graph
        for one in without:
            task, graph = one.task(task), one.graph(graph)
        try:
            trial, runs = self._audited(graph, task)
        except AuditError as error:
            names, why = " and ".join(one.name for one in without), error.message.partition("\n")[0]
            self.notes.append(f"Whether {names} is a cause is unknown: {why}")
            return None
        each = runs.parts["loss"]
        if any(one.by_spread for one in without):
            each = each * runs.spread[..., None, None]
        return self._bias(trial, runs, each)

    def _unstated_kl(self) -> Iterator[tuple[str, Interval]]:
        """A divergence from a frozen policy which, added to the objective, leaves no bias: its weight and name."""
        trial, each = self._trial, self._runs.parts["loss"]
        true, mean = gradient(trial.truth.parts(trial.now)["loss"], trial.now), self._runs.mean(each)
        responses = trial.task.responses
        if trial.task.prompts * responses.number * (trial.task.vocabulary - 1) < 3:
            return  # two directions fit any update
        for role in trial.truth.references:
            for name, divergence in trial.truth.divergences(role).items():
                towards = -gradient(divergence, trial.now)
                directions = torch.stack([true.flatten(), towards.flatten()], 1)
                along, of_kl = torch.linalg.lstsq(directions, mean.flatten()).solution.tolist()
                if along <= 0 or abs(weight := of_kl / along) < EXACT:
                    continue
                judged = compare_gradients(mean, true + weight * towards, self._radius(self._runs, each))
                if not judged.biased:
                    yield f"unstated {weight:.3g} · {name}", judged.bias
                    return
