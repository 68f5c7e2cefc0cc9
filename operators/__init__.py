"""The standard operators, imported as `flowrl.operators`."""

if __name__ != "flowrl.operators":
    raise ImportError(f"{__name__!r} is imported as flowrl.operators; write `from flowrl.operators import ...`.")

from flowrl.operators.advantage import GAE, DecoupledGAE, ReturnToGo, Whiten
from flowrl.operators.correction import Mismatch, RolloutCorrection
from flowrl.operators.engines import Generate, OldLogProb, RefLogProb, Repeat, Value
from flowrl.operators.groups import GPGAdvantage, GroupAdvantage, OPOAdvantage, PassAtKAdvantage, RLOOAdvantage
from flowrl.operators.kl import AdaptiveKL, KLShape
from flowrl.operators.losses import KLLoss, PPOClip, ValueClip
from flowrl.operators.reward.operator import Reward
from flowrl.operators.update import Sync, UpdateActor, UpdateCritic

__all__ = [
    "GAE",
    "AdaptiveKL",
    "DecoupledGAE",
    "GPGAdvantage",
    "Generate",
    "GroupAdvantage",
    "KLLoss",
    "KLShape",
    "Mismatch",
    "OPOAdvantage",
    "OldLogProb",
    "PPOClip",
    "PassAtKAdvantage",
    "RLOOAdvantage",
    "RefLogProb",
    "Repeat",
    "ReturnToGo",
    "Reward",
    "RolloutCorrection",
    "Sync",
    "UpdateActor",
    "UpdateCritic",
    "Value",
    "ValueClip",
    "Whiten",
]
