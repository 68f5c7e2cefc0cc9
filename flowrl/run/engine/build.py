"""`EngineBuilder`: builds the live engines of a process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from flowrl.errors import BindError, ParameterError
from flowrl.protocols.backend import Backend, refuse_unserved
from flowrl.protocols.protocols import Closable


class EngineBuilder:
    """Builds each engine once, after those that it shares; the `BuildContext` of the backends."""

    def __init__(self, bindings: Mapping[str, Backend], seed: int, rank: int = 0, world_size: int = 1) -> None:
        _refuse_unknown_length(bindings)
        self.bindings, self._seed = bindings, seed
        self.rank, self.world_size = rank, world_size
        self._built: dict[str, Any] = {}
        self._building: list[str] = []

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return self._seed

    def engine(self, role: str) -> Any:
        """The engine of `role`, built if needed."""
        if role in self._built:
            return self._built[role]
        if role not in self.bindings:
            asker = self._building[-1] if self._building else None
            raise BindError(
                f"{'A backend' if asker is None else f'The role {asker!r}'} shares the weights of {role!r}, which is "
                f"not bound. Bind {role}=..., or pass it its own model.",
                code="job.shared-weights",
                role=asker,
                owner=role,
            )
        if role in self._building:
            cycle = [*self._building, role]
            raise BindError(
                f"Roles share weights in a cycle: {' -> '.join(cycle)}. Pass one of them its own model.",
                code="job.shared-weights",
                role=role,
                cycle=cycle,
            )
        backend = self.bindings[role].local()
        self._building.append(role)
        self._built[role] = backend.build(self)
        self._building.pop()
        refuse_unserved(role, backend, self._built[role])
        return self._built[role]

    def all(self) -> dict[str, Any]:
        """Every engine, in the order of the bindings."""
        return {role: self.engine(role) for role in self.bindings}

    @contextmanager
    def live(self) -> Iterator[dict[str, Any]]:
        """Every engine within the block; closed at its end, see `close`."""
        try:
            yield self.all()
        finally:
            self.close()

    def close(self) -> None:
        """Close the engines that are `Closable`, last built first, even if some fail."""
        with ExitStack() as stack:
            for engine in self._built.values():
                if isinstance(engine, Closable):
                    stack.callback(engine.close)
            self._built = {}


def _refuse_unknown_length(bindings: Mapping[str, Backend]) -> None:
    """Refuse backends whose engines depend on the length of the run, which is not known here."""
    if (role := next((role for role, backend in bindings.items() if backend.over_run), None)) is not None:
        raise ParameterError(
            f"The schedule of the role {role!r} lasts as long as the run, and no Training says how long that is. Run "
            f"the job by Training(job, data, steps=..., prompts=...).run(), or pass steps= to the schedule: "
            f"Cosine(1.0, 0.1, steps=1000).",
            code="parameter.unknown-length",
            role=role,
        )
