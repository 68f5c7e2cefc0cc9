"""Ready algorithms, imported as `flowrl.graphs`."""

if __name__ != "flowrl.graphs":
    raise ImportError(f"{__name__!r} is imported as flowrl.graphs; write `from flowrl.graphs import ...`.")

from flowrl.graphs.dr_grpo import dr_grpo
from flowrl.graphs.grpo import grpo
from flowrl.graphs.other_advantages import gpg, opo, pass_at_k
from flowrl.graphs.other_losses import cispo, dppo, gmpo, gspo, kl_cov, online_dpo, sapo
from flowrl.graphs.ppo import ppo
from flowrl.graphs.reinforce_plus_plus import reinforce_plus_plus, reinforce_plus_plus_baseline
from flowrl.graphs.remax import remax
from flowrl.graphs.rloo import rloo

__all__ = [
    "cispo",
    "dppo",
    "dr_grpo",
    "gmpo",
    "gpg",
    "grpo",
    "gspo",
    "kl_cov",
    "online_dpo",
    "opo",
    "pass_at_k",
    "ppo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "rloo",
    "sapo",
]
