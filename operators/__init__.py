"""The standard operators, imported as `flowrl.operators`."""

if __name__ != "flowrl.operators":
    raise ImportError(f"{__name__!r} is imported as flowrl.operators; write `from flowrl.operators import ...`.")

from flowrl.operators.advantage import GAE, DecoupledGAE, ReturnToGo, RowScore, SubtractBaseline, Whiten
from flowrl.operators.correction import Mismatch, RolloutCorrection
from flowrl.operators.engines import Generate, OldLogProb, RefLogProb, Repeat, Value
from flowrl.operators.groups import GPGAdvantage, GroupAdvantage, OPOAdvantage, PassAtKAdvantage, RLOOAdvantage
from flowrl.operators.held_out import MajorityAtK, PassAtK
from flowrl.operators.kl import AdaptiveKL, KLShape
from flowrl.operators.objective import KLLoss
from flowrl.operators.policy_losses import CISPO, DPPO, DRO, GMPO, GSPO, SAPO, KLCov, PPOClip, Reinforce
from flowrl.operators.preferences import DPO, NLL
from flowrl.operators.reward.operator import Reward
from flowrl.operators.rows import Collect, Filter, Length, Spread
from flowrl.operators.update import Sync, UpdateActor, UpdateCritic
from flowrl.operators.value_losses import ValueClip, ValueHuber

__all__ = [
    "CISPO",
    "DPO",
    "DPPO",
    "DRO",
    "GAE",
    "GMPO",
    "GSPO",
    "NLL",
    "SAPO",
    "AdaptiveKL",
    "Collect",
    "DecoupledGAE",
    "Filter",
    "GPGAdvantage",
    "Generate",
    "GroupAdvantage",
    "KLCov",
    "KLLoss",
    "KLShape",
    "Length",
    "MajorityAtK",
    "Mismatch",
    "OPOAdvantage",
    "OldLogProb",
    "PPOClip",
    "PassAtK",
    "PassAtKAdvantage",
    "RLOOAdvantage",
    "RefLogProb",
    "Reinforce",
    "Repeat",
    "ReturnToGo",
    "Reward",
    "RolloutCorrection",
    "RowScore",
    "Spread",
    "SubtractBaseline",
    "Sync",
    "UpdateActor",
    "UpdateCritic",
    "Value",
    "ValueClip",
    "ValueHuber",
    "Whiten",
]
