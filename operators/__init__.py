"""The standard operators, imported as `flowrl.operators`."""

if __name__ != "flowrl.operators":
    raise ImportError(f"{__name__!r} is imported as flowrl.operators; write `from flowrl.operators import ...`.")

from flowrl.operators.advantage import GAE, DecoupledGAE, ReturnToGo, RowScore, SubtractBaseline, Whiten
from flowrl.operators.correction import Mismatch, RolloutCorrection
from flowrl.operators.distillation import GKD, FullGKD, ReverseKL, TeacherStates, TeacherTopK
from flowrl.operators.engines import Generate, LogitNorm, OldLogProb, RefLogProb, Repeat, Value
from flowrl.operators.feedback import Feedback
from flowrl.operators.groups import GPGAdvantage, GroupAdvantage, OPOAdvantage, PassAtKAdvantage, RLOOAdvantage
from flowrl.operators.held_out import MajorityAtK, PassAtK
from flowrl.operators.interact import Interact
from flowrl.operators.kl import AdaptiveKL, KLShape
from flowrl.operators.objective import KLLoss
from flowrl.operators.overlong import MaskOverlong, OverlongPenalty
from flowrl.operators.policy_losses import CISPO, DPPO, DRO, GMPO, GSPO, SAPO, ClipCov, KLCov, PPOClip, Reinforce
from flowrl.operators.preferences import DPO, NLL, PPOClipNLL
from flowrl.operators.reward.judge import Judge
from flowrl.operators.reward.models import ModelReward, TextModelReward
from flowrl.operators.reward.operator import Reward
from flowrl.operators.reward.terms import GDPOAdvantage, Matches, WeighRewards
from flowrl.operators.rows import Collect, Filter, Length, Ranked, Spread
from flowrl.operators.token_baseline import OptimalTokenBaseline
from flowrl.operators.turns import TurnGAE, TurnGroupAdvantage
from flowrl.operators.update import Sync, UpdateActor, UpdateCritic
from flowrl.operators.value_losses import ValueClip, ValueHuber

__all__ = [
    "CISPO",
    "DPO",
    "DPPO",
    "DRO",
    "GAE",
    "GKD",
    "GMPO",
    "GSPO",
    "NLL",
    "SAPO",
    "AdaptiveKL",
    "ClipCov",
    "Collect",
    "DecoupledGAE",
    "Feedback",
    "Filter",
    "FullGKD",
    "GDPOAdvantage",
    "GPGAdvantage",
    "Generate",
    "GroupAdvantage",
    "Interact",
    "Judge",
    "KLCov",
    "KLLoss",
    "KLShape",
    "Length",
    "LogitNorm",
    "MajorityAtK",
    "MaskOverlong",
    "Matches",
    "Mismatch",
    "ModelReward",
    "OPOAdvantage",
    "OldLogProb",
    "OptimalTokenBaseline",
    "OverlongPenalty",
    "PPOClip",
    "PPOClipNLL",
    "PassAtK",
    "PassAtKAdvantage",
    "RLOOAdvantage",
    "Ranked",
    "RefLogProb",
    "Reinforce",
    "Repeat",
    "ReturnToGo",
    "ReverseKL",
    "Reward",
    "RolloutCorrection",
    "RowScore",
    "Spread",
    "SubtractBaseline",
    "Sync",
    "TeacherStates",
    "TeacherTopK",
    "TextModelReward",
    "TurnGAE",
    "TurnGroupAdvantage",
    "UpdateActor",
    "UpdateCritic",
    "Value",
    "ValueClip",
    "ValueHuber",
    "WeighRewards",
    "Whiten",
]
