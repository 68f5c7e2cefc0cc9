"""Ready algorithms, imported as `flowrl.graphs`."""

if __name__ != "flowrl.graphs":
    raise ImportError(f"{__name__!r} is imported as flowrl.graphs; write `from flowrl.graphs import ...`.")

from flowrl.graphs.dr_grpo import dr_grpo
from flowrl.graphs.gpg import gpg
from flowrl.graphs.grpo import grpo
from flowrl.graphs.opo import opo
from flowrl.graphs.pass_at_k import pass_at_k
from flowrl.graphs.ppo import ppo
from flowrl.graphs.reinforce_plus_plus import reinforce_plus_plus, reinforce_plus_plus_baseline
from flowrl.graphs.rloo import rloo

__all__ = [
    "dr_grpo",
    "gpg",
    "grpo",
    "opo",
    "pass_at_k",
    "ppo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "rloo",
]
