"""`Lag`: how far generation may run ahead, and whether weights change while requests are in flight.

`edit(lag=...)` sets it; see `flowrl.core.graphs.spans`.
"""

from __future__ import annotations

from typing import Any, Protocol, cast, runtime_checkable

from pydantic import Field

from flowrl.core.operators.operator import Operator
from flowrl.errors import GraphError, ParameterError
from flowrl.protocols.protocols import Caches
from flowrl.spec import Spec


class Lag(Spec):
    """How far generation may run ahead: ``edit(lag=Lag(2, spans=True))``; ``edit(lag=2)`` is ``edit(lag=Lag(2))``.

    Args:
        versions: how many versions of the policy generation may run ahead of training; 0 is on-policy.
        spans: update the engine's weights while requests of later steps are in flight. These requests continue with the
            new weights from one token to the next; `token_version` records the version that sampled each token.
        caches: what happens to the KV cache of requests in flight. ``"recompute"`` computes it with the new weights, so
            that one version of the policy samples each token, the one that `token_version` records. ``"reuse"`` skips
            that computation: new weights attend to old keys and values, which is the policy of no version.

    Raises:
        ParameterError: spans with lag 0, or `caches` without spans.
    """

    schedulable = False

    versions: int = Field(ge=0, strict=True)
    spans: bool = False
    caches: Caches = "recompute"

    def __post_init__(self) -> None:
        if self.spans and not self.versions:
            raise ParameterError(
                "`spans=True` needs lag ≥ 1: with lag 0 no request is in flight during a sync. Pass Lag(1, ...).",
                code="lag.unsupported",
                versions=0,
            )
        if self.caches == "reuse" and not self.spans:
            raise ParameterError(
                f"`caches='reuse'` needs `spans=True`: without spans no request is in flight during a sync. Pass "
                f"Lag({max(1, self.versions)}, spans=True, caches='reuse').",
                code="lag.unsupported",
                caches="reuse",
            )

    def __str__(self) -> str:
        """As `edit(lag=...)` takes it: the number alone, without spans."""
        return repr(self) if self.spans else str(self.versions)


ON_POLICY = Lag(0)


@runtime_checkable
class SupportsLiveSync(Protocol):
    """An operator that carries weights to an engine, and can do so while requests are in flight."""

    def swapping(self, caches: Caches) -> Operator:
        """The operator that does so; it has the effect `Effect.SPANS`."""
        ...


def lag_of(graph: str, given: object) -> Lag:
    """`given` as a `Lag`; a number counts versions. An error names `graph`."""
    if isinstance(given, Lag):
        return given
    try:
        return Lag(cast(Any, given))
    except ParameterError:
        raise GraphError(
            f"{graph} has lag={given!r}; expected the number of versions that generation may run ahead: 0, 1, 2, ...",
            code="lag.not-a-count",
            graph=graph,
            given=given,
        ) from None
