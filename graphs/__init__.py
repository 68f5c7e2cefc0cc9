"""Ready algorithms, imported as `flowrl.graphs`."""

if __name__ != "flowrl.graphs":
    raise ImportError(f"{__name__!r} is imported as flowrl.graphs; write `from flowrl.graphs import ...`.")

from flowrl.graphs.advantages import dr_grpo, gdpo, gpg, opo, otb, pass_at_k
from flowrl.graphs.dapo import dapo
from flowrl.graphs.distill import distill, distill_full, distill_top
from flowrl.graphs.dpo import dpo
from flowrl.graphs.filtered import pf_ppo, raft
from flowrl.graphs.grpo import grpo
from flowrl.graphs.losses import cispo, clip_cov, dppo, gmpo, gspo, kl_cov, online_dpo, sapo
from flowrl.graphs.ppo import ppo
from flowrl.graphs.preferences import ipo, kto, orpo, simpo
from flowrl.graphs.reinforce import reinforce_plus_plus, reinforce_plus_plus_baseline, remax, rloo
from flowrl.graphs.reward_model import reward_model
from flowrl.graphs.sft import grpo_sft, sft
from flowrl.graphs.vapo import vapo
from flowrl.graphs.variants import DistillSettings as DistillSettings
from flowrl.graphs.variants import DPOSettings as DPOSettings
from flowrl.graphs.variants import GRPOSettings as GRPOSettings
from flowrl.graphs.variants import PPOSettings as PPOSettings
from flowrl.graphs.variants import edit_of as edit_of

__all__ = [
    "cispo",
    "clip_cov",
    "dapo",
    "distill",
    "distill_full",
    "distill_top",
    "dpo",
    "dppo",
    "dr_grpo",
    "gdpo",
    "gmpo",
    "gpg",
    "grpo",
    "grpo_sft",
    "gspo",
    "ipo",
    "kl_cov",
    "kto",
    "online_dpo",
    "opo",
    "orpo",
    "otb",
    "pass_at_k",
    "pf_ppo",
    "ppo",
    "raft",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "reward_model",
    "rloo",
    "sapo",
    "sft",
    "simpo",
    "vapo",
]
