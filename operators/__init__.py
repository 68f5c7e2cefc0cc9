"""The standard operators, imported as `flowrl.operators`."""

if __name__ != "flowrl.operators":
    raise ImportError(f"{__name__!r} is imported as flowrl.operators; write `from flowrl.operators import ...`.")

from flowrl.operators.advantages.gae import GAE, DecoupledGAE, ReturnToGo, RowScore, SubtractBaseline, Whiten
from flowrl.operators.advantages.groups import (
    GPGAdvantage,
    GroupAdvantage,
    OPOAdvantage,
    PassAtKAdvantage,
    RLOOAdvantage,
)
from flowrl.operators.advantages.token_baseline import OptimalTokenBaseline
from flowrl.operators.advantages.turns import TurnGAE, TurnGroupAdvantage
from flowrl.operators.corrections import CorrectLogitNorms, Mismatch, RolloutCorrection
from flowrl.operators.engines.distillation import GKD, FullGKD, ReverseKL, TeacherHiddenStates, TeacherTopK
from flowrl.operators.engines.engines import Generate, LogitNorm, OldLogProb, RefLogProb, Repeat, Sampler, Value
from flowrl.operators.engines.interact import Interact
from flowrl.operators.engines.sampled import Sampled
from flowrl.operators.explains import Explains, exact
from flowrl.operators.kl import AdaptiveKL, KLShape
from flowrl.operators.losses.objective import KLLoss
from flowrl.operators.losses.policy_losses import CISPO, DPPO, DRO, GMPO, GSPO, SAPO, ClipCov, KLCov, PPOClip, Reinforce
from flowrl.operators.losses.preferences import DPO, IPO, KTO, NLL, ORPO, BradleyTerry, PPOClipNLL, SimPO
from flowrl.operators.losses.value_losses import ValueClip, ValueHuber
from flowrl.operators.reward.judge import Judge, conversation
from flowrl.operators.reward.models import ModelReward, PreferenceAccuracy, TextModelReward
from flowrl.operators.reward.operator import Reward
from flowrl.operators.reward.scaling import ClipReward, NormalizeReward
from flowrl.operators.reward.terms import GDPOAdvantage, Matches, WeighRewards
from flowrl.operators.rows.feedback import Feedback
from flowrl.operators.rows.held_out import MajorityAtK, PassAtK, pass_at_k
from flowrl.operators.rows.kto import KTOBaseline, MismatchResponses
from flowrl.operators.rows.mismatch import MaskMismatch
from flowrl.operators.rows.overlong import MaskOverlong, OverlongPenalty
from flowrl.operators.rows.replay import Replay
from flowrl.operators.rows.retokenize import Retokenize
from flowrl.operators.rows.rows import Collect, Filter, Length, Ranked, Spread
from flowrl.operators.updates.reference import SyncReference
from flowrl.operators.updates.reward_model import UpdateRewardModel
from flowrl.operators.updates.sync import Sync
from flowrl.operators.updates.update import UpdateActor, UpdateCritic

__all__ = [
    "CISPO",
    "DPO",
    "DPPO",
    "DRO",
    "GAE",
    "GKD",
    "GMPO",
    "GSPO",
    "IPO",
    "KTO",
    "NLL",
    "ORPO",
    "SAPO",
    "AdaptiveKL",
    "BradleyTerry",
    "ClipCov",
    "ClipReward",
    "Collect",
    "CorrectLogitNorms",
    "DecoupledGAE",
    "Explains",
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
    "KTOBaseline",
    "Length",
    "LogitNorm",
    "MajorityAtK",
    "MaskMismatch",
    "MaskOverlong",
    "Matches",
    "Mismatch",
    "MismatchResponses",
    "ModelReward",
    "NormalizeReward",
    "OPOAdvantage",
    "OldLogProb",
    "OptimalTokenBaseline",
    "OverlongPenalty",
    "PPOClip",
    "PPOClipNLL",
    "PassAtK",
    "PassAtKAdvantage",
    "PreferenceAccuracy",
    "RLOOAdvantage",
    "Ranked",
    "RefLogProb",
    "Reinforce",
    "Repeat",
    "Replay",
    "Retokenize",
    "ReturnToGo",
    "ReverseKL",
    "Reward",
    "RolloutCorrection",
    "RowScore",
    "Sampled",
    "Sampler",
    "SimPO",
    "Spread",
    "SubtractBaseline",
    "Sync",
    "SyncReference",
    "TeacherHiddenStates",
    "TeacherTopK",
    "TextModelReward",
    "TurnGAE",
    "TurnGroupAdvantage",
    "UpdateActor",
    "UpdateCritic",
    "UpdateRewardModel",
    "Value",
    "ValueClip",
    "ValueHuber",
    "WeighRewards",
    "Whiten",
    "conversation",
    "exact",
    "pass_at_k",
]
