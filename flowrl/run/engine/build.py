"""`EngineBuilder`: builds the live engines of a process, each once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from flowrl.errors import BindError
from flowrl.protocols.backend import Backend, refuse_unserved
from flowrl.protocols.protocols import Closable


class EngineBuilder:
    """Builds engines, each once, those that another asks for first; the `BuildContext` of the backends."""

    def __init__(self, bindings: Mapping[str, Backend], seed: int, rank: int = 0, world_size: int = 1) -> None:
        self.bindings, self._seed = bindings, seed
        self.rank, self.world_size = rank, world_size
        self._built: dict[str, Any] = {}
        self._building: list[str] = []

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return self._seed

    def engine(self, role: str) -> Any:
        """The engine of `role`, built if need be.

        Raises:
            BindError: the role is not bound, roles ask for each other in a circle, or the engine lacks what its
                backend says that it serves.
        """
        if role in self._built:
            return self._built[role]
        if role not in self.bindings:
            asker = repr(self._building[-1]) if self._building else "a backend"
            raise BindError(
                f"{asker} shares the weights of {role!r}, which is not bound; bind {role}=..., or give it a model of "
                f"its own."
            )
        if role in self._building:
            raise BindError(
                f"roles share weights in a circle: {' -> '.join([*self._building, role])}; give one a model of its own."
            )
        backend = self.bindings[role]
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
        """Every engine; those that are `Closable` are closed at the end of the block, also where others fail to."""
        try:
            yield self.all()
        finally:
            self.close()

    def close(self) -> None:
        """Close the engines that are `Closable`, the one that was built last first."""
        with ExitStack() as stack:
            for engine in self._built.values():
                if isinstance(engine, Closable):
                    stack.callback(engine.close)
            self._built = {}
