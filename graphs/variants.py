"""Variants: algorithms that are an edit of another one, and pass settings to it.

The settings of the base algorithm are a `TypedDict` for editors and type checkers:
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
from flowrl.peer_names import translated

P = ParamSpec("P")
RewardFn = str | Callable[..., Any] | None

_BASES: dict[str, str] = {}


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


class DPOSettings(TypedDict, total=False):
    """Settings of `flowrl.graphs.dpo`."""

    beta: float
    label_smoothing: float
    mini_batch: int | None


class DistillSettings(TypedDict, total=False):
    """Settings of `flowrl.graphs.distill_full`."""

    beta: float
    n: int
    temperature: float
    max_new_tokens: int
    mini_batch: int | None


def edit_of(
    neighbor: Callable[..., Graph], *, without: tuple[str, ...] = (), **defaults: Any
) -> Callable[[Callable[P, Graph]], Callable[P, Graph]]:
    """Decorator of an algorithm that is an edit of `neighbor` and accepts its settings as ``**settings``.

    Inside the function, `settings` contains all of them: the caller's value or the default.

    Args:
        neighbor: the algorithm that it calls.
        without: settings of `neighbor` that the algorithm does not support.
        defaults: defaults that differ from those of `neighbor`.
    """

    def decorate(function: Callable[P, Graph]) -> Callable[P, Graph]:
        name, signature = function.__name__, _with_settings(function, neighbor, without, defaults)
        _BASES[name] = neighbor.__name__

        @functools.wraps(function)
        def algorithm(*args: P.args, **kwargs: P.kwargs) -> Graph:
            _refuse_unsupported(name, kwargs, *without)
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError as error:
                refuse_staleness(name, kwargs, signature.parameters)
                unknown = next((name for name in kwargs if name not in signature.parameters), "")
                raise GraphError(
                    f"{name}(...) cannot be called like this: {error}{translated(kwargs, signature.parameters)}; "
                    f"{offer(unknown, signature.parameters, 'it takes')}",
                    code="algorithm.bad-call",
                    algorithm=name,
                    parameter=unknown,
                ) from None
            bound.apply_defaults()
            return function(*bound.args, **bound.kwargs)

        algorithm.__signature__ = signature  # type: ignore[attr-defined]  # for help() and the reference
        return algorithm

    return decorate


def settings_of(algorithm: Callable[..., Graph]) -> inspect.Signature:
    """The parameters of an algorithm, without the inputs of its graph."""
    return algorithm.parameters if isinstance(algorithm, Algorithm) else inspect.signature(algorithm)


def parent_of(name: str) -> str | None:
    """The algorithm that another is an edit of; None if it is none."""
    return _BASES.get(name)


def _refuse_unsupported(algorithm: str, settings: Mapping[str, Any], *unsupported: str) -> None:
    """Refuse settings of the base algorithm that this one does not support."""
    if given := [name for name in unsupported if name in settings]:
        raise ParameterError(
            f"{algorithm}({given[0]}={settings[given[0]]!r}): {algorithm} does not support {given[0]}, a setting of "
            f"{parent_of(algorithm)}, of which it is an edit. Leave {given[0]} out.",
            code="algorithm.unsupported-setting",
            algorithm=algorithm,
            parameter=given[0],
        )


def _with_settings(
    function: Callable[..., Graph],
    neighbor: Callable[..., Graph],
    without: tuple[str, ...],
    defaults: Mapping[str, Any],
) -> inspect.Signature:
    """The parameters of `function`, with those of `neighbor` in place of ``**settings``."""
    signature = inspect.signature(function)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    if len(own) == len(signature.parameters):
        return signature
    inherited, excluded = settings_of(neighbor).parameters.values(), {*without, *signature.parameters}
    more = [
        p.replace(kind=p.KEYWORD_ONLY, default=defaults.get(p.name, p.default))
        for p in inherited
        if p.name not in excluded
    ]
    return signature.replace(parameters=[*own, *more])
