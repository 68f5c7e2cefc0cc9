"""`Draws`: what is drawn in a run of a graph, so that all runs there are can be gone through.

Whoever draws asks `Draws.one` with the probabilities of what there is. Either numbers decide, or a script does: the
choices of a run that was, changed at the last place where there was another. So every run has its probability, also of
a graph that draws more or less depending on what it drew before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np


class Draws:
    """The choices of one run after another.

    Args:
        seed: of the numbers that decide, in runs that are sampled.
    """

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._script: list[int] | None = None
        self._choose: Callable[[int], int] | None = None
        self._taken: list[tuple[int, int]] = []
        self.probability = 1.0

    def begin(self, script: Sequence[int] | None) -> None:
        """Start a run: by a script, and by the first of what there is behind its end; or by numbers, for None."""
        self._script = None if script is None else list(script)
        self._taken, self.probability, self._choose = [], 1.0, None

    def begin_with(self, choose: Callable[[int], int]) -> None:
        """Start a run in which `choose` says which, of so many that are possible."""
        self.begin([])
        self._choose = choose

    def one(self, probabilities: Sequence[float]) -> int:
        """Draw: which of those whose probability is not 0."""
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
        """How many runs there are, if all draw as often from as many as this one did."""
        total = 1
        for _, possible in self._taken:
            total *= possible
        return total

    def next(self) -> list[int] | None:
        """The script of the run after this one; None behind the last."""
        taken = list(self._taken)
        while taken and taken[-1][0] + 1 == taken[-1][1]:
            taken.pop()
        if not taken:
            return None
        return [*(chosen for chosen, _ in taken[:-1]), taken[-1][0] + 1]
