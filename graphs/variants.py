"""Variants: algorithms that are an edit of another one, and pass settings to it.

The settings of the base algorithm are a `TypedDict` for editors and type checkers:
``def gpg(reward_fn, **settings: Unpack[GRPOSettings])``.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Generic, ParamSpec, Self, TypedDict, overload

from flowrl.core.graphs.algorithm import Algorithm, eager_step, nested, refuse_bad_prefix
from flowrl.core.graphs.inlining import inline
from flowrl.core.operators.operator import is_column
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


class EditedAlgorithm(Generic[P]):
    """An algorithm that is an edit of another one, and accepts its settings as ``**settings``.

    Called with settings it makes its graph. Called with columns inside another algorithm, it joins that algorithm's
    graph and returns what its sinks return: ``dapo.under("second")(batch, reward_fn)``; see `Algorithm`.
    """

    def __init__(self, function: Callable[P, Graph], signature: inspect.Signature, without: tuple[str, ...]) -> None:
        self._function, self._without, self._prefix = function, without, ""
        functools.update_wrapper(self, function)
        self.__signature__ = signature  # for help() and the reference

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Graph: ...
    @overload
    def __call__(self, record: tuple[Any, ...], /, *args: Any, **kwargs: Any) -> Any: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Make the graph; or with columns, call its nodes on them.

        Raises:
            GraphError: unknown settings; or records that do not fit the inputs of the graph.
            ParameterError: a setting that the algorithm does not support.
        """
        records = [arg for arg in args if is_column(arg)]
        named = {name: value for name, value in kwargs.items() if is_column(value)}
        settings = {name: value for name, value in kwargs.items() if name not in named}
        graph = self._graph(*args[len(records) :], **settings)
        if records or named:
            with nested(self._function.__name__, self._prefix):
                return inline(graph, records, named)
        if self._prefix:
            raise GraphError(
                f"{graph.name}.under(...) got none of its inputs ({', '.join(graph.inputs)}). Call it with its inputs "
                f"inside another algorithm, or leave under(...) out.",
                code="algorithm.bad-call",
                algorithm=graph.name,
            )
        return graph

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Run it now, on tensors; see `Algorithm.step`."""
        return eager_step(lambda: self(*args, **kwargs))

    def under(self, prefix: str) -> Self:
        """The same algorithm with other names of its nodes; see `Algorithm.under`."""
        refuse_bad_prefix(prefix)
        prefixed = copy.copy(self)
        prefixed._prefix = f"{prefix}_"
        return prefixed

    def _graph(self, *args: Any, **kwargs: Any) -> Graph:
        name, signature = self._function.__name__, self.__signature__
        _refuse_unsupported(name, kwargs, *self._without)
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
        return self._function(*bound.args, **bound.kwargs)

    def __repr__(self) -> str:
        return f"<algorithm {self._function.__name__}{self.__signature__}>"


def edit_of(
    neighbor: Callable[..., Graph], *, without: tuple[str, ...] = (), **defaults: Any
) -> Callable[[Callable[P, Graph]], EditedAlgorithm[P]]:
    """Decorator of an algorithm that is an edit of `neighbor` and accepts its settings as ``**settings``.

    Inside the function, `settings` contains all of them: the caller's value or the default.

    Args:
        neighbor: the algorithm that it calls.
        without: settings of `neighbor` that the algorithm does not support.
        defaults: defaults that differ from those of `neighbor`.
    """

    def decorate(function: Callable[P, Graph]) -> EditedAlgorithm[P]:
        _BASES[function.__name__] = neighbor.__name__
        return EditedAlgorithm(function, _with_settings(function, neighbor, without, defaults), without)

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
