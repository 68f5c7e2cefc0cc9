"""Costs of nodes that were not measured, or not with these parameters, from measured nodes that do similar work.

A forward pass of a model is measured by a node that scores rows with it. An update makes about three of them over its
rows (forward, and the gradients of inputs and of weights), and the rest of its time belongs to its optimizer steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from flowrl.run.prediction.cost import Cost, Load
from flowrl.run.prediction.measured.work import Kind, Work

Ranks = Mapping[int, Cost]
"""The cost on one rank, by the number of ranks."""

_PASSES = (3.0, 2.0, 4.0)
"""Forward passes that an update takes as long as: usual, least, most."""

_ROWS_SHARE = (0.8, 0.5, 1.0)
"""The part of an update's time that grows with its rows, if no forward pass was measured."""

_ALIKE = {"score": (0.7, 1.4), "update": (0.7, 1.5), "sync": (0.7, 1.4), "generate": (0.7, 1.4), "other": (0.2, 4.0)}
"""How many times the seconds of a measured node of this kind another one takes: least and most."""

_SCORE_OF_UPDATE = (1 / 3, 0.6, 1.6)
"""The part of an update's growing time that a forward pass takes: usual, and least and most times that."""


def split(update: Cost, load: Load, forward: Cost | None) -> Cost:
    """The cost of an update that took `update` for `load`, as passes over rows and optimizer steps.

    Args:
        forward: the cost of a forward pass of the same model; None if it was not measured.
    """
    shape = forward or update
    shapes = [shape, *shape.others]
    rest = update.seconds(load) - update.fixed
    if not load.updates or rest <= 0 or any(_growing(one).seconds(load) <= 0 for one in shapes):
        return update
    factors = _PASSES if forward is not None else [rest / _growing(shape).seconds(load) * one for one in _ROWS_SHARE]

    def of(shape: Cost, factor: float) -> Cost:
        grows = _growing(shape)
        passes = grows.seconds(load)
        factor = min(factor, rest / passes)
        return replace(grows.times(factor), fixed=update.fixed, update=(rest - factor * passes) / load.updates)

    usual, *others = (of(shape, factor) for factor in factors)
    return replace(usual, others=(*others, *(of(one, factors[0]) for one in shape.others)))


def similar(work: Work, nodes: Mapping[str, Ranks], works: Mapping[str, Work]) -> Ranks | None:
    """The costs of a node with this work, from the measured node whose work is most similar; None without one."""
    if (found := _nearest(work, work.kind, nodes, works)) is not None:
        return {ranks: cost.times(1.0, *_ALIKE[work.kind]) for ranks, cost in found.items()}
    if work.kind == "score" and (found := _nearest(work, "update", nodes, works)) is not None:
        return {ranks: _grown(cost, _SCORE_OF_UPDATE) for ranks, cost in found.items()}
    if work.kind == "update" and (found := _nearest(work, "score", nodes, works)) is not None:
        usual, least, most = _PASSES
        return {ranks: _grown(cost, (usual, least / usual, most / usual)) for ranks, cost in found.items()}
    return None


def forward_of(update: str, works: Mapping[str, Work]) -> str | None:
    """The node that scores rows with the model that an update trains, if one was measured."""
    scorers = (name for name, work in works.items() if work.kind == "score")
    return next((name for name in scorers if set(works[name].roles) & set(works[update].roles)), None)


def _nearest(work: Work, kind: Kind, nodes: Mapping[str, Ranks], works: Mapping[str, Work]) -> Ranks | None:
    """The measured node of this kind that uses most of the same roles; of several, the one of median seconds."""
    found = [name for name, other in works.items() if other.kind == kind and name in nodes]
    most = max((len(set(work.roles) & set(works[name].roles)) for name in found), default=0)
    best = [name for name in found if len(set(work.roles) & set(works[name].roles)) == most]
    ordered = sorted(best, key=lambda name: sum(min(nodes[name].items())[1].terms))
    return nodes[ordered[len(ordered) // 2]] if ordered else None


def _growing(cost: Cost) -> Cost:
    """The part that grows with rows and tokens."""
    return Cost(0.0, cost.row, cost.token, cost.padded)


def _grown(cost: Cost, factors: tuple[float, float, float]) -> Cost:
    usual, low, high = factors
    return replace(_growing(cost).times(usual, low, high), fixed=cost.fixed)
