"""Converted tensors of a folder are those of transformers, and their rows are read without the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import Concatenate, WeightConverter

from flowrl.backends.torch.conversions import Target, conversions, targets_of
from flowrl.backends.torch.load import skeleton, stored_tensors
from tests.support.architectures import architecture


class Counted:
    """A slice of a file that counts how often it is read."""

    reads = 0

    def __init__(self, source: Any) -> None:
        self._source = source

    def get_shape(self) -> list[int]:
        return self._source.get_shape()

    def __getitem__(self, index: Any) -> torch.Tensor:
        self.reads += 1
        return self._source[index]


@pytest.fixture
def files() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "qwen2_moe", "deepseek_v3"])
def test_rows_of_experts_are_read_from_their_own_tensors(kind: str, tmp_path: Path, files: ExitStack) -> None:
    folder = architecture(tmp_path, kind)
    truth = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    stored = {name: Counted(source) for name, source in stored_tensors(folder, files).items()}
    lm = skeleton(folder)
    found = conversions(lm, targets_of(lm, stored), stored)
    assert found.keys() == {name for name in truth if ".experts." in name}
    for name, source in found.items():
        assert source.get_shape() == truth[name].shape and source.by_rows
        before = {key: one.reads for key, one in stored.items()}
        assert torch.equal(source[1:3], truth[name][1:3])
        read = {key for key, one in stored.items() if one.reads > before[key]}
        assert {int(key.split(".experts.")[1].split(".")[0]) for key in read} == {1, 2}
        assert torch.equal(source[:], truth[name])


def test_a_conversion_that_mixes_rows_is_read_whole(tmp_path: Path) -> None:
    """Tensors that are joined along their rows."""
    lm = skeleton(architecture(tmp_path, "mistral"))
    joined = WeightConverter(["q.weight", "k.weight"], "qk.weight", [Concatenate(dim=0)])
    stored = {"a.q.weight": Counted(torch.arange(6.0).view(3, 2)), "a.k.weight": Counted(torch.ones(2, 2))}
    for one in stored.values():
        one.get_shape = lambda one=one: list(one._source.shape)  # type: ignore[method-assign]
    targets = {name: Target("a.qk.weight", joined, name[2:]) for name in stored}
    (found,) = conversions(lm, targets, stored).values()
    assert not found.by_rows and found.get_shape() == (5, 2)
    assert torch.equal(found[2:4], torch.tensor([[4.0, 5.0], [1.0, 1.0]]))
