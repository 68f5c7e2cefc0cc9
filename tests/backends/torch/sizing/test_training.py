"""Tests of `training.py`, `trace.py`, `weights.py`, `logits.py` and `live_bytes.py`: the predicted memory of a trainer is
that of a real update on this CPU.

Weights, gradients and optimizer states are exact; activations and logits are within 10 %, which `counting.py` counts
another way: it asks all storages for their size after every operation, where the prediction runs without data.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Qwen3MoeConfig

from flowrl.backends import SGD, LoRA, TorchCritic, TorchScorer, TorchTrainer
from flowrl.backends.torch.sizing.training import Engine
from flowrl.errors import BindError
from flowrl.protocols.footprint import Demand
from tests.backends.torch.sizing.counting import PROMPT, RESPONSE, ROWS, Measured, config, folder_of, update
from tests.support.errors import raises

RANK: Any = SimpleNamespace(seed=0, rank=0, world_size=1)
DEMAND = Demand(PROMPT, RESPONSE, ROWS, None, "cpu", 1 << 40)


def measured(folder: str, **settings: Any) -> Measured:
    return update(TorchTrainer(folder, device="cpu", **settings).build(RANK))


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dense": ("llama", {}, {}),
    "tied, a large vocabulary": ("llama", {"tie_word_embeddings": True, "vocab_size": 9000}, {}),
    "bfloat16": ("llama", {}, {"dtype": "bfloat16"}),
    "checkpointed": ("llama", {}, {"gradient_checkpointing": True}),
    "bfloat16, checkpointed, a large vocabulary": (
        "llama",
        {"vocab_size": 9000},
        {"dtype": "bfloat16", "gradient_checkpointing": True},
    ),
    "LoRA": ("llama", {}, {"lora": LoRA(r=8)}),
    "LoRA, bfloat16, checkpointed": (
        "llama",
        {},
        {"lora": LoRA(r=4, targets=("q_proj",)), "dtype": "bfloat16", "gradient_checkpointing": True},
    ),
    "experts": ("moe", {}, {}),
    "experts, balanced": ("moe", {}, {"router_aux_loss_coef": 0.01}),
    "padded": ("llama", {}, {"attention": "eager"}),
    "SGD": ("llama", {}, {"optimizer": SGD(lr=0.1)}),
}


@pytest.mark.parametrize("case", CASES)
def test_an_update_takes_what_is_predicted(case: str, tmp_path: Path) -> None:
    kind, changes, settings = CASES[case]
    folder = folder_of(tmp_path, kind, **changes)
    found = measured(folder, **settings)
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()  # so that a prediction cannot read weights
    footprint = TorchTrainer(folder, **settings).footprint(DEMAND)
    parts = footprint.calls["update"]
    assert footprint.awake == {"weights": found.weights, "optimizer states": found.states}
    assert parts["gradients"] == found.gradients
    assert parts["activations"] + parts["logits"] == pytest.approx(found.passes, rel=0.1)
    activations = found.peak["activations"] - found.gradients
    assert parts["activations"] == pytest.approx(activations, rel=0.1)
    assert parts["logits"] == pytest.approx(found.peak.get("logits", 0), rel=0.1, abs=0.02 * found.passes)
