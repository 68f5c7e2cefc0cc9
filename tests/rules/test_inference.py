"""Tests of `inference.py` and `deviation.py`: rules find harm in operators that declare no effects, and only harm.

What the table cannot hold, because nothing in columns, parameters or source code shows it: a standard deviation that is
computed outside Python's source (in a compiled extension), a weight per token of a correction, a group baseline in
scores instead of advantages, and a correction that only rejects rows, which must declare `effects`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar

import pytest
import torch
from jaxtyping import Float32
from torch import Tensor

from flowrl import columns as c
from flowrl.core.graphs.after import After
from flowrl.core.operators.class_validation import Granularity
from flowrl.core.operators.function import operator
from flowrl.core.operators.loss import Loss
from flowrl.core.operators.operator import Operator
from flowrl.core.operators.roles import Reads, Role
from flowrl.graph import Graph, algorithm
from flowrl.graphs import grpo, ppo, reinforce_plus_plus, rloo
from flowrl.operators import (
    Filter,
    OldLogProb,
    RefLogProb,
    Reward,
    RolloutCorrection,
    Spread,
    Sync,
    UpdateActor,
    Whiten,
)
from flowrl.protocols.protocols import Rollout
from flowrl.records import PromptBatch, RolloutBatch
from tests.rules.findings import found
from tests.support.kernel import exact

Gap = Annotated[Float32[Tensor, "batch response"], c.Column("test_gap", "gap of a test")]
Weight = Annotated[Float32[Tensor, "batch response"], c.Column("test_weight", "weight of a test")]


class Penalized(Operator):
    def __call__(
        self, token_level_scores: c.TokenLevelScores, old_log_probs: c.OldLogProbs, ref_log_prob: c.RefLogProbs
    ) -> c.TokenLevelScores:
        return token_level_scores - 0.1 * (old_log_probs - ref_log_prob)


class Pulled(Operator):
    def __call__(
        self, advantages: c.Advantages, old_log_probs: c.OldLogProbs, ref_log_prob: c.RefLogProbs
    ) -> c.Advantages:
        return advantages - 0.1 * (old_log_probs - ref_log_prob)


class GapToReference(Operator):
    def __call__(self, old_log_probs: c.OldLogProbs, ref_log_prob: c.RefLogProbs) -> Gap:
        return old_log_probs - ref_log_prob


class LessGap(Operator):
    def __call__(self, advantages: c.Advantages, gap: Gap) -> c.Advantages:
        return advantages - 0.1 * gap


class ByDeviation(Operator):
    def __call__(self, advantages: c.Advantages, response_mask: c.ResponseMask) -> c.Advantages:
        spread = advantages[response_mask].std().clamp(min=1e-6)
        return advantages / spread


class ByRootMeanSquare(Operator):
    def __call__(self, advantages: c.Advantages, response_mask: c.ResponseMask) -> c.Advantages:
        squares = (advantages**2).sum() / response_mask.sum()
        return advantages * torch.rsqrt(squares + 1e-6)


class ByInversePower(Operator):
    def __call__(self, advantages: c.Advantages, response_mask: c.ResponseMask) -> c.Advantages:
        return advantages * (advantages[response_mask].var() + 1e-8) ** -0.5


class ByPowerFunction(Operator):
    def __call__(self, advantages: c.Advantages) -> c.Advantages:
        return advantages * torch.pow(advantages.var(), -0.5)


class ByNorm(Operator):
    def __call__(self, advantages: c.Advantages) -> c.Advantages:
        return advantages / torch.linalg.vector_norm(advantages)


class ByReciprocal(Operator):
    def __call__(self, advantages: c.Advantages) -> c.Advantages:
        variance, mean = torch.var_mean(advantages)
        return (advantages - mean) * variance.sqrt().reciprocal()


class ByProduct(Operator):
    def __call__(self, advantages: c.Advantages) -> c.Advantages:
        centered = advantages - advantages.mean()
        return advantages / torch.sqrt((centered * centered).mean())


def spread_of(x: Tensor) -> Tensor:
    centered = x - x.mean()
    return (centered.square().mean() + 1e-6).sqrt()


class ByHelper(Operator):
    def __call__(self, advantages: c.Advantages) -> c.Advantages:
        return self.scaled(advantages)

    def scaled(self, x: Tensor) -> Tensor:
        return torch.div(x, spread_of(x))


@operator
def within_groups(token_level_rewards: c.TokenLevelRewards, response_mask: c.ResponseMask, uid: c.Uid) -> c.Advantages:
    scores = token_level_rewards.sum(-1, keepdim=True)
    return (scores - scores.mean()) / (scores.std() + 1e-6) * response_mask


class LeaveOneOut(Operator):
    def __call__(
        self, token_level_rewards: c.TokenLevelRewards, response_mask: c.ResponseMask, uid: c.Uid
    ) -> c.Advantages:
        scores = token_level_rewards.sum(-1, keepdim=True)
        return (scores - (scores.sum() - scores) / (len(uid) - 1)) * response_mask


class Weighted(Operator):
    def __call__(
        self, advantages: c.Advantages, old_log_probs: c.OldLogProbs, rollout_log_probs: c.RolloutLogProbs
    ) -> c.Advantages:
        return advantages * (old_log_probs - rollout_log_probs).exp().clamp(max=2.0)


class Weigh(Operator):
    def __call__(self, old_log_probs: c.OldLogProbs, rollout_log_probs: c.RolloutLogProbs) -> Weight:
        return (old_log_probs - rollout_log_probs).exp().clamp(max=2.0)


class Times(Operator):
    def __call__(self, advantages: c.Advantages, weight: Weight) -> c.Advantages:
        return advantages * weight


class Anchored(Loss):
    def __call__(self, log_probs: c.LogProbs, advantages: c.Advantages, ref_log_prob: c.RefLogProbs) -> Tensor:
        return -advantages * log_probs + 0.1 * (log_probs - ref_log_prob).square()


class ToEngine(Loss):
    def __call__(self, log_probs: c.LogProbs, advantages: c.Advantages, rollout_log_probs: c.RolloutLogProbs) -> Tensor:
        return -advantages * (log_probs - rollout_log_probs).exp()


class ByWeight(Loss):
    def __call__(self, log_probs: c.LogProbs, advantages: c.Advantages, weight: Weight) -> Tensor:
        return -advantages * weight * log_probs


class OwnBaseline(Operator):
    def __call__(self, token_level_scores: c.TokenLevelScores, baseline: c.RowScores) -> c.Advantages:
        return token_level_scores - baseline[:, None]


class OwnScore(Operator):
    granularity: ClassVar[Granularity] = "row"

    def __call__(self, token_level_scores: c.TokenLevelScores) -> c.RowScores:
        return token_level_scores.sum(-1)


class Sampled(Operator):
    """An operator of a user's own that samples; its parameters have the usual names."""

    temperature: float = 1.0
    top_p: float = 1.0
    presence_penalty: float = 0.0
    rollout: Reads[Rollout] = Role("rollout")

    def __call__(self, prompts: PromptBatch) -> RolloutBatch: ...


