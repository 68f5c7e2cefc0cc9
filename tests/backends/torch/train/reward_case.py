"""The case of `fsdp_cases.py` that trains a reward model."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from flowrl.backends import SGD, TorchRewardTrainer
from flowrl.backends.torch.score.rows import last_of
from flowrl.data.balance import Shard
from flowrl.operators import BradleyTerry
from flowrl.operators.losses.objective import TokenObjective
from flowrl.operators.updates.mini_batches import rank_parts
from tests.support.models import ragged

BT = TokenObjective(BradleyTerry(), "seq-mean-token-mean")


def reward_model(ranks: Any) -> dict[str, Any]:
    """Two updates on groups of rows that are split over ranks and micro-batches; the head of the causal LM is new."""
    settings = {"max_tokens": 20, "optimizer": SGD(lr=0.05, momentum=0.9), "grad_clip": None}
    engine, batch = ranks.build(TorchRewardTrainer, "llama", **settings), ragged(7)
    own = ranks.own_rows(range(7))
    before = engine.rewards(_rows(batch, own))
    columns = {
        "token_level_scores": last_of(batch.response_mask) * torch.linspace(0.0, 1.0, 7)[:, None],
        "uid": np.array([f"{row % 3}" for row in range(7)], dtype=object),
        "margin": torch.full((7,), 0.1),
    }
    shard = Shard(dist.get_rank(), dist.get_world_size(), None, None) if dist.is_initialized() else None
    index = [torch.tensor(rows) for rows in (range(7), [6, 3, 0], [1, 4, 5, 2])]
    parts = rank_parts(index, BT.weights, batch.response_mask, batch.attention_mask, shard, columns)
    metrics = engine.update(batch, parts, BT)
    folder = str(ranks.folder / f"saved-reward-model-{ranks.world_size}")
    engine.save_pretrained(folder)
    return {"rows": own, "before": before, "metrics": metrics, "after": engine.rewards(batch), "folder": folder}


def _rows(batch: Any, rows: list[int]) -> Any:
    return batch._replace(**{name: x[rows] for name, x in batch._asdict().items() if isinstance(x, torch.Tensor)})
