"""`TorchRewardTrainer` trains what transformers computes, and its folder is loaded back with the same scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from flowrl.backends import SGD, AdamW, TorchRewardModel, TorchRewardTrainer
from flowrl.backends.torch.score.rows import last_of
from flowrl.operators import BradleyTerry
from flowrl.operators.losses.objective import TokenObjective
from flowrl.operators.updates.mini_batches import rank_parts, record
from flowrl.protocols.scorers import RewardScorer, RewardTrainer, TextRewardScorer
from flowrl.run.engine.build import EngineBuilder
from tests.backends.torch.score.test_reward_model import reference_scores, reward_folder
from tests.nightly import nightly_except
from tests.support.errors import raises
from tests.support.jobs import column
from tests.support.models import EOS, PAD, ragged, tiny_folder

BT = TokenObjective(BradleyTerry(), "seq-mean-token-mean")


def build(folder: str, seed: int = 0, **settings: Any) -> Any:
    spec = TorchRewardTrainer(folder, device="cpu", **settings)
    return EngineBuilder({"reward_model": spec}, seed).engine("reward_model")


def pairs(rows: int = 6) -> Any:
    """Ragged rows, two per pair, the first one chosen."""
    batch = ragged(rows=rows, seed=5)
    scores = last_of(batch.response_mask).float()
    scores[1::2] = 0.0
    uid = column([f"p{row // 2}" for row in range(rows)])
    margin = torch.arange(rows).div(2, rounding_mode="floor") * 0.1
    columns = {"token_level_scores": scores, "uid": uid, "margin": margin}
    return record({**batch._asdict(), **columns})


def train(engine: Any, batch: Any, steps: int = 1) -> Any:
    index = [torch.arange(len(batch.response_mask))] * steps
    columns = {name: getattr(batch, name) for name in ("token_level_scores", "uid", "margin")}
    parts = rank_parts(index, BT.weights, batch.response_mask, batch.attention_mask, None, columns)
    return engine.update(batch, parts, BT).compute()


def rows_of(batch: Any) -> list[Tensor]:
    return [ids[mask] for ids, mask in zip(batch.input_ids, batch.attention_mask, strict=True)]


@pytest.mark.parametrize("kind", nightly_except(["llama", "gpt2"], ["llama", "gpt2", "qwen2", "gemma2", "mistral"]))
@pytest.mark.parametrize("max_tokens", [None, 20], ids=["one pass", "micro-batches"])
def test_the_gradient_is_that_of_equation_1_through_transformers(
    kind: str, max_tokens: int | None, tmp_path: Path
) -> None:
    """In float64, row by row, without padding."""
    folder, batch = reward_folder(tmp_path, kind), pairs()
    engine = build(folder, optimizer=SGD(lr=1.0), grad_clip=None, max_tokens=max_tokens)
    before = {name: tensor.clone() for name, tensor in engine.state_dict()["weights"].items()}
    metrics = train(engine, batch)
    model: Any = AutoModelForSequenceClassification.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float64
    ).eval()
    scores = torch.stack([model(input_ids=row[None]).logits[0, 0] for row in rows_of(batch)])
    lead = scores[::2] - scores[1::2]
    loss = -torch.log(torch.sigmoid(lead - batch.margin[::2])).mean()
    loss.backward()
    assert metrics["reward_model/loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert metrics["reward_model/margin"] == pytest.approx(lead.mean().item(), rel=1e-3, abs=1e-5)
    assert metrics["reward_model/accuracy"] == pytest.approx((lead > 0).double().mean().item())
    after, named = engine.state_dict()["weights"], dict(model.named_parameters())
    assert after.keys() == named.keys()
    for name, parameter in named.items():
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(
            before[name].double() - after[name].double(),
            expected,
            atol=2e-5,
            rtol=2e-3,
            msg=lambda m, n=name: f"{n}: {m}",
        )


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_causal_lm_becomes_a_folder_that_transformers_and_flowrl_score_alike(kind: str, tmp_path: Path) -> None:
    folder, batch = tiny_folder(tmp_path / "lm", kind), pairs()
    engine = build(folder, optimizer=AdamW(lr=0.01))
    assert isinstance(engine, RewardTrainer) and isinstance(engine, RewardScorer)
    first = engine.rewards(batch)
    losses = [train(engine, batch)["reward_model/loss"] for _ in range(4)]
    assert losses[-1] < losses[0] and engine.version == 4
    scores, saved = engine.rewards(batch), str(tmp_path / "saved")
    assert not torch.allclose(scores, first, atol=1e-3)
    engine.save_pretrained(saved)
    config = json.loads(Path(saved, "config.json").read_text())
    assert config["architectures"][0].endswith("ForSequenceClassification") and len(config["id2label"]) == 1
    torch.testing.assert_close(reference_scores(saved, rows_of(batch)), scores, atol=1e-5, rtol=1e-5)
    loaded = EngineBuilder({"r": TorchRewardModel(saved, device="cpu")}, 0).engine("r")
    assert torch.equal(loaded.rewards(batch), scores)
    again = build(saved)  # and it is trained further
    assert torch.equal(again.rewards(batch), scores)
    model: Any = AutoModelForSequenceClassification.from_pretrained(saved).eval()
    padded = AutoTokenizer.from_pretrained(saved).pad({"input_ids": [row.tolist() for row in rows_of(batch)]})
    with torch.no_grad():
        found = model(**{name: torch.tensor(column) for name, column in padded.items()}).logits[:, 0]
    torch.testing.assert_close(found, scores, atol=1e-5, rtol=1e-5)


def test_text_is_scored_by_the_model_that_is_trained(tmp_path: Path) -> None:
    engine = build(reward_folder(tmp_path))
    talk = [{"role": "user", "content": "two?"}, {"role": "assistant", "content": "2"}]
    assert isinstance(engine, TextRewardScorer) and engine.rewards_of([talk, talk]).shape == (2,)


def test_the_seed_of_the_run_draws_the_head_of_a_causal_lm(tiny: str) -> None:
    scores = [build(tiny, seed).rewards(ragged()) for seed in (0, 0, 1)]
    assert torch.equal(scores[0], scores[1]) and not torch.equal(scores[0], scores[2])


def test_a_configuration_without_a_pad_token_gets_the_tokenizers(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path)
    config = json.loads(Path(folder, "config.json").read_text())
    Path(folder, "config.json").write_text(json.dumps({**config, "pad_token_id": None}))
    build(folder).save_pretrained(str(tmp_path / "saved"))
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["pad_token_id"] == PAD


def test_a_stored_head_is_trained_on_whatever_class_the_configuration_names(tmp_path: Path) -> None:
    """Reward models of OpenRLHF are of its own class."""
    folder, batch = reward_folder(tmp_path, "llama"), pairs()
    expected = build(folder).rewards(batch)
    file = Path(folder, "config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"architectures": ["RewardModel"]}))
    assert torch.equal(build(folder).rewards(batch), expected)


def test_the_last_token_that_is_not_padding_is_trained(tmp_path: Path) -> None:
    """Where the end of a turn is the pad token, transformers scores the token before it, and so does the update."""
    folder, batch = reward_folder(tmp_path, pad=EOS), pairs()
    ids = batch.input_ids.clone()
    ids[:, -1] = EOS
    batch = batch._replace(input_ids=ids)
    engine = build(folder)
    loss = train(engine, batch)["reward_model/loss"]
    scores = reference_scores(folder, rows_of(batch)).double()
    lead = scores[::2] - scores[1::2] - batch.margin[::2]
    assert loss == pytest.approx(float(-torch.log(torch.sigmoid(lead)).mean()), rel=1e-4)


def test_checkpoints_resume_bit_for_bit(tiny: str, tmp_path: Path) -> None:
    engine, batch = build(tiny, optimizer=AdamW(lr=0.01)), pairs()
    train(engine, batch)
    engine.save_checkpoint(str(tmp_path / "checkpoint"))
    straight = train(engine, batch, 2), engine.rewards(batch)
    other = build(tiny, seed=1, optimizer=AdamW(lr=0.01))
    other.load_checkpoint(str(tmp_path / "checkpoint"))
    resumed = train(other, batch, 2), other.rewards(batch)
    assert straight[0] == resumed[0] and torch.equal(straight[1], resumed[1]) and engine.version == other.version == 2


def test_rows_that_the_model_cannot_read_are_refused(tmp_path: Path) -> None:
    folder = reward_folder(tmp_path)
    config = Path(folder, "config.json")
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 14}))
    with raises("model.too-long", row=0, found=16, expected=14):
        train(build(folder), pairs())


def test_a_classifier_with_several_labels_is_refused(tmp_path: Path) -> None:
    with raises("model.label", labels=("LABEL_0", "LABEL_1")):
        TorchRewardTrainer(reward_folder(tmp_path, labels=2)).refuse_missing()
