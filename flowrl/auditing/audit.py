"""`audit`: the expected update of a graph, compared with the gradient of its stated objective."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.auditing.causes import Without, possible
from flowrl.auditing.fitting import fitted
from flowrl.auditing.gradient_error import Interval, Judged, judge, radius_of
from flowrl.auditing.objective import StatedObjective, stated
from flowrl.auditing.record import Audit, Cause
from flowrl.auditing.task import AuditTask, Policy
from flowrl.auditing.trial import Runs, Trial, Values
from flowrl.auditing.truth import gradient
from flowrl.core.graphs.graph import Graph, refuse_non_graph
from flowrl.errors import ParameterError


@dataclass(frozen=True)
class _Size:
    """The limit of exact runs, the number of sampled ones, and the values of critics."""

    limit: int
    samples: int
    critic: Values


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
        critic: the values of each critic: ``"exact"``, ``"zero"``, or ``{(prompt, prefix): value}``, where `prefix` is
            the tuple of tokens so far, and missing states have the value 0.
        limit: enumerate all runs if there are at most this many.
        samples: otherwise, sample this many runs.
        explain: also attribute a bias to causes, which takes several times as long.

    Raises:
        AuditError: the graph cannot be audited; names the obstacle.
        ParameterError: a number of runs or responses that is not allowed.
        GraphError: `graph` is not a graph.
    """
    refuse_non_graph(graph)
    for name, number in (("n", n), ("limit", limit), ("samples", samples)):
        if number is not None and (type(number) is not int or number < 1 + (name == "samples")):
            least = 1 + (name == "samples")
            raise ParameterError(
                f"audit({name}={number!r}): expected an integer of at least {least}.",
                code="audit.bad-argument",
                parameter=name,
                found=number,
                expected=least,
            )
    fitting, task, notes = fitted(graph, AuditTask() if task is None else task, n)
    states = stated(fitting, role)
    size = _Size(limit, samples, critic)
    trial = Trial(fitting, states, task, critic)
    runs = trial.run(limit, samples)
    true = {name: gradient(part, trial.now) for name, part in trial.truth.parts(trial.now).items()}
    both = torch.stack([*true.values()]).sum(0)
    whole = _judged(runs, runs.whole, both, task)
    parts = {name: _judged(runs, runs.parts[name], target, task) for name, target in true.items()}
    biased = explain and parts["loss"].biased
    causes = _causes(fitting, states, task, size, parts["loss"].bias) if biased else ()
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
        notes=(*notes, *states.notes),
    )


def _judged(runs: Runs, each: Tensor, true: Tensor, task: AuditTask) -> Judged:
    return judge(runs.mean(each), true, 0.0 if runs.exact else radius_of(each, task.seed))


def _causes(graph: Graph, states: StatedObjective, task: AuditTask, size: _Size, own: Interval) -> tuple[Cause, ...]:
    """The remaining bias of the loss without each possible cause of `own`, and without several."""

    def remaining(without: Sequence[Without]) -> Interval:
        there, then = task, graph
        for one in without:
            there, then = one.task(there), one.graph(then)
        trial = Trial(then, states, there, size.critic)
        runs = trial.run(size.limit, size.samples)
        each = runs.parts["loss"]
        if any(one.by_spread for one in without):
            each = each * runs.spread[..., None, None]
        return _judged(runs, each, gradient(trial.truth.parts(trial.now)["loss"], trial.now), there).bias

    found = {one: remaining([one]) for one in possible(graph, task)}
    helping = [one for one, bias in found.items() if bias.value < 0.9 * own.value]
    several = {tuple(some): remaining(some) for some in (helping, list(found)) if len(some) > 1}  # biases may cancel
    causes = [Cause(one.name, bias) for one, bias in found.items()]
    best = min(several, key=lambda some: several[some].value, default=())
    if best and several[best].value < 0.9 * min(bias.value for bias in found.values()):
        causes.append(Cause(" and ".join(one.name for one in best), several[best]))
    return tuple(causes)


def _kl_follows(trial: Trial, runs: Runs) -> Mapping[str, Interval]:
    """The cosines of a KL term in the loss with the negative gradients of divergences."""
    terms = [one for one in trial.stated.kl if one.in_loss]
    if not terms:
        return {}
    role, ref = trial.stated.role, terms[0].role
    truth = trial.truth
    candidates: dict[str, Callable[[Policy], Tensor]] = {
        f"KL({role} || {ref})": lambda policy: -truth.divergence(policy, ref),
        f"KL({role} || {ref}) token by token": lambda policy: -truth.divergence_by_state(policy, ref, forward=False),
        f"KL({ref} || {role}) token by token": lambda policy: -truth.divergence_by_state(policy, ref, forward=True),
    }
    each = runs.parts["kl"]
    return {name: _judged(runs, each, gradient(of, trial.now), trial.task).cosine for name, of in candidates.items()}


def _lengthens(trial: Trial, runs: Runs, true: Tensor, loss: Judged) -> float:
    """The cosine of the loss's bias with the gradient of the expected length."""
    bias = runs.mean(runs.parts["loss"]) - loss.scale.value * true
    length = gradient(trial.truth.length, trial.now)
    return float((bias * length).sum() / (bias.norm() * length.norm()))


def _variance(trial: Trial, runs: Runs, whole: Judged) -> float | None:
    """The total variance of the update at the scale of the true gradient, in units of plain REINFORCE's."""
    if whole.follows_nothing:
        return None
    own = float(runs.mean((runs.whole - runs.mean(runs.whole)).square()).sum()) / whole.scale.value**2
    return own / trial.truth.plain_variance(trial.now, runs.rows // trial.task.prompts)
