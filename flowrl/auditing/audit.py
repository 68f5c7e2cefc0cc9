"""`audit`: the expected update of a graph, compared with the gradient of its stated objective."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from flowrl.auditing.causes import Explanation
from flowrl.auditing.fitting import fitted
from flowrl.auditing.gradient_error import GradientComparison, Interval, compare_gradients, radius_of
from flowrl.auditing.objective import stated
from flowrl.auditing.record import Audit
from flowrl.auditing.task import AuditTask
from flowrl.auditing.trial import Runs, Trial, Values
from flowrl.auditing.truth import gradient
from flowrl.core.graphs.graph import Graph, refuse_non_graph
from flowrl.core.operators.effects import Effect
from flowrl.errors import ParameterError


def audit(
    graph: Graph,
    task: AuditTask | None = None,
    *,
    n: int | None = None,
    role: str | None = None,
    critic: Values = "exact",
    limit: int = 3000,
    samples: int = 1000,
    explain: bool = True,
) -> Audit:
    """The expected update of `graph`, compared with the gradient of its stated objective.

    The graph's nodes and its loss run unchanged, on tabular engines; see `AuditTask`. The policy takes no step: an
    update of several mini-batches counts as the mean of their gradients, and ``AuditTask(age=...)`` sets how far the
    policy has moved by then.

    Args:
        graph: bound or not; bindings are ignored.
        task: the task; None is the default one, on-policy.
        n: responses per prompt, in place of the graph's own; fewer make an exact audit feasible.
        role: which of several trained policies.
        critic: the values of each critic: ``"exact"``, ``"zero"``, or ``{(prompt, prefix): value}``, where ``prefix``
            is the tuple of tokens so far, and missing states have the value 0.
        limit: enumerate all runs if there are at most this many.
        samples: otherwise, sample this many runs.
        explain: also attribute a bias to causes, which takes several times as long.

    Raises:
        AuditError: the graph cannot be audited; names the obstacle.
        ParameterError: a number of runs or responses that is not allowed.
        GraphError: `graph` is not a graph.
    """
    refuse_non_graph(graph)
    _refuse_counts(n=n, limit=limit, samples=samples)
    fitting, task, notes = fitted(graph, AuditTask() if task is None else task, n)
    states = stated(fitting, role)

    def audited(graph: Graph, task: AuditTask) -> tuple[Trial, Runs]:
        trial = Trial(graph, states, task, critic)
        return trial, trial.run(limit, samples)

    trial, runs = audited(fitting, task)
    true = {name: gradient(part, trial.now) for name, part in trial.truth.parts(trial.now).items()}
    both = torch.stack([*true.values()]).sum(0)
    whole = _compared(runs, runs.whole, both, task)
    parts = {name: _compared(runs, runs.parts[name], target, task) for name, target in true.items()}
    biased = explain and parts["loss"].biased
    explanation = Explanation(trial, runs, audited, lambda runs, each: _radius(runs, each, task))
    causes = explanation.causes() if biased else ()
    return Audit(
        graph=graph.name,
        objective=str(states),
        task=task,
        exact=runs.exact,
        runs=len(runs.weight),
        rows=runs.rows,
        expected=runs.mean(runs.whole),
        true=both,
        whole=whole,
        parts=parts,
        kl_follows=_kl_follows(trial, runs),
        causes=causes,
        lengthens=_lengthens(trial, runs, true["loss"], parts["loss"]) if biased else None,
        variance=_variance(trial, runs, whole),
        notes=(*notes, *states.notes, *_limits(fitting, task), *explanation.notes),
    )


def _refuse_counts(**counts: int | None) -> None:
    """Refuse numbers of runs and responses that are not allowed."""
    for name, number in counts.items():
        if number is not None and (type(number) is not int or number < 1 + (name == "samples")):
            least = 1 + (name == "samples")
            raise ParameterError(
                f"audit({name}={number!r}): expected an integer of at least {least}.",
                code="audit.bad-argument",
                parameter=name,
                found=number,
                expected=least,
            )


def _radius(runs: Runs, each: Tensor, task: AuditTask) -> float:
    """The bound on the error of a mean over runs."""
    return 0.0 if runs.exact else radius_of(each, task.seed)


def _compared(runs: Runs, each: Tensor, true: Tensor, task: AuditTask) -> GradientComparison:
    return compare_gradients(runs.mean(each), true, _radius(runs, each, task))


def _limits(graph: Graph, task: AuditTask) -> Iterator[str]:
    """What an audit in this task cannot show about this graph."""
    losses = [loss for node in graph.nodes.values() if (loss := getattr(node.operator, "loss", None)) is not None]
    ratio = any("old_log_probs" in loss.signature.ports for loss in losses)
    corrected = any(Effect.IMPORTANCE_CORRECTION in node.effects for node in graph.nodes.values())
    if ratio and not task.age and not (corrected and task.mismatch):
        yield "On-policy all ratios of the loss are 1, so a wrong clip or ratio does not show. Audit with age=0.5, too."
    if corrected and not task.mismatch:
        yield "All ratios to the engine are 1, so a wrong correction does not show. Audit with mismatch=0.5, too."
    if (ratio and task.age) or (corrected and task.mismatch):
        yield "Clips are biased by design, and a wrong clip may be less biased than the right one. Do not rank by bias."


def _kl_follows(trial: Trial, runs: Runs) -> Mapping[str, Interval]:
    """The cosines of a KL term in the loss with the negative gradients of divergences."""
    terms = [one for one in trial.stated.kl if one.in_loss]
    return {
        name: _compared(runs, runs.parts["kl"], -gradient(divergence, trial.now), trial.task).cosine
        for name, divergence in (trial.truth.divergences(terms[0].role).items() if terms else ())
    }


def _lengthens(trial: Trial, runs: Runs, true: Tensor, loss: GradientComparison) -> float:
    """The cosine of the loss's bias with the gradient of the expected length."""
    bias = runs.mean(runs.parts["loss"]) - loss.scale.value * true
    length = gradient(trial.truth.length, trial.now)
    return float((bias * length).sum() / (bias.norm() * length.norm()))


def _variance(trial: Trial, runs: Runs, whole: GradientComparison) -> float | None:
    """The total variance of the update at the scale of the true gradient, in units of plain REINFORCE's."""
    if whole.follows_nothing:
        return None
    own = float(runs.mean((runs.whole - runs.mean(runs.whole)).square()).sum()) / whole.scale.value**2
    return own / trial.truth.plain_variance(trial.now, runs.rows // trial.task.prompts)
