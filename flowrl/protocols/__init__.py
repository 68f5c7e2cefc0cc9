"""The Protocols of live engines, and `Backend`, the spec that builds one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowrl.lazy import lazy

if TYPE_CHECKING:
    from flowrl.protocols.backend import Backend
    from flowrl.protocols.heads import Head, HiddenStates, HiddenStateScorer
    from flowrl.protocols.partial_responses import PartialResponses
    from flowrl.protocols.protocols import (
        Adapted,
        BuildContext,
        Caches,
        CacheStats,
        Checkpointed,
        Closable,
        Critic,
        HasComputeDtype,
        LiveWeightUpdate,
        MiniBatch,
        Objective,
        OfDistribution,
        ReplicatedMiniBatch,
        Request,
        Response,
        Rollout,
        Sampled,
        Sampling,
        Scorer,
        Sleeper,
        StreamingRollout,
        Synced,
        Trainer,
    )
    from flowrl.protocols.remote import RemoteWeights
    from flowrl.protocols.scorers import LogitScorer, NormScorer, RewardScorer, RewardTrainer, TextRewardScorer, Top

__all__ = [
    "Adapted",
    "Backend",
    "BuildContext",
    "CacheStats",
    "Caches",
    "Checkpointed",
    "Closable",
    "Critic",
    "HasComputeDtype",
    "Head",
    "HiddenStateScorer",
    "HiddenStates",
    "LiveWeightUpdate",
    "LogitScorer",
    "MiniBatch",
    "NormScorer",
    "Objective",
    "OfDistribution",
    "PartialResponses",
    "RemoteWeights",
    "ReplicatedMiniBatch",
    "Request",
    "Response",
    "RewardScorer",
    "RewardTrainer",
    "Rollout",
    "Sampled",
    "Sampling",
    "Scorer",
    "Sleeper",
    "StreamingRollout",
    "Synced",
    "TextRewardScorer",
    "Top",
    "Trainer",
]

__getattr__ = lazy(
    __name__,
    {
        "Adapted": "protocols",
        "Backend": "backend",
        "BuildContext": "protocols",
        "CacheStats": "protocols",
        "Caches": "protocols",
        "Checkpointed": "protocols",
        "Closable": "protocols",
        "Critic": "protocols",
        "HasComputeDtype": "protocols",
        "Head": "heads",
        "HiddenStateScorer": "heads",
        "HiddenStates": "heads",
        "LiveWeightUpdate": "protocols",
        "LogitScorer": "scorers",
        "MiniBatch": "protocols",
        "NormScorer": "scorers",
        "Objective": "protocols",
        "OfDistribution": "protocols",
        "PartialResponses": "partial_responses",
        "RemoteWeights": "remote",
        "Request": "protocols",
        "Response": "protocols",
        "RewardScorer": "scorers",
        "RewardTrainer": "scorers",
        "Rollout": "protocols",
        "Sampled": "protocols",
        "Sampling": "protocols",
        "Scorer": "protocols",
        "Sleeper": "protocols",
        "StreamingRollout": "protocols",
        "Synced": "protocols",
        "TextRewardScorer": "scorers",
        "Top": "scorers",
        "Trainer": "protocols",
        "ReplicatedMiniBatch": "protocols",
    },
)
