"""Trainers: schedules, state dicts, saved folders, and refused settings."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer
from transformers.utils import logging

from flowrl.backends import (
    SGD,
    AdamW,
    TorchCritic,
    TorchRollout,
    TorchScorer,
    TorchTrainer,
)
from flowrl.errors import ParameterError
from flowrl.protocols.protocols import MiniBatch, Trainer
from flowrl.schedules import Constant, Cosine, Linear
from tests.backends.torch.train.trainers import CONTEXT, Folder, Pull, all_rows, change, trainer
from tests.support.errors import raises
from tests.support.models import KINDS, ragged


@pytest.mark.parametrize(
    ("schedule", "reference"),
    [
        (Constant(1.0, warmup=4), lambda o: transformers.get_constant_schedule_with_warmup(o, 4)),
        (Linear(1.0, 0.0, steps=12, warmup=3), lambda o: transformers.get_linear_schedule_with_warmup(o, 3, 12)),
        (Cosine(1.0, 0.0, steps=12, warmup=3), lambda o: transformers.get_cosine_schedule_with_warmup(o, 3, 12)),
        (
            Cosine(1.0, 0.2, steps=12, warmup=3),
            lambda o: transformers.get_cosine_with_min_lr_schedule_with_warmup(o, 3, 12, min_lr_rate=0.2),
        ),
    ],
)
def test_schedules_equal_those_of_transformers(schedule: Any, reference: Callable[[Any], Any]) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = reference(optimizer)
    for step in range(13):
        assert schedule.at(step) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-12)
        optimizer.step()
        scheduler.step()


def test_schedules_equal_a_worked_example() -> None:
    assert [Constant(1.0).at(step) for step in (0, 99)] == [1.0, 1.0]
    assert [Linear(1.0, 0.5, steps=4).at(step) for step in (0, 1, 2, 4, 40)] == [1.0, 0.875, 0.75, 0.5, 0.5]
    assert [round(Cosine(1.0, 0.1, steps=4).at(step), 12) for step in (0, 2, 4, 40)] == [1.0, 0.55, 0.1, 0.1]
    assert Linear(1.0, 0.0, steps=2, warmup=2).at(2) == 1.0
    with pytest.raises(ParameterError, match="warmup=5 exceeds steps=4"):
        Linear(1.0, 0.0, steps=4, warmup=5)


def test_the_schedule_sets_the_learning_rate_of_updates_and_metrics(folder: Folder) -> None:
    batch, engine = (
        ragged(),
        trainer(folder("llama"), optimizer=SGD(lr=1e-3), schedule=Linear(1.0, 0.0, steps=4, warmup=2)),
    )
    found = [engine.update(batch, [all_rows(batch)] * n, Pull()).compute()["actor/lr"] for n in (1, 1, 2)]
    assert found == pytest.approx([0.0, 0.5e-3, 0.75e-3])
    assert change(engine, lambda: engine.update(batch, [all_rows(batch)], Pull())).eq(0).all()  # the schedule has ended


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("optimizer", [AdamW(lr=0.003), SGD(lr=0.01, momentum=0.9)])
def test_training_resumed_from_a_state_dict_is_bit_equal(kind: str, optimizer: Any, folder: Folder) -> None:
    batch, settings = (
        ragged(),
        {"optimizer": optimizer, "schedule": Cosine(1.0, 0.0, steps=8, warmup=1), "grad_clip": 1.0},
    )
    engine = trainer(folder(kind), **settings)
    steps = [all_rows(batch), MiniBatch(torch.tensor([2, 1]), batch.response_mask[[2, 1]].float())]
    engine.update(batch, steps, Pull())
    state = copy.deepcopy(engine.state_dict())
    logs = [engine.update(batch, steps, Pull()).compute() for _ in range(2)]
    resumed = trainer(folder(kind), **settings)
    copied = copy.deepcopy(state)
    resumed.load_state_dict(state)
    assert resumed.version == 1
    assert [resumed.update(batch, steps, Pull()).compute() for _ in range(2)] == logs
    assert resumed.version == engine.version == 3
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(resumed.weights(), engine.weights(), strict=True))
    torch.testing.assert_close(state, copied, atol=0, rtol=0)  # training the copy does not change the original state


def test_a_state_of_another_model_is_refused(folder: Folder) -> None:
    with raises("checkpoint.mismatch", role="actor"):
        trainer(folder("llama")).load_state_dict(trainer(folder("qwen2")).state_dict())


@pytest.mark.parametrize("backend", [TorchTrainer, TorchScorer, TorchCritic, TorchRollout])
def test_a_missing_device_is_refused_before_weights_load(backend: Any) -> None:
    for device in ("cuda:99", "gpu"):
        with raises("backend.device", backend=backend.__name__, device=device):
            backend("no such model", device=device).build(CONTEXT)


def test_loading_and_saving_show_no_progress_bars(
    folder: Folder, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    logging.enable_progress_bar()  # tests of the command line disable it
    model = folder("qwen2")
    capfd.readouterr()
    TorchTrainer(model).build(CONTEXT).save_pretrained(str(tmp_path / "saved"))
    assert logging.is_progress_bar_enabled()
    assert "it/s" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_folder_has_the_weight_names_and_reloads(kind: str, folder: Folder, tmp_path: Path) -> None:
    batch, engine = ragged(), trainer(folder(kind), optimizer=AdamW(lr=0.01))
    assert isinstance(engine, Trainer) and engine.folder == folder(kind)
    engine.update(batch, [all_rows(batch)], Pull())
    engine.save_pretrained(str(tmp_path))
    sent, stored = list(engine.weights()), load_file(tmp_path / "model.safetensors")
    assert [name for name, _ in sent] == sorted(stored)
    assert all(torch.equal(tensor, stored[name]) and not tensor.requires_grad for name, tensor in sent)
    assert torch.equal(trainer(str(tmp_path)).log_probs(batch), engine.log_probs(batch))
    chat = [{"role": "user", "content": "1 + 2"}]
    saved, reference = (AutoTokenizer.from_pretrained(path) for path in (tmp_path, folder(kind)))
    assert saved.apply_chat_template(chat, return_dict=False) == reference.apply_chat_template(chat, return_dict=False)


def test_missing_and_incomplete_folders_are_refused_by_build(folder: Folder, tmp_path: Path) -> None:
    nowhere = TorchTrainer(str(tmp_path / "nowhere"))
    with raises("model.not-found", path=str(tmp_path / "nowhere"), found="does not exist"):
        nowhere.build(CONTEXT)
    (tmp_path / "empty").mkdir()
    with raises("model.not-found", found="has no config.json"):
        TorchScorer(str(tmp_path / "empty")).build(CONTEXT)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/run.json").write_text("{}")
    shutil.copytree(folder("llama"), tmp_path / "run/actor")
    with raises("model.not-found", found="has no config.json") as caught:
        TorchScorer(str(tmp_path / "run")).build(CONTEXT)
    named = caught.value.message.rstrip(".").rpartition(": ")[2].strip("'")
    TorchScorer(named).build(CONTEXT)

    def broken(name: str, act: Callable[[Path], Any]) -> str:
        shutil.copytree(folder("llama"), tmp_path / name)
        act(tmp_path / name)
        return str(tmp_path / name)

    def remove_a_weight(path: Path) -> None:
        weights = load_file(path / "model.safetensors")
        del weights["model.layers.1.mlp.up_proj.weight"]
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})

    def truncate(path: Path) -> None:
        (path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes()[:5000])

    def remove_the_tokenizer(path: Path) -> None:
        for file in path.glob("tokenizer*"):
            file.unlink()

    with raises("model.missing-weights", missing=("model.layers.1.mlp.up_proj.weight",)):
        TorchScorer(broken("incomplete", remove_a_weight)).build(CONTEXT)
    with raises("model.not-loadable"):
        TorchScorer(broken("cut", truncate)).build(CONTEXT)
    with raises("tokenizer.cannot-load"):
        TorchTrainer(broken("without-tokenizer", remove_the_tokenizer)).build(CONTEXT)


@pytest.mark.parametrize(
    "make",
    [
        lambda: AdamW(lr=-1),
        lambda: SGD(lr=0.1, momentum=1.0),
        lambda: TorchTrainer("m", grad_clip=0),
        lambda: TorchTrainer("m", dtype="float16"),
        lambda: TorchScorer("m", max_tokens=0),
        lambda: TorchTrainer("m", optim=SGD(lr=1.0)),
    ],
)
def test_settings_out_of_range_are_refused_before_a_model_loads(make: Callable[[], Any]) -> None:
    with pytest.raises(ParameterError):
        make()
