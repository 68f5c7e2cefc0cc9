"""`Lag`: how far generation may run ahead, and whether weights change while requests are in flight.

`edit(lag=...)` sets it. What each node does with it is derived when the graph runs; see `flowrl.core.graphs.spans`.
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
        versions: by so many it may run ahead of what is trained; 0 is on-policy.
        spans: a sync does not wait for answers of later steps that are under way: they go on with the new weights from
            one token to the next, and every token bears the version that sampled it (`token_version`).
        caches: what then becomes of the keys and values that were computed of such answers with the old weights.
            ``"recompute"`` computes them anew, so that each token is drawn by one version of the policy, as its version
            says. ``"reuse"`` saves that, and draws by new weights over old keys and values, which is the policy of no
            version.

    Raises:
        ParameterError: spans without running ahead, or `caches` without spans.
    """

    timeless = True

    versions: int = Field(ge=0, strict=True)
    spans: bool = False
    caches: Caches = "recompute"

    def __post_init__(self) -> None:
        if self.spans and not self.versions:
            raise ParameterError("Lag(0, spans=True) has nothing under way as weights change; expected Lag(1, ...).")
        if self.caches == "reuse" and not self.spans:
            raise ParameterError("caches='reuse' is of answers under which weights change; expected spans=True, too.")

    def __str__(self) -> str:
        """As `edit(lag=...)` takes it: the number alone, without spans."""
        return repr(self) if self.spans else str(self.versions)


ON_POLICY = Lag(0)


@runtime_checkable
class CanSwap(Protocol):
    """An operator that carries weights to an engine, and can do so while requests are in flight."""

    def swapping(self, caches: Caches) -> Operator:
        """The operator that does so; it has the effect `Effect.SPANS`."""
        ...


def lag_of(graph: str, given: object) -> Lag:
    """`given` as a `Lag`; a number counts versions. Raises a `GraphError` that names `graph` for anything else."""
    if isinstance(given, Lag):
        return given
    try:
        return Lag(cast(Any, given))
    except ParameterError:
        raise GraphError(
            f"{graph} has lag={given!r}; expected how many versions generation may run ahead: 0, 1, 2, ..."
        ) from None
