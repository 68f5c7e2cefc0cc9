"""A reward model is trained on pairs, validated on held-out ones, resumed, and exported as a folder."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from flowrl import After, PreferenceData, Training, Validation
from flowrl.backends import AdamW, TorchRewardModel, TorchRewardTrainer
from flowrl.data.text.tokenizer import ChatTokenizer
from flowrl.graphs import reward_model
from flowrl.operators import BradleyTerry, PPOClip, PreferenceAccuracy, UpdateRewardModel
from flowrl.records import PreferenceBatch
from flowrl.run.engine.build import EngineBuilder
from tests.docs.reference.metric_names import undocumented
from tests.support.errors import raises
from tests.support.runs import walk

pytestmark = pytest.mark.runs


def pairs(count: int, seed: int) -> list[dict[str, str]]:
    """Digits are preferred to letters."""
    draw = random.Random(seed)
    return [
        {
            "prompt": f"q{draw.randrange(100)}",
            "chosen": "".join(draw.choices("0123456789", k=draw.randrange(1, 5))),
            "rejected": "".join(draw.choices("abcdef", k=draw.randrange(1, 5))),
        }
        for _ in range(count)
    ]


HELD_OUT = pairs(40, seed=1)


def training(folder: str, run: Path, steps: int = 12, **settings: Any) -> Training:
    job = reward_model().bind(reward_model=TorchRewardTrainer(folder, AdamW(lr=0.01), device="cpu"))
    held_out = Validation(
        PreferenceData(HELD_OUT), every=100, changes={}, until="pairs",
        insert={"accuracy": After("pairs", PreferenceAccuracy())},
    )  # fmt: skip
    data = PreferenceData(pairs(64, seed=0))
    return Training(job, data, steps=steps, prompts=16, validation=held_out, folder=str(run), **settings)


def test_a_run_learns_held_out_preferences_and_writes_the_model(tiny: str, tmp_path: Path) -> None:
    run = training(tiny, tmp_path / "run").run()
    assert undocumented(run.metrics[-1]) == undocumented(k.removeprefix("val/") for k in run.validations[-1]) == []
    assert run.metrics[-1]["reward_model/loss"] < run.metrics[0]["reward_model/loss"]
    first, last = run.validations[0], run.validations[-1]
    assert last["val/reward_model/accuracy"] > 0.9 >= first["val/reward_model/accuracy"]
    assert last["val/reward_model/margin"] > first["val/reward_model/margin"]
    batch = PreferenceData(HELD_OUT).load(ChatTokenizer(tiny), 0).all().to_record(PreferenceBatch)
    saved = EngineBuilder({"r": TorchRewardModel(str(run.folder / "reward_model"), device="cpu")}, 0).engine("r")
    scores = saved.rewards(batch).double()
    lead = scores[::2] - scores[1::2]
    assert last["val/reward_model/accuracy"] == pytest.approx((lead > 0).double().mean().item())
    assert last["val/reward_model/margin"] == pytest.approx(lead.mean().item(), rel=1e-5)


def test_a_run_resumes_to_the_same_numbers(tiny: str, tmp_path: Path) -> None:
    straight = training(tiny, tmp_path / "straight", steps=4).run()
    training(tiny, tmp_path / "cut", steps=2, checkpoint_every=2).run()
    resumed = training(tiny, tmp_path / "cut", steps=4, checkpoint_every=2, resume=True).run()
    names = [name for name in straight.metrics[-1] if name.startswith("reward_model/")]
    assert len(names) == 5
    assert all(straight.metrics[-1][name] == resumed.metrics[-1][name] for name in names)
    assert _weights(straight.folder) == _weights(resumed.folder)


def _weights(folder: Path) -> bytes:
    return (folder / "reward_model" / "model.safetensors").read_bytes()


def test_a_margin_of_the_data_reaches_the_loss(tiny: str) -> None:
    """With it, the loss is that of eq. 2 of Llama 2 for the untrained model's scores."""
    rows = [{**row, "margin": 0.5 * number} for number, row in enumerate(pairs(4, seed=2))]
    stream = PreferenceData(rows).load(ChatTokenizer(tiny), 0)
    engine = EngineBuilder({"r": TorchRewardTrainer(tiny, device="cpu")}, 0).engine("r")
    batch = stream.all()
    record = batch.to_record(PreferenceBatch)
    scores = engine.rewards(record).double()
    margin = record.margin.double()
    assert margin.tolist() == [0.0, 0.0, 0.5, 0.5, 1.0, 1.0, 1.5, 1.5]
    expected = -torch.log(torch.sigmoid(scores[::2] - scores[1::2] - margin[::2])).mean()
    steps = walk(reward_model().bind(reward_model=TorchRewardTrainer(tiny)).graph, reward_model=engine)
    found = steps.step(batch, 0).metrics.compute()["reward_model/loss"]
    assert found == pytest.approx(expected.item(), rel=1e-5)


def test_settings_and_rules() -> None:
    graph = reward_model(epochs=2, mini_batch=4)
    assert graph["update_reward_model"].operator == UpdateRewardModel(ppo_epochs=2, mini_batch=4)
    assert sorted(graph.roles()) == ["reward_model"] and graph.check(prompts=6) == []
    [finding] = reward_model(mini_batch=8).check(prompts=6)
    assert finding.rule == "FR004"
    with raises("update.wrong-loss", loss="PPOClip"):
        UpdateRewardModel(PPOClip())
    assert BradleyTerry().signature.ports.keys() == {"token_level_scores", "margin", "uid"}