def grouped(**changes: Any) -> Graph:
    return grpo(exact, kl_coef=0.0).edit(**changes)


def after_advantages(own: Operator, graph: Graph | None = None, **changes: Any) -> Graph:
    return (graph or grpo(exact, kl_coef=0.0)).edit(insert={"own": After("group_advantage", own)}, **changes)


def in_parts(first: Operator, second: Operator, port: str, output: str, **changes: Any) -> Graph:
    """`second` uses what `first` has computed, in a column of a kind that flowrl does not know."""
    graph = changes.pop("graph", None) or grpo(exact)
    return graph.edit(
        insert={"first": After("old_log_prob", first), "own": After("group_advantage", second)},
        wire={f"own.{port}": f"first.{output}"},
        **changes,
    )


def with_reference(graph: Graph, reader: str, **changes: Any) -> Graph:
    """`graph` with the reference's log-probs, which the node `reader` reads."""
    insert = {"ref": After("generate", RefLogProb()), **changes.pop("insert", {})}
    wire = {f"{reader}.ref_log_prob": "ref.ref_log_prob", **changes.pop("wire", {})}
    return graph.edit(insert=insert, wire=wire, **changes)


HARMS: dict[str, tuple[Callable[[], Graph], str]] = {
    "KL in the reward and in the loss": (
        lambda: grpo(exact).edit(insert={"own": After("reward", Penalized())}),
        "FR001",
    ),
    "KL in the reward twice": (lambda: ppo(exact).edit(insert={"own": After("whiten", Pulled())}), "FR001"),
    "KL in the advantages and in the loss": (lambda: after_advantages(Pulled(), grpo(exact)), "FR001"),
    "KL in two operators, and in the loss": (lambda: in_parts(GapToReference(), LessGap(), "gap", "test_gap"), "FR001"),
    "a loss near the reference, and KL in the reward": (
        lambda: ppo(exact).edit(set={"update_actor.loss": Anchored()}),
        "FR017",
    ),
    "KL in the reward under a group's deviation": (
        lambda: with_reference(grouped(), insert={"own": After("reward", Penalized())}, reader="own"),
        "FR016",
    ),
    "a deviation after a group's": (lambda: after_advantages(ByDeviation()), "FR013"),
    "a root mean square after a group's deviation": (lambda: after_advantages(ByRootMeanSquare()), "FR013"),
    **{
        f"a deviation after a group's, {type(own).__name__}": (lambda own=own: after_advantages(own), "FR013")
        for own in (ByInversePower(), ByPowerFunction(), ByNorm(), ByReciprocal(), ByProduct())
    },
    "a deviation in a helper after a group's": (lambda: after_advantages(ByHelper()), "FR013"),
    "a group's deviation, whitened": (
        lambda: grouped(replace={"group_advantage": within_groups.named("group_advantage")}).edit(
            insert={"whiten": After("group_advantage", Whiten())}
        ),
        "FR013",
    ),
    "a deviation of weighted advantages": (
        lambda: grouped(set={"group_advantage.normalize_std": False}).edit(
            insert={
                "correction": After("group_advantage", RolloutCorrection()),
                "own": After("group_advantage", ByDeviation()),
            }
        ),
        "FR028",
    ),
    "a deviation over rows that a gate removes": (
        lambda: rloo(exact).edit(
            insert={"own": After("rloo_advantage", ByDeviation()), "gate": After("rloo_advantage", Filter(Spread()))}
        ),
        "FR029",
    ),
    "a baseline of one row": (
        lambda: grpo(exact, n=1, kl_coef=0.0).edit(replace={"group_advantage": LeaveOneOut()}),
        "FR003",
    ),
    "a baseline of one row, of a function": (
        lambda: grpo(exact, n=1, kl_coef=0.0).edit(replace={"group_advantage": within_groups}),
        "FR003",
    ),
    "a baseline of a response's own score": (
        lambda: grpo(exact, kl_coef=0.0).edit(
            insert={"score": After("reward", OwnScore())},
            replace={"group_advantage": OwnBaseline()},
            wire={"own_baseline.baseline": "score.row_scores"},
        ),
        "FR027",
    ),
    "weights twice": (
        lambda: after_advantages(Weighted(), grouped(insert={"c": After("group_advantage", RolloutCorrection())})),
        "FR011",
    ),
    "weights and top-p": (lambda: after_advantages(Weighted(), set={"generate.top_p": 0.9}), "FR012"),
    "weights in two operators, twice": (
        lambda: in_parts(
            Weigh(),
            Times(),
            "weight",
            "test_weight",
            graph=grouped(insert={"c": After("group_advantage", RolloutCorrection())}),
        ),
        "FR011",
    ),
    "a ratio to the engine in the loss, and weights": (
        lambda: grouped(
            insert={"c": After("group_advantage", RolloutCorrection())}, set={"update_actor.loss": ToEngine()}
        ),
        "FR011",
    ),
    "a loss that reads weights, and weights": (
        lambda: grouped(
            insert={
                "c": After("group_advantage", RolloutCorrection()),
                "weigh": After("old_log_prob", Weigh()),
            },
            set={"update_actor.loss": ByWeight()},
            wire={"update_actor.weight": "weigh.test_weight"},
        ),
        "FR011",
    ),
    "greedy sampling": (lambda: own_sampling(Sampled(temperature=0.0)), "FR007"),
    "sampling with top-p under weights": (
        lambda: own_sampling(Sampled(top_p=0.9)).edit(insert={"c": After("advantage", RolloutCorrection())}),
        "FR012",
    ),
    "sampling with a penalty under weights": (
        lambda: own_sampling(Sampled(presence_penalty=0.5)).edit(insert={"c": After("advantage", RolloutCorrection())}),
        "FR012",
    ),
}


