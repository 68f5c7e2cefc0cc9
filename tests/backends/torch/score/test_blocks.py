"""Tests of `blocks.py`: which blocks are recomputed, and where their inputs are meanwhile; `test_memory.py` in
``tests/backends/torch/meshes`` has the results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from flowrl.backends import TorchTrainer
from flowrl.backends.torch.score import blocks
from flowrl.backends.torch.score.blocks import blocks_of
from flowrl.errors import BindError
from tests.backends.torch.sizing.counting import ROWS, Sum, batch, folder_of
from tests.backends.torch.train.trainers import CONTEXT, MiniBatch

LAYERS = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return folder_of(tmp_path_factory.mktemp("model"), "llama", num_hidden_layers=LAYERS, hidden_size=64, head_dim=16)


@pytest.mark.parametrize(
    ("checkpointing", "passes"),
    [(False, [1] * 5), (True, [2] * 5), ("offload", [2] * 5), (2, [2, 1, 2, 1, 2]), (3, [2, 1, 1, 2, 1])],
)
def test_a_number_recomputes_each_nth_block(
    folder: str, checkpointing: Any, passes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[tuple[int, ...]] = []

    def to_cpu(tensor: torch.Tensor) -> torch.Tensor:
        moved.append(tuple(tensor.shape))
        return tensor.clone()

    monkeypatch.setattr(blocks, "to_cpu", to_cpu)
    engine = TorchTrainer(folder, device="cpu", gradient_checkpointing=checkpointing).build(CONTEXT)
    counts = [0] * LAYERS

    def counting(number: int) -> Any:
        return lambda *_: counts.__setitem__(number, counts[number] + 1)

    for number, block in enumerate(blocks_of(engine.model)):
        block.self_attn.register_forward_hook(counting(number))
    moved.clear()
    rows = batch()
    engine.update(rows, [MiniBatch(torch.arange(ROWS), torch.ones(rows.response_mask.shape), None)], Sum())
    assert counts == passes
    states = (1, rows.input_ids.numel(), 64)
    assert [shape for shape in moved if shape == states] == [states] * (LAYERS if checkpointing == "offload" else 0)


def test_a_model_that_recomputes_all_or_nothing_is_refused(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "blocks_of", lambda module: [])
    for part in (2, "offload"):
        with pytest.raises(BindError, match=r"gradient_checkpointing=True.*\[model.gradient-checkpointing\]"):
            TorchTrainer(folder, device="cpu", gradient_checkpointing=part).build(CONTEXT)
    TorchTrainer(folder, device="cpu", gradient_checkpointing=True).build(CONTEXT)


def test_blocks_are_those_of_the_architecture(folder: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert blocks_of(model) == [*model.model.layers] == blocks_of(model.model)
