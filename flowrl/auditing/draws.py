"""`Draws`: the random choices in a run of a graph, so that all possible runs can be enumerated.

Engines sample with `Draws.one`, given the probabilities. Random numbers decide, or a script: the choices of the
previous run, changed at the last choice that had another option. So every run has a probability.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np


class Draws:
    """The choices of one run after another."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._script: list[int] | None = None
        self._choose: Callable[[int], int] | None = None
        self._taken: list[tuple[int, int]] = []
        self.probability = 1.0

    def begin(self, script: Sequence[int] | None) -> None:
        """Start a run: with a script, and the first option after its end; or with random numbers, for None."""
        self._script = None if script is None else list(script)
        self._taken, self.probability, self._choose = [], 1.0, None

    def begin_with(self, choose: Callable[[int], int]) -> None:
        """Start a run in which `choose` picks one of n options."""
        self.begin([])
        self._choose = choose

    def one(self, probabilities: Sequence[float]) -> int:
        """Sample the index of an option whose probability is not 0."""
        possible = [i for i, p in enumerate(probabilities) if p > 0]
        if len(possible) == 1:
            return possible[0]
        weights = np.array([probabilities[i] for i in possible])
        if self._choose is not None:
            chosen = self._choose(len(possible))
        elif self._script is None:
            chosen = int(self._random.choice(len(possible), p=weights / weights.sum()))
        else:
            at = len(self._taken)
            chosen = self._script[at] if at < len(self._script) else 0
        self._taken.append((chosen, len(possible)))
        self.probability *= float(weights[chosen])
        return possible[chosen]

    @property
    def runs(self) -> int:
        """The number of runs, if all have the same numbers of options as this one."""
        total = 1
        for _, possible in self._taken:
            total *= possible
        return total

    def next(self) -> list[int] | None:
        """The script of the next run; None after the last."""
        taken = list(self._taken)
        while taken and taken[-1][0] + 1 == taken[-1][1]:
            taken.pop()
        if not taken:
            return None
        return [*(chosen for chosen, _ in taken[:-1]), taken[-1][0] + 1]
