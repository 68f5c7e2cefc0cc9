"""Small operators, graphs and backends that load nothing, for tests of the kernel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from flowrl import columns as c
from flowrl.core.operators.operator import Operator
from flowrl.graph import Graph, algorithm
from flowrl.graphs import ppo
from flowrl.operators import Generate, Repeat, Reward
from flowrl.protocols.backend import Backend
from flowrl.protocols.protocols import Critic, Rollout, Trainer
from flowrl.records import PromptBatch, Receipt, RolloutBatch, Updated


def exact(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """1 if the response equals the ground truth, else 0."""
    return float(solution_str == ground_truth)


class LengthPenalty(Operator):
    """Rewrites scores."""

    coef: float = Field(0.01, ge=0)

    def __call__(self, token_level_scores: c.TokenLevelScores, response_mask: c.ResponseMask) -> c.TokenLevelScores:
        return torch.where(response_mask, token_level_scores - self.coef, token_level_scores)


class Clip(Operator):
    """Rewrites scores, too."""

    limit: float = 1.0

    def __call__(self, token_level_scores: c.TokenLevelScores) -> c.TokenLevelScores:
        return token_level_scores.clamp(-self.limit, self.limit)


class Mix(Operator):
    """Two scores into one."""

    weight: float = 0.5

    def __call__(self, first: c.TokenLevelScores, second: c.TokenLevelScores) -> c.TokenLevelScores:
        return torch.lerp(first, second, self.weight)


class Split(NamedTuple):
    """Two outputs of different kinds."""

    values: c.Values
    returns: c.Returns


class Impure(NamedTuple):
    """A record with a bare number in it."""

    values: c.Values
    temperature: float


class TwoHeads(Operator):
    """One column in, a record out."""

    def __call__(self, values: c.Values) -> Split:
        return Split(values, 2 * values)


class Clipped(Operator):
    """Rewrites values."""

    def __call__(self, values: c.Values) -> c.Values:
        return values.clamp(-1, 1)


class Waits(Operator):
    """Passes on the record of an update."""

    def __call__(self, updated: Updated) -> Updated:
        return updated


@algorithm
def scored(batch: PromptBatch, n: int = 2, fn: Any = exact) -> Any:
    """The smallest evaluation: responses and their scores."""
    prompts = Repeat(n)(batch)
    return Reward(fn)(Generate()(prompts), prompts)


@algorithm
def two_rewards(batch: PromptBatch) -> Any:
    """Two nodes that write columns of the same name."""
    prompts = Repeat(2)(batch)
    rollout = Generate()(prompts)
    first = Reward(exact).named("first")(rollout, prompts)
    second = Reward(exact, timeout=1.0).named("second")(rollout, prompts)
    return Mix()(first, second)


class TrainerEngine:
    """The members of `Trainer`."""

    version = 0

    def log_probs(self, batch: Any) -> Tensor: ...
    def update(self, batch: Any, mini_batches: Any, loss: Any) -> Any: ...
    def weights(self) -> Iterator[tuple[str, Tensor]]: ...
    def save_pretrained(self, folder: str) -> None: ...


class CriticEngine:
    """The members of `Critic`."""

    version = 0

    def values(self, batch: Any) -> Tensor: ...
    def update(self, batch: Any, mini_batches: Any, loss: Any) -> Any: ...


class RolloutEngine:
    """The members of `Rollout`."""

    receipt: Receipt | None = None
    tokenizer: Any = None

    def generate(self, *arguments: Any) -> Any: ...
    def sync(self, source: Any) -> Receipt: ...


class FakeTrainer(Backend):
    """A backend; building it is an error, since nothing may load before a job runs."""

    serves = (Trainer,)

    lr: float = 1e-3

    def build(self, context: Any) -> TrainerEngine:
        raise AssertionError("built")


class FakeCritic(Backend):
    """See `FakeTrainer`."""

    serves = (Critic,)

    def build(self, context: Any) -> CriticEngine:
        raise AssertionError("built")


class FakeRollout(Backend):
    """See `FakeTrainer`."""

    serves = (Rollout,)

    model: str = "one"

    def build(self, context: Any) -> RolloutEngine:
        raise AssertionError("built")


BINDINGS: dict[str, Any] = {
    "rollout": FakeRollout(),
    "actor": FakeTrainer(),
    "ref": FakeTrainer(lr=0.0),
    "critic": FakeCritic(),
}
"""A backend for each role of `PPO`."""

PPO = ppo(exact)
"""The built-in PPO graph with its default parameters, unbound."""


def answers(rows: int = 2, prompt: int = 3, response: int = 4) -> RolloutBatch:
    """A rollout of zeros whose mask is True."""
    sequence = prompt + response
    return RolloutBatch(
        prompts=torch.zeros(rows, prompt, dtype=torch.int64),
        responses=torch.zeros(rows, response, dtype=torch.int64),
        input_ids=torch.zeros(rows, sequence, dtype=torch.int64),
        attention_mask=torch.ones(rows, sequence, dtype=torch.bool),
        position_ids=torch.arange(sequence).expand(rows, sequence),
        response_mask=torch.ones(rows, response, dtype=torch.bool),
        rollout_log_probs=torch.zeros(rows, response),
        response_text=np.array(["?"] * rows, dtype=object),
        temperature=torch.ones(rows),
        policy_version=torch.zeros(rows, dtype=torch.int64),
        token_version=torch.zeros(rows, response, dtype=torch.int64),
    )


def wires(graph: Graph, node: str) -> dict[str, str]:
    """The source of each field of a node's ports."""
    return {str(field): str(edge) for field, edge in graph[node].inputs.items()}


def readers(graph: Graph, edge: str) -> set[str]:
    return {n for n in graph.nodes for source in wires(graph, n).values() if source == edge}
