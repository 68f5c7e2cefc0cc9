"""Ready algorithms, imported as `flowrl.graphs`."""

if __name__ != "flowrl.graphs":
    raise ImportError(f"{__name__!r} is imported as flowrl.graphs; write `from flowrl.graphs import ...`.")

from flowrl.graphs.grpo import grpo
from flowrl.graphs.ppo import ppo

__all__ = ["grpo", "ppo"]
