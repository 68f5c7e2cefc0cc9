"""Algorithms that are an edit of a neighbour: which, and the settings that they pass on to it.

The settings of a neighbour are a `TypedDict`, so that an editor completes them and a type checker knows them:
``def gpg(reward_fn, **settings: Unpack[GRPOSettings])``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypedDict

from flowrl.core.graphs.algorithm import Algorithm
from flowrl.errors import GraphError, ParameterError, offer, refuse_staleness
from flowrl.graph import Graph

P = ParamSpec("P")
RewardFn = str | Callable[..., Any] | None

_NEIGHBOURS: dict[str, str] = {}


class GRPOSettings(TypedDict, total=False):
    """Settings of `flowrl.graphs.grpo`."""

    n: int
    temperature: float
    max_new_tokens: int
    kl_coef: float
    clip: float
    ppo_epochs: int
    mini_batch: int | None


class PPOSettings(GRPOSettings, total=False):
    """Settings of `flowrl.graphs.ppo`."""

    gamma: float
    lam: float
    critic_warmup: int


class DistillSettings(TypedDict, total=False):
    """Settings of `flowrl.graphs.distill_full`."""

    beta: float
    n: int
    temperature: float
    max_new_tokens: int
    mini_batch: int | None


def edit_of(
    neighbour: Callable[..., Graph], *, without: tuple[str, ...] = (), **defaults: Any
) -> Callable[[Callable[P, Graph]], Callable[P, Graph]]:
    """Decorator of an algorithm that is an edit of `neighbour`, and takes its settings as ``**settings``.

    Inside the function, `settings` holds every one of them: the caller's value or the default.

    Args:
        neighbour: the algorithm that it calls.
        without: settings that belong to a part of the neighbour which the algorithm leaves out.
        defaults: of settings whose default differs from the neighbour's.

    Raises:
        GraphError: when the algorithm is called with a setting that it does not have, or without one that it wants.
        ParameterError: when it is called with one of `without`.
    """

    def enter(function: Callable[P, Graph]) -> Callable[P, Graph]:
        name, signature = function.__name__, _with_settings(function, neighbour, without, defaults)
        _NEIGHBOURS[name] = neighbour.__name__

        @functools.wraps(function)
        def algorithm(*args: P.args, **kwargs: P.kwargs) -> Graph:
            refuse_lost(name, kwargs, *without)
            try:
                given = signature.bind(*args, **kwargs)
            except TypeError as error:
                refuse_staleness(name, kwargs, signature.parameters)
                unknown = next((name for name in kwargs if name not in signature.parameters), "")
                raise GraphError(
                    f"{name}(...) cannot be made: {error}; {offer(unknown, signature.parameters, 'it takes')}"
                ) from None
            given.apply_defaults()
            return function(*given.args, **given.kwargs)

        algorithm.__signature__ = signature  # type: ignore[attr-defined]  # what help() and the reference show
        return algorithm

    return enter


def settings_of(algorithm: Callable[..., Graph]) -> inspect.Signature:
    """What an algorithm is called with to make its graph."""
    return algorithm.parameters if isinstance(algorithm, Algorithm) else inspect.signature(algorithm)


def neighbour_of(name: str) -> str | None:
    """The algorithm that another is an edit of; None where that is written line by line."""
    return _NEIGHBOURS.get(name)


def refuse_lost(algorithm: str, settings: Mapping[str, Any], *lost: str) -> None:
    """Refuse settings of the neighbour that would be without effect here.

    Args:
        algorithm: its name.
        settings: what it was given to pass on.
        lost: what belongs to a part of the neighbour that the algorithm leaves out.

    Raises:
        ParameterError: one of them was given.
    """
    if given := [name for name in lost if name in settings]:
        raise ParameterError(
            f"{algorithm}({given[0]}={settings[given[0]]!r}) would be without effect, since {algorithm} leaves out "
            f"what {given[0]} is for; leave it out, too."
        )


def _with_settings(
    function: Callable[..., Graph],
    neighbour: Callable[..., Graph],
    without: tuple[str, ...],
    defaults: Mapping[str, Any],
) -> inspect.Signature:
    """The parameters of `function`, with those that it passes on in the place of ``**settings``."""
    signature = inspect.signature(function)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    if len(own) == len(signature.parameters):
        return signature
    passed_on, left_out = settings_of(neighbour).parameters.values(), {*without, *signature.parameters}
    more = [
        p.replace(kind=p.KEYWORD_ONLY, default=defaults.get(p.name, p.default))
        for p in passed_on
        if p.name not in left_out
    ]
    return signature.replace(parameters=[*own, *more])
