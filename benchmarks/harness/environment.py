"""An environment for benchmarks, in a module that imports little, because its processes import it too."""

from __future__ import annotations

from flowrl.episodes import Answer, Environment, Reply


class Digits(Environment):
    """Two turns, each worth the share of digits in it."""

    async def step(self, answer: Answer) -> Reply:
        share = sum(c.isdigit() for c in answer.text) / max(1, len(answer.text))
        return Reply("again", reward=share, done=answer.turn == 1)