@algorithm
def own_sampling(batch: PromptBatch, sampled: Operator) -> Any:
    rollout = sampled(batch)
    old = OldLogProb()(rollout)
    scores = Reward(exact)(rollout, batch)
    advantages = Plain().named("advantage")(scores)
    return Sync()(UpdateActor()(rollout, old_log_probs=old, advantages=advantages))


class Plain(Operator):
    def __call__(self, token_level_scores: c.TokenLevelScores) -> c.Advantages:
        return token_level_scores


@pytest.mark.parametrize("harm", HARMS)
def test_harm_in_an_operator_that_declares_nothing_is_found(harm: str) -> None:
    build, rule = HARMS[harm]
    assert rule in [id for id, _ in found(build())]


class Clamped(Operator):
    def __call__(self, advantages: c.Advantages) -> c.Advantages:
        return advantages.clamp(-2, 2)


class ByLength(Operator):
    def __call__(self, advantages: c.Advantages, response_mask: c.ResponseMask) -> c.Advantages:
        return advantages / response_mask.sum(-1, keepdim=True).clamp(min=1).sqrt()


class Logged(Operator):
    def __call__(self, advantages: c.Advantages, response_mask: c.ResponseMask) -> c.Advantages:
        spread = advantages.std()
        assert spread >= 0
        return advantages / response_mask.sum()


