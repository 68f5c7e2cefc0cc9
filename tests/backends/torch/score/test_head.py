"""Heads that are sent with hidden states: they give the log-probs of their model, and equal those of their folder."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from flowrl.backends import TorchScorer
from flowrl.backends.torch.train import shards
from flowrl.operators import FullGKD
from flowrl.operators.losses.objective import TokenObjective
from flowrl.protocols.heads import Head, HiddenStates, HiddenStateScorer
from flowrl.protocols.protocols import MiniBatch
from tests.backends.torch.train.trainers import CONTEXT, Folder, trainer
from tests.nightly import nightly
from tests.operators.engines.test_distillation import Stated
from tests.support.errors import raises
from tests.support.models import Ragged, ragged, tiny_folder, unpadded


def scorer(folder: str, **settings: Any) -> Any:
    return TorchScorer(folder, device="cpu", **settings).build(CONTEXT)


def distributions(hidden: HiddenStates, batch: Ragged, row: int) -> Tensor:
    """Log-probs of the head for a row's states: ``[tokens vocabulary]``."""
    on = batch.response_mask[row]
    return hidden.head.log_probs(hidden.states[row][on], batch.temperature[row].expand(int(on.sum())))


@pytest.mark.parametrize(
    "kind", ["llama", nightly("qwen2"), nightly("gpt2"), "gemma2", "granite", nightly("cohere"), "phi"]
)
def test_hidden_states_and_head_give_the_log_probs_of_the_model(kind: str, folder: Folder) -> None:
    """Tied and untied heads, with a bias, a scale or a soft cap; compared with transformers."""
    batch, engine = ragged(), scorer(folder(kind), max_tokens=30)
    assert isinstance(engine, HiddenStateScorer)
    hidden = engine.last_states(batch)
    assert hidden.states.dtype == torch.float32 and hidden.states.shape == (*batch.response_mask.shape, 64)
    assert hidden.states[~batch.response_mask].eq(0).all()
    model: Any = AutoModelForCausalLM.from_pretrained(folder(kind), dtype=torch.float64, attn_implementation="eager")
    for row, ids, places in unpadded(batch):
        logits = model.eval()(input_ids=ids).logits[0, places - 1] / batch.temperature[row].double()
        found = distributions(hidden, batch, row).double()
        torch.testing.assert_close(found, logits.log_softmax(-1).detach(), atol=2e-5, rtol=0)


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_a_head_computes_in_the_dtype_of_its_model(kind: str, folder: Folder) -> None:
    batch, engine = ragged(), scorer(folder(kind), dtype="bfloat16")
    hidden, log_probs = engine.last_states(batch), engine.log_probs(batch)
    exact = scorer(folder(kind)).log_probs(batch)
    for row in range(len(batch.input_ids)):
        on = batch.response_mask[row]
        targets = batch.input_ids[row, -len(on) :][on]
        with torch.autocast("cpu", torch.bfloat16, enabled=row % 2 == 0):  # independent of autocast
            found = distributions(hidden, batch, row).gather(1, targets[:, None]).squeeze(1)
        torch.testing.assert_close(found, log_probs[row][on], atol=1e-3, rtol=0)
    assert (log_probs - exact).abs().max() > 5e-3  # larger than the tolerance above


def test_a_pickled_head_is_small_and_compares_by_content(folder: Folder) -> None:
    one, other = (scorer(folder(kind)).last_states(ragged()).head for kind in ("llama", "qwen2"))
    sent = pickle.dumps(one)
    assert len(sent) < 1000
    assert isinstance(one, Head) and pickle.loads(sent) == one == scorer(folder("llama")).last_states(ragged()).head
    assert one != other


def updated(engine: Any, batch: Stated) -> None:
    objective = TokenObjective(FullGKD())
    weights = objective.weights(batch.response_mask)
    engine.update(batch, [MiniBatch(torch.arange(len(weights)), weights)], objective)


def test_a_trainer_reads_a_head_once(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    original = shards.read_head

    def counted(path: str) -> dict[str, Tensor]:
        read.append(path)
        return original(path)

    monkeypatch.setattr(shards, "read_head", counted)
    teacher, engine = scorer(folder("qwen2")), trainer(folder("llama"), logprob_chunk=4)
    for seed in range(2):
        rows = ragged(seed=seed)
        updated(engine, Stated(*rows[:5], *teacher.last_states(rows)))
    assert read == [folder("qwen2")]
    assert len(engine.residence.extra_modules) == 1  # and it is offloaded with the trainer


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_a_folder_changed_after_loading_is_refused(kind: str, tmp_path: Path) -> None:
    path = tiny_folder(tmp_path, kind)
    teacher, engine, rows = scorer(path), trainer(tiny_folder(tmp_path, seed=3)), ragged()
    weights = load_file(Path(path, "model.safetensors"))
    name = "lm_head.weight" if kind == "llama" else "model.embed_tokens.weight"
    weights[name][3, 4] += 1e-3
    save_file(weights, Path(path, "model.safetensors"), {"format": "pt"})
    with raises("model.head-changed", path=path):
        updated(engine, Stated(*rows[:5], *teacher.last_states(rows)))
    assert engine.version == 0


def test_read_head_reads_only_the_head_of_a_folder(folder: Folder, tmp_path: Path) -> None:
    """From safetensors, and from other folders by loading the model."""
    for kind in ("qwen2", "phi"):
        model: Any = AutoModelForCausalLM.from_pretrained(folder(kind), dtype=torch.float32)
        head = dict(model.get_output_embeddings().named_parameters())
        found = shards.read_head(folder(kind))
        assert found.keys() == head.keys() and all(torch.equal(found[name], head[name]) for name in head)
    model.half().save_pretrained(tmp_path / "half")
    found = shards.read_head(str(tmp_path / "half"))
    assert all(x.dtype == torch.float32 and torch.equal(x, head[name].half().float()) for name, x in found.items())
    with raises("model.not-found", found="does not exist"):
        shards.read_head(str(tmp_path / "none"))


def test_a_model_without_a_linear_head_is_refused(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = scorer(folder("gemma2"))
    monkeypatch.setattr(engine._scorer, "after_head", None)
    with raises("model.no-linear-head", architecture="Gemma2ForCausalLM"):
        engine.last_states(ragged())
    engine.sleep()
    with raises("engine.asleep", call="last_states"):
        engine.last_states(ragged())
