"""`Replay`: rows of earlier steps, sampled by priority, behind the rows of this step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from pydantic import Field
from torch import Tensor

from flowrl import columns as c
from flowrl.core.operators.effects import Effect
from flowrl.core.operators.operator import Granularity, Operator
from flowrl.core.operators.ports import INJECTED
from flowrl.core.operators.session import State
from flowrl.data.keys import Key
from flowrl.data.metrics import Metrics
from flowrl.operators.advantages.per_token import select
from flowrl.padding import assemble, pad_left, pad_right


class Replayable(Protocol):
    """Sampled rows, with the log-probs of the policy that sampled them."""

    @property
    def input_ids(self) -> c.InputIds: ...
    @property
    def attention_mask(self) -> c.AttentionMask: ...
    @property
    def response_mask(self) -> c.ResponseMask: ...
    @property
    def rollout_log_probs(self) -> c.RolloutLogProbs: ...
    @property
    def temperature(self) -> c.Temperature: ...
    @property
    def policy_version(self) -> c.PolicyVersion: ...


class Replayed(NamedTuple):
    """The rows of a step, and rows of earlier steps with their own versions and advantages."""

    prompts: c.Prompts
    responses: c.Responses
    input_ids: c.InputIds
    attention_mask: c.AttentionMask
    position_ids: c.PositionIds
    response_mask: c.ResponseMask
    rollout_log_probs: c.RolloutLogProbs
    temperature: c.Temperature
    policy_version: c.PolicyVersion
    advantages: c.Advantages


class Replay(Operator):
    """Add rows of earlier steps to those of this step, sampled by priority (Schaul et al. 2016, arXiv:1511.05952).

    A row's priority is the mean absolute advantage of its tokens, as it was when the row was sampled; rows without an
    advantage are not stored. A step adds up to `rows` different rows, each drawn with a probability proportional to
    ``priority ** alpha``. The stored rows are in checkpoints.

    Replayed rows have the `policy_version` and the log-probs of the policy that sampled them, so the update bounds
    their age (``UpdateActor(replayed=max_age)``), and its loss corrects for it: ``PPOClip(ratio_to="rollout")``, or
    `RolloutCorrection` after this node.

    Reports ``replay/stored`` and ``replay/replayed`` in rows, and ``replay/age_max`` in versions.

    Args:
        rows: most rows to add in a step.
        max_age: rows older than so many versions are dropped.
        capacity: most rows to store; the oldest are dropped.
        alpha: 0 draws uniformly, 1 in proportion to the priority.
    """

    granularity: ClassVar[Granularity] = "batch"
    new_axes: ClassVar[tuple[str, ...]] = ("batch", "prompt", "response")

    rows: int = Field(ge=1)
    max_age: int = Field(ge=1)
    capacity: int = Field(default=1024, ge=1)
    alpha: float = Field(default=0.6, ge=0)

    stored = State(lambda self: list[dict[str, Any]]())

    @property
    def effects(self) -> frozenset[str]:
        """``{"replays"}``."""
        return frozenset({Effect.REPLAYS})

    def __call__(
        self, rollout: Replayable, advantages: c.Advantages, key: Key = INJECTED, metrics: Metrics = INJECTED
    ) -> Replayed:
        fresh = [_row(rollout, advantages, row) for row in range(len(advantages))]
        newest = max((row["version"] for row in fresh), default=-1)
        live = [row for row in self.stored.value if newest - self.max_age <= row["version"] <= newest]
        drawn = self._drawn(live, key)
        keep = [row for row in fresh if row["version"] >= 0 and row["priority"] > 0]
        self.stored.value = [*live, *keep][-self.capacity :]
        metrics.sum("replay/stored", len(self.stored.value))
        metrics.sum("replay/replayed", len(drawn))
        if drawn:
            metrics.max("replay/age_max", newest - min(row["version"] for row in drawn))
        return _batch([*fresh, *drawn], advantages.device)

    def _drawn(self, stored: Sequence[dict[str, Any]], key: Key) -> list[dict[str, Any]]:
        """Different rows by priority: the largest of ``alpha log priority`` plus Gumbel noise."""
        uniform = torch.rand(len(stored), generator=key.generator(), dtype=torch.float64).clamp(min=1e-300).tolist()
        noisy = [
            self.alpha * math.log(row["priority"]) - math.log(max(-math.log(u), 1e-300))
            for row, u in zip(stored, uniform, strict=True)
        ]
        order = sorted(range(len(stored)), key=noisy.__getitem__, reverse=True)
        return [stored[i] for i in sorted(order[: self.rows])]


def _row(rollout: Replayable, advantages: Tensor, row: int) -> dict[str, Any]:
    """A row as plain values, which a checkpoint holds."""
    width = rollout.input_ids.shape[1] - advantages.shape[1]
    attended, ids = rollout.attention_mask[row], rollout.input_ids[row]
    present = attended[width:]
    mask = rollout.response_mask[row][present]
    on = rollout.response_mask[row]
    sizes = select(advantages[row], on).abs().sum(dtype=torch.float64) / max(1, int(on.sum()))
    return {
        "prompt": ids[:width][attended[:width]].tolist(),
        "response": ids[width:][present].tolist(),
        "mask": mask.tolist(),
        "log_probs": select(rollout.rollout_log_probs[row], on)[present].tolist(),
        "advantages": select(advantages[row], on)[present].tolist(),
        "temperature": float(rollout.temperature[row]),
        "version": int(rollout.policy_version[row]),
        "priority": float(sizes),
    }


def _batch(rows: Sequence[dict[str, Any]], device: torch.device) -> Replayed:
    prompts, prompt_mask = pad_left([row["prompt"] for row in rows], 0)
    responses, present = pad_right([row["response"] for row in rows], 0)

    def spread(name: str, dtype: torch.dtype) -> Tensor:
        column = torch.zeros(present.shape, dtype=dtype)
        column[present] = torch.tensor([value for row in rows for value in row[name]], dtype=dtype)
        return column

    tensors = (
        prompts,
        responses,
        *assemble(prompts, prompt_mask, responses, present),
        spread("mask", torch.bool),
        spread("log_probs", torch.float32),
        torch.tensor([row["temperature"] for row in rows], dtype=torch.float32),
        torch.tensor([row["version"] for row in rows], dtype=torch.int64),
        spread("advantages", torch.float32),
    )
    return Replayed(*(tensor.to(device) for tensor in tensors))
