"""CartPole: classic RL as a graph of the operators that train language models, with a small custom policy.

flowrl show examples/cartpole.py:graph       show the graph
flowrl run examples/cartpole.py:training     train, as `python examples/cartpole.py` does; needs flowrl[gymnasium]

`Play` replaces `Generate`: a row is an episode, a response is its sequence of actions, and a token is an action.
Everything else is as for language models.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

import gymnasium
import numpy as np
import torch
from jaxtyping import Bool, Float32, Int64
from pydantic import Field
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))  # for the module in this folder
from cartpole_policy import Acting, Actor, Observations, Policy, StateCritic, Steps, Values

from flowrl import (
    INJECTED,
    Column,
    DataProto,
    Key,
    Metrics,
    Operator,
    Reads,
    Role,
    Source,
    Terminal,
    Training,
    Validation,
    algorithm,
)
from flowrl import columns as c
from flowrl.core import Granularity
from flowrl.data import Stream, objects
from flowrl.operators import GAE, PPOClip, Sync, UpdateActor, UpdateCritic, Value, ValueClip, Whiten
from flowrl.records import CriticUpdated, Receipt

STEPS = int(os.environ.get("STEPS", "60"))
SEED = int(os.environ.get("SEED", "0"))

Seed = Annotated[Int64[Tensor, "batch"], Column("seed", "seed of an environment")]
CutOff = Annotated[Bool[Tensor, "batch"], Column("cut_off", "cut off by a time limit", pad=False)]
LastSeen = Annotated[Float32[Tensor, "batch features"], Column("last_seen", "observation after the last step")]


class SeedBatch(NamedTuple):
    """Seeds of episodes."""

    seed: Seed
    row_id: c.RowId


class Episodes(NamedTuple):
    """Episodes: the columns of `Steps`, and their outcome."""

    observations: Observations
    responses: c.Responses
    response_mask: c.ResponseMask
    policy_version: c.PolicyVersion
    rollout_log_probs: c.RolloutLogProbs
    token_level_scores: c.TokenLevelScores
    cut_off: CutOff
    last_seen: LastSeen


class Seeds(Source):
    """Seeds, generated on demand.

    Args:
        family: name of a set of seeds; different families have different seeds.
        number: number of seeds; None is unlimited.
    """

    record = SeedBatch
    family: str = "train"
    number: int | None = Field(default=None, ge=1)

    def load(self, tokenizer: None, seed: int) -> "SeedStream":
        return SeedStream(Key.of(seed).derive(self.family), self.number)


class SeedStream(Stream):
    """Counts; the key maps each number to a seed."""

    def __init__(self, key: Key, number: int | None) -> None:
        self.key, self.number, self.given = key, number, 0

    def batch(self, numbers: range) -> DataProto:
        """The seeds of these numbers."""
        seeds = torch.tensor([self.key.derive(i).bits % 2**31 for i in numbers])
        return DataProto(SeedBatch(seeds, objects(str(i) for i in numbers))._asdict())

    def next(self, n: int) -> DataProto:
        self.given += n
        return self.batch(range(self.given - n, self.given))

    def batches(self, n: int) -> Iterator[DataProto]:
        every = range(self.number or 0)
        return (self.batch(every[start : start + n]) for start in range(0, len(every), n))

    @property
    def size(self) -> int | None:
        return self.number

    @property
    def position(self) -> dict[str, Any]:
        return {"given": self.given}

    def seek(self, position: Mapping[str, Any]) -> None:
        self.given = position["given"]


class Play(Operator):
    """One episode per row, all stepped together.

    Args:
        environment: name of a Gymnasium environment with discrete actions.
        greedy: always take the most likely action.
        rollout: role that acts.
    """

    granularity: ClassVar[Granularity] = "row"
    environment: str = "CartPole-v1"
    greedy: bool = False
    rollout: Reads[Actor] = Role("rollout")

    @property
    def effects(self) -> frozenset[str]:
        return frozenset({"greedy"} if self.greedy else ())

    def __call__(self, seeds: SeedBatch, key: Key = INJECTED, metrics: Metrics = INJECTED) -> Episodes:
        environments = [gymnasium.make(self.environment) for _ in seeds.row_id]
        started = [
            environment.reset(seed=seed)[0] for environment, seed in zip(environments, seeds.seed.tolist(), strict=True)
        ]
        draws = key.uniforms(seeds.row_id, environments[0].spec.max_episode_steps)
        now, running = torch.from_numpy(np.stack(started)), torch.ones(len(environments), dtype=torch.bool)
        cut_off, steps = torch.zeros_like(running), []
        while running.any():
            actions, log_probs = self.rollout.act(now, None if self.greedy else draws[:, len(steps)])
            rewards = torch.zeros(len(environments))
            steps.append((now.clone(), actions, running.clone(), log_probs * running, rewards))
            for i in running.nonzero().flatten().tolist():
                seen, rewards[i], ended, cut_off[i], _ = environments[i].step(int(actions[i]))
                now[i], running[i] = torch.from_numpy(seen), not (ended or cut_off[i])
                cut_off[i] &= not ended
        observations, actions, mask, log_probs, rewards = (
            torch.stack(column, 1) for column in zip(*steps, strict=True)
        )
        metrics.mean("reward/mean", rewards.sum(), len(environments))
        metrics.sum("episodes/steps", mask.sum())
        version = torch.full((len(environments),), self.rollout.receipt.version)
        return Episodes(observations, actions, mask, version, log_probs, rewards, cut_off, now)


class Bootstrap(Operator):
    """Add the value of the last state to the last reward of episodes that a time limit cut off.

    ``r_T + gamma * V(s_{T+1})`` (Pardo et al. 2018, arXiv:1712.00378, sec. 3.2), where V is 0 if the episode ended.

    Args:
        gamma: discount.
        critic: role whose values are used.
    """

    granularity: ClassVar[Granularity] = "row"
    gamma: float = Field(default=0.99, ge=0, le=1)
    critic: Reads[StateCritic] = Role("critic")

    def __call__(
        self,
        token_level_scores: c.TokenLevelScores,
        response_mask: c.ResponseMask,
        cut_off: CutOff,
        last_seen: LastSeen,
    ) -> c.TokenLevelRewards:
        last = response_mask & (response_mask.cumsum(-1) == response_mask.sum(-1, keepdim=True))
        with torch.no_grad():
            expected = self.gamma * self.critic.of_states(last_seen) * cut_off
        return token_level_scores + last * expected[:, None]


@algorithm
def cartpole(
    batch: SeedBatch, *, gamma: float = 0.99, lam: float = 0.95, ppo_epochs: int = 4, mini_batch: int | None = None
) -> tuple[Receipt, CriticUpdated]:
    """PPO (Schulman et al. 2017, arXiv:1707.06347), as for a language model: compare `flowrl.graphs.ppo`."""
    played = Play()(batch)
    values = Value(reads=Steps)(played)
    rewards = Bootstrap(gamma)(played.token_level_scores, played.response_mask, played.cut_off, played.last_seen)
    adv = GAE(gamma, lam)(rewards, values, played.response_mask)
    white = Whiten()(adv.advantages, played.response_mask)
    # Returns go up to 100 here, so values must move further than the 0.2 of rewards within [0, 1].
    critic = UpdateCritic(ValueClip(None), ppo_epochs, mini_batch, reads=Steps)(
        played, values=values, returns=adv.returns
    )
    loss = PPOClip(0.2, ratio_to="rollout")
    update = UpdateActor(loss, ppo_epochs, mini_batch, entropy=0.01, reads=Steps)
    actor = update(played, old_log_probs=played.rollout_log_probs, advantages=white)
    return Sync()(actor), critic


graph = cartpole(mini_batch=8)


def training() -> Training:
    """Train until greedy actions balance 100 held-out poles for 475 of 500 steps on average."""
    job = graph.bind(actor=Policy(), critic=Values(), rollout=Acting())
    held_out = Validation(
        Seeds("held out", number=100), every=5, changes={"play.greedy": True}, until="play", goal=475.0, batch=100
    )
    return Training(job, Seeds(), steps=STEPS, prompts=32, seed=SEED, validation=held_out)


if __name__ == "__main__":
    training().run([Terminal()])
