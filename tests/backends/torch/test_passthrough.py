"""A model folder is saved with all of its tensors, also those that training does not load."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForImageTextToText

from flowrl.backends import SGD, TorchRollout, TorchTrainer
from tests.backends.torch.train.trainers import CONTEXT
from tests.nightly import nightly_except
from tests.support.architectures import SETTINGS, architecture, multimodal
from tests.support.jobs import PROMPTS, job_of
from tests.support.models import KINDS, tiny_folder

RANK: Any = SimpleNamespace(seed=0, rank=0, world_size=1)
Make = Callable[[Path], str]
TRAINABLE = [kind for kind in SETTINGS if kind not in ("deepseek_v4", "rwkv", "xlstm", "recurrent_gemma")]
EVERY = ["llama", "gemma2", "mixtral", "multimodal"]


def folder_of(kind: str, path: Path) -> str:
    if kind == "multimodal":
        return multimodal(path)
    return tiny_folder(path, kind) if kind in KINDS else architecture(path, kind)


def tensors(folder: str | Path) -> dict[str, Tensor]:
    return {name: tensor for file in Path(folder).glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Same names, shapes, dtypes and bits."""
    assert found.keys() == expected.keys()
    assert [name for name in found if found[name].dtype != expected[name].dtype] == []
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize("kind", nightly_except(EVERY, [*KINDS, *TRAINABLE, "multimodal"]))
def test_a_folder_is_saved_as_it_was_before_the_first_step(kind: str, tmp_path: Path) -> None:
    source = folder_of(kind, tmp_path / "source")
    TorchTrainer(source, device="cpu").build(CONTEXT).save_pretrained(str(tmp_path / "saved"))
    assert_equal(tensors(tmp_path / "saved"), tensors(source))


@pytest.mark.parametrize("offload", [False, True])
def test_experts_that_are_not_loaded_are_saved_as_they_were(offload: bool, tmp_path: Path) -> None:
    """Of a layer for multi-token prediction, which transformers ignores by its number."""
    source = architecture(tmp_path / "source", "deepseek_v3")
    (file,) = Path(source).glob("*.safetensors")
    stored = load_file(file)
    experts = {name: tensor for name, tensor in stored.items() if ".layers.1.mlp.experts." in name}
    stored |= {name.replace(".layers.1.", ".layers.61."): tensor + 1 for name, tensor in experts.items()}
    save_file(stored, file, metadata={"format": "pt"})
    try:
        TorchTrainer(source, device="cpu", offload=offload).build(RANK).save_pretrained(str(tmp_path / "saved"))
    finally:
        if offload:
            dist.destroy_process_group()
    assert experts
    assert_equal(tensors(tmp_path / "saved"), stored)


def test_training_the_text_of_a_multimodal_model_keeps_its_tower(tmp_path: Path) -> None:
    """The saved folder is of the multimodal class, complete, and its language model is the trained one."""
    source = multimodal(tmp_path / "source")
    job = job_of("grpo", source, n=2, kl_coef=0.0, optimizer=SGD(lr=1.0)).edit(
        bind={"rollout": TorchRollout(source, device="cpu")}
    )
    with job.open() as steps:
        steps.sync()
        steps.step(PROMPTS, 0)
        steps.save_pretrained("actor", tmp_path / "saved")
    before, after = tensors(source), tensors(tmp_path / "saved")
    assert before.keys() == after.keys()
    tower = {name for name in before if ".visual." in name}
    assert tower and all(torch.equal(before[name], after[name]) for name in tower)
    assert any(not torch.equal(before[name], after[name]) for name in before.keys() - tower)
    model, report = AutoModelForImageTextToText.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert type(model).__name__ == "Qwen3_5ForConditionalGeneration"
    loaded = model.state_dict()
    assert all(torch.equal(loaded[name], after[name]) for name in tower)
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["model_type"] == "qwen3_5"