class Likely(Operator):
    """A reward for what the reference finds likely; it compares no policy with it."""

    def __call__(self, token_level_scores: c.TokenLevelScores, ref_log_prob: c.RefLogProbs) -> c.TokenLevelScores:
        return token_level_scores + 0.01 * ref_log_prob


class Mismatched(Operator):
    """Only rejects, and declares it."""

    @property
    def effects(self) -> frozenset[str]:
        return frozenset()

    def __call__(
        self, advantages: c.Advantages, old_log_probs: c.OldLogProbs, rollout_log_probs: c.RolloutLogProbs
    ) -> c.Advantages:
        return advantages * ((old_log_probs - rollout_log_probs).abs() < 1)


class Surprise(Operator):
    def __call__(self, token_level_scores: c.TokenLevelScores, old_log_probs: c.OldLogProbs) -> c.TokenLevelScores:
        return token_level_scores - 0.01 * old_log_probs


class NearDuplicates(Operator):
    def __call__(self, token_level_scores: c.TokenLevelScores, uid: c.Uid) -> c.TokenLevelScores:
        return token_level_scores


LEGITIMATE: dict[str, Callable[[], Graph]] = {
    "KL in the reward alone": lambda: rloo(exact).edit(insert={"own": After("reward", Penalized())}, drop=["kl_shape"]),
    "KL in two operators": lambda: with_reference(
        grouped(),
        insert={"first": After("old_log_prob", GapToReference()), "own": After("group_advantage", LessGap())},
        wire={"own.gap": "first.test_gap"},
        reader="first",
    ),
    "a gap that nothing trains on": lambda: grpo(exact).edit(
        insert={"gap": After("old_log_prob", GapToReference()), "less": After("group_advantage", ReadsGap())},
        wire={"less.gap": "gap.test_gap"},
    ),
    "a deviation after centering": lambda: rloo(exact).edit(insert={"own": After("rloo_advantage", ByDeviation())}),
    "a bound after a group's deviation": lambda: after_advantages(Clamped()),
    "a division by the root of a length": lambda: after_advantages(ByLength()),
    "a deviation that divides nothing": lambda: after_advantages(Logged()),
    "a reward for what a reference finds likely": lambda: grpo(exact).edit(insert={"own": After("reward", Likely())}),
    "a reward for surprise": lambda: grpo(exact).edit(insert={"own": After("reward", Surprise())}),
    "weights alone": lambda: after_advantages(Weighted()),
    "weights ahead of training": lambda: after_advantages(Weighted(), lag=1),
    "rejection that declares to weigh nothing": lambda: after_advantages(
        Mismatched(), grouped(insert={"c": After("group_advantage", RolloutCorrection())})
    ),
    "a baseline of several rows": lambda: grouped(replace={"group_advantage": LeaveOneOut()}),
    "a baseline of several rows, then a gate": lambda: grouped(replace={"group_advantage": within_groups}).edit(
        insert={"gate": After("within_groups", Filter(Spread()))}
    ),
    "scores by group of one row": lambda: reinforce_plus_plus(exact, n=1).edit(
        insert={"own": After("reward", NearDuplicates())}
    ),
    "a loss near the reference": lambda: with_reference(
        grouped(), set={"update_actor.loss": Anchored()}, reader="update_actor"
    ),
    "sampling at a temperature": lambda: own_sampling(Sampled(temperature=0.7)),
}


class ReadsGap(Operator):
    """Declares that it counts nothing: it only logs the gap."""

    @property
    def effects(self) -> frozenset[str]:
        return frozenset()

    def __call__(self, advantages: c.Advantages, gap: Gap) -> c.Advantages:
        return advantages


@pytest.mark.parametrize("graph", LEGITIMATE)
def test_an_operator_that_does_no_harm_passes(graph: str) -> None:
    assert found(LEGITIMATE[graph]()) == []


def test_what_a_class_declares_counts_instead_of_its_columns() -> None:
    class Declared(Penalized):
        @property
        def effects(self) -> frozenset[str]:
            return frozenset()

    assert found(grpo(exact).edit(insert={"own": After("reward", Declared())})) == []
    assert "FR001" in [id for id, _ in found(grpo(exact).edit(insert={"own": After("reward", Penalized())}))]
