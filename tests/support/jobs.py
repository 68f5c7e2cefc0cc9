"""Small jobs for tests: prompts in a file, and PPO and GRPO bound to tiny models."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flowrl import graphs
from flowrl.backends import SGD, Backend, TorchCritic, TorchRollout, TorchScorer, TorchTrainer
from flowrl.data.proto.dataproto import DataProto
from flowrl.data.text.tokenizer import assemble
from flowrl.graph import Graph
from flowrl.records import PromptBatch, RolloutBatch
from flowrl.run.training.job import Job
from tests.support.rewards import digits

Rows = Sequence[Sequence[int]]


def write_prompts(path: Path, count: int = 12) -> str:
    """A JSONL file of prompts of unequal length."""
    with path.open("w") as lines:
        for i in range(count):
            record = {
                "prompt": [{"role": "user", "content": "abc"[: 1 + i % 3] + str(i)}],
                "data_source": "test",
                "reward_model": {"ground_truth": str(i)},
                "extra_info": {"index": i},
            }
            lines.write(json.dumps(record) + "\n")
    return str(path)


def job_of(
    algorithm: str, folder: str, reward: Any = digits, *, optimizer: Any = None, trainer: Any = None, **parameters: Any
) -> Job:
    """An algorithm of `flowrl.graphs`, by name, bound to the model in `folder`; see `bind_tiny`.

    Args:
        optimizer: of actor and critic, SGD by default.
        trainer: further settings of the actor.
        parameters: of the algorithm.
    """
    parameters = {"n": 1 if algorithm == "ppo" else 4, "max_new_tokens": 6} | parameters
    return bind_tiny(getattr(graphs, algorithm)(reward, **parameters), folder, optimizer=optimizer, trainer=trainer)


def bind_tiny(
    graph: Graph, folder: str, *, optimizer: Any = None, trainer: Any = None, device: str = "cpu", **backends: Backend
) -> Job:
    """Bind those of PPO's four roles that the graph has to the model in `folder`; the rollout shares actor weights.

    Args:
        optimizer: of actor and critic, SGD by default.
        trainer: further settings of the actor.
        backends: of other roles, or instead of the defaults; ignored for roles that the graph does not have.
    """
    optimizer = optimizer or SGD(lr=0.05)
    roles: dict[str, Backend] = {
        "actor": TorchTrainer(folder, optimizer=optimizer, device=device, **(trainer or {})),
        "critic": TorchCritic(folder, optimizer=optimizer, device=device),
        "ref": TorchScorer(folder, device=device),
        "rollout": TorchRollout(),
    } | backends
    return graph.bind(**{role: roles[role] for role in graph.roles()})


def prompt_batch(rows: Rows, width: int | None = None) -> PromptBatch:
    """Token ids of prompts, as a batch; row ``i`` is ``"0/i/0"``."""
    width = width or max(map(len, rows))
    ids = [f"0/{i}/0" for i in range(len(rows))]
    return PromptBatch(
        prompts=torch.tensor([[0] * (width - len(row)) + list(row) for row in rows]),
        prompt_mask=torch.tensor([[False] * (width - len(row)) + [True] * len(row) for row in rows]),
        uid=column(ids),
        row_id=column(ids),
        data_source=column(["test"] * len(rows)),
        ground_truth=column(ids),
        extra_info=column([{}] * len(rows)),
        raw_prompt=column([[{"role": "user", "content": "?"}]] * len(rows)),
    )


def rollout_batch(prompts: PromptBatch, responses: Rows, version: int = 0) -> RolloutBatch:
    """Responses to the prompts at temperature 1, sampled by version `version` of the policy, log-probs 0."""
    width = max(map(len, responses))
    mask = torch.tensor([[True] * len(row) + [False] * (width - len(row)) for row in responses])
    tokens = torch.tensor([list(row) + [0] * (width - len(row)) for row in responses])
    input_ids, attention_mask, position_ids = assemble(prompts.prompts, prompts.prompt_mask, tokens, mask)
    return RolloutBatch(
        prompts=prompts.prompts,
        responses=tokens,
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=position_ids,
        response_mask=mask,
        rollout_log_probs=torch.zeros(mask.shape),
        response_text=column(["?"] * len(mask)),
        temperature=torch.ones(len(mask)),
        policy_version=torch.full((len(mask),), version),
        token_version=torch.where(mask, version, -1),
    )


def proto(batch: PromptBatch) -> DataProto:
    """The batch as the container that executors take."""
    return DataProto(batch._asdict())


def column(values: Sequence[Any]) -> np.ndarray:
    """A column of objects of any type."""
    out = np.empty(len(values), dtype=object)
    out[:] = values
    return out


def weights_of(engine: Any) -> dict[str, torch.Tensor]:
    """A copy of a trainer's weights."""
    return {name: tensor.detach().clone() for name, tensor in engine.weights()}


PROMPTS = proto(prompt_batch([[10, 11], [12], [13, 14, 15]]))
"""Three prompts of unequal length."""
