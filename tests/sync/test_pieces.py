"""Weights that are converted a layer at a time are those that transformers converts all at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from flowrl.sync.digest import named_weights
from flowrl.sync.pieces import in_pieces
from tests.support.architectures import architecture
from tests.support.models import KINDS, tiny_folder


@pytest.mark.parametrize(
    ("kind", "layers"),
    [("llama", 0), ("mixtral", 12), ("qwen3_moe", 12), ("qwen2_moe", 12), ("deepseek_v3", 11), ("gpt_oss", 0)],
)
def test_each_layer_is_converted_by_itself(kind: str, layers: int, tmp_path: Path) -> None:
    """In a model of twelve layers, of which `layers` have experts that are stored one by one."""
    if kind in KINDS:
        folder = tiny_folder(tmp_path, kind, num_hidden_layers=12)
    else:
        windows = {"layer_types": ["full_attention"] * 12} if kind == "gpt_oss" else {}
        folder = architecture(tmp_path, kind, num_hidden_layers=12, **windows)
    model = AutoModelForCausalLM.from_pretrained(folder)
    state = model.state_dict()
    truth = sorted(revert_weight_conversion(model, dict(state)).items())
    found = list(named_weights(model))
    assert [name for name, _ in found] == [name for name, _ in truth]
    assert all(torch.equal(one, other) for (_, one), (_, other) in zip(found, truth, strict=True))
    pieces = in_pieces(model, state)
    assert sorted(name for piece in pieces for name in piece.names) == sorted(state)
    converted = [piece for piece in pieces if piece.converted]
    assert [len(piece.names) for piece in converted] == [2] * layers
    assert all(len({name.split(".")[2] for name in piece.names}) == 1 for piece in converted)
    shapes = {name: like.shape for piece in pieces for name, like in piece.stored.items()}
    assert shapes == {name: tensor.shape for name, tensor in truth}
