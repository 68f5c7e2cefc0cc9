"""`TorchCritic` against the body of a plain transformers model in float64, one unpadded row at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from flowrl.backends import SGD, AdamW, TorchCritic, TorchTrainer
from flowrl.data.metrics import Metrics
from flowrl.protocols.protocols import Critic, MiniBatch
from flowrl.schedules import Linear
from tests.backends.torch.train.trainers import CONTEXT, Folder
from tests.support.errors import raises
from tests.support.models import KINDS, VOCAB, Ragged, ragged, unpadded


def critic(model: str, **settings: Any) -> Any:
    settings.setdefault("optimizer", SGD(lr=1.0))
    settings.setdefault("grad_clip", None)
    return TorchCritic(model, device="cpu", **settings).build(CONTEXT)


class Squares:
    """``(weights * (values - pull)**2).sum()``: regression of the values to the column `pull`."""

    wants_entropy = True  # ignored: a critic has no distribution over tokens
    of_distribution = None
    of_tokens = True

    def __call__(
        self, output: Tensor, entropy: Tensor | None, batch: Ragged, weights: Tensor, metrics: Metrics
    ) -> Tensor:
        assert entropy is None and output.shape == batch.pull.shape
        loss = (weights * (output - batch.pull) ** 2).sum()
        metrics.mean("critic/vf_loss", loss.detach(), weights.sum())
        return loss


def all_rows(batch: Ragged) -> MiniBatch:
    return MiniBatch(torch.arange(len(batch.input_ids)), batch.response_mask.float())


def snapshot(engine: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in engine.state_dict()["weights"].items()}


def change(engine: Any, act: Callable[[], Any]) -> dict[str, Tensor]:
    before = snapshot(engine)
    act()
    return {name: tensor.double() - before[name].double() for name, tensor in snapshot(engine).items()}


def relative_error(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    flat_a, flat_b = (torch.cat([c[name].flatten() for name in sorted(c)]) for c in (a, b))
    return float((flat_a - flat_b).norm() / flat_b.norm())


def with_random_head(engine: Any) -> Any:
    """Replace the zero head, with which values and gradients would not depend on the body."""
    state = copy.deepcopy(engine.state_dict())
    state["weights"]["value_head.weight"].normal_(0, 0.3, generator=torch.Generator().manual_seed(1))
    state["weights"]["value_head.bias"].fill_(0.25)
    engine.load_state_dict(state)
    return engine


class Float64Critic:
    """The value function in float64: hidden state before each token, times the head."""

    def __init__(self, model: str, engine: Any) -> None:
        self.body = (
            AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64, attn_implementation="eager")
            .eval()
            .base_model
        )
        weights = engine.state_dict()["weights"]
        self.weight, self.bias = (weights[f"value_head.{n}"].double().requires_grad_() for n in ("weight", "bias"))

    def values(self, batch: Ragged) -> Tensor:
        values = torch.zeros(batch.response_mask.shape, dtype=torch.float64)
        for row, ids, counted in unpadded(batch):
            states = self.body(ids).last_hidden_state[0, counted - 1]
            values[row, batch.response_mask[row]] = states @ self.weight[0] + self.bias
        return values

    def gradients(self) -> dict[str, Tensor]:
        body = {f"model.{name}": parameter.grad for name, parameter in self.body.named_parameters()}
        return {**body, "value_head.weight": self.weight.grad, "value_head.bias": self.bias.grad}


def test_default_learning_rates_match_the_docs() -> None:
    """docs/how-to/optimizer.md: 1e-6 for the actor and 1e-5 for the critic."""
    assert TorchTrainer("model").optimizer == AdamW(lr=1e-6)
    assert TorchCritic("model").optimizer == AdamW(lr=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_values_match_an_unpadded_float64_forward(kind: str, folder: Folder) -> None:
    batch, engine = ragged(), critic(folder(kind))
    assert isinstance(engine, Critic)
    assert engine.values(batch).eq(0).all()  # before any training
    with_random_head(engine)
    with torch.no_grad():
        expected = Float64Critic(folder(kind), engine).values(batch)
    found = engine.values(batch)
    assert found.dtype == torch.float32 and not found.requires_grad
    assert found[~batch.response_mask].eq(0).all() and expected.std() > 0.1
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_critic_step_matches_float64_autograd(kind: str, folder: Folder) -> None:
    batch, engine = ragged(), with_random_head(critic(folder(kind), max_tokens=50))
    reference, metrics = Float64Critic(folder(kind), engine), Metrics()
    weights = batch.response_mask * torch.rand(batch.response_mask.shape)
    loss = (weights.double() * (reference.values(batch) - batch.pull.double()) ** 2).sum()
    loss.backward()
    mini = MiniBatch(torch.arange(6), weights)
    found = change(engine, lambda: metrics.merge(engine.update(batch, [mini], Squares())))
    expected = {name: -gradient for name, gradient in reference.gradients().items()}
    assert relative_error(found, expected) < 1e-5
    norm = torch.nn.utils.get_total_norm(list(expected.values()))
    log = metrics.compute()
    assert log["critic/grad_norm"] == pytest.approx(float(norm), rel=1e-5)
    assert log["critic/vf_loss"] == pytest.approx(float(loss.detach() / weights.sum()), rel=1e-5)
    assert log["critic/lr"] == 1.0 and engine.version == 1


def test_a_critic_has_no_language_model_head(folder: Folder) -> None:
    names = snapshot(critic(folder("llama")))
    wide = [name for name, tensor in names.items() if VOCAB in tensor.shape]
    assert wide == ["model.embed_tokens.weight"]


def test_padding_and_micro_batches_do_not_change_values_or_steps(folder: Folder) -> None:
    batch = ragged(rows=10)
    engine = with_random_head(critic(folder("llama")))
    expected = engine.values(batch)
    pad = lambda column, filler: torch.nn.functional.pad(column, (4, 0), value=filler)  # noqa: E731
    padded = batch._replace(
        input_ids=pad(batch.input_ids, -100),
        attention_mask=pad(batch.attention_mask, False),
        position_ids=pad(batch.position_ids, 10**6),
    )
    assert torch.equal(engine.values(padded), expected)
    whole_step = change(engine, lambda: engine.update(batch, [all_rows(batch)], Squares()))
    for max_tokens in (1, 40):
        other = with_random_head(critic(folder("llama"), max_tokens=max_tokens))
        torch.testing.assert_close(other.values(batch), expected, atol=1e-5, rtol=1e-5)
        step = change(other, lambda other=other: other.update(padded, [all_rows(batch)], Squares()))
        assert relative_error(step, whole_step) < 1e-6


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_gradient_checkpointing_and_bfloat16_agree_with_float32(kind: str, folder: Folder) -> None:
    batch = ragged()
    plain = with_random_head(critic(folder(kind)))
    checkpointed = with_random_head(critic(folder(kind), gradient_checkpointing=True))
    in_bfloat16 = with_random_head(critic(folder(kind), gradient_checkpointing=True, dtype="bfloat16"))
    assert torch.equal(plain.values(batch), checkpointed.values(batch))
    assert in_bfloat16.values(batch).dtype == torch.float32
    torch.testing.assert_close(in_bfloat16.values(batch), plain.values(batch), atol=0.15, rtol=0.05)
    steps = [
        change(e, lambda e=e: e.update(batch, [all_rows(batch)], Squares())) for e in (plain, checkpointed, in_bfloat16)
    ]
    assert relative_error(steps[1], steps[0]) < 1e-6
    assert 0 < relative_error(steps[2], steps[0]) < 0.1


def test_a_critic_fits_fixed_returns(folder: Folder) -> None:
    batch, engine = ragged(), critic(folder("llama"), optimizer=AdamW(lr=0.01), grad_clip=1.0)
    losses = [engine.update(batch, [all_rows(batch)], Squares()).compute()["critic/vf_loss"] for _ in range(60)]
    assert losses[-1] < 0.02 * losses[0]
    assert (engine.values(batch) - batch.pull)[batch.response_mask].abs().mean() < 0.15
    assert engine.version == 60


def test_a_critic_resumed_from_a_state_dict_is_bit_equal(folder: Folder) -> None:
    batch, settings = (
        ragged(),
        {"optimizer": AdamW(lr=0.003), "schedule": Linear(1.0, 0.0, steps=9, warmup=1), "grad_clip": 1.0},
    )
    engine = critic(folder("llama"), **settings)
    engine.update(batch, [all_rows(batch)] * 2, Squares())
    state = copy.deepcopy(engine.state_dict())
    log = engine.update(batch, [all_rows(batch)], Squares()).compute()
    resumed = critic(folder("llama"), **settings)
    resumed.load_state_dict(state)
    assert resumed.update(batch, [all_rows(batch)], Squares()).compute() == log
    assert resumed.version == engine.version == 2
    after = snapshot(engine)
    assert all(torch.equal(tensor, after[name]) for name, tensor in snapshot(resumed).items())


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_critic_reloads_with_its_value_head(kind: str, folder: Folder, tmp_path: Path) -> None:
    batch, engine = ragged(), with_random_head(critic(folder(kind)))
    engine.save_pretrained(str(tmp_path))
    assert load_file(tmp_path / "value_head.safetensors")["bias"].item() == 0.25
    assert torch.equal(critic(str(tmp_path)).values(batch), engine.values(batch))


def test_unusable_folders_rows_and_gradients_are_refused(folder: Folder, tmp_path: Path) -> None:
    with raises("model.not-found", found="does not exist"):
        TorchCritic(str(tmp_path / "nowhere")).build(CONTEXT)
    batch, engine = ragged(), critic(folder("llama"))
    mask = batch.response_mask.clone()
    mask[1, 1] = True
    for act in (engine.values, lambda b: engine.update(b, [all_rows(b)], Squares())):
        with raises("model.invalid-rows", row=1, token=1):
            act(batch._replace(response_mask=mask))
    poisoned = batch._replace(pull=batch.pull.index_fill(0, torch.tensor([5]), float("nan")))
    before = snapshot(engine)
    with raises("trainer.not-finite-gradient", role="critic", where="mini-batch 0 of 1"):
        engine.update(poisoned, [all_rows(batch)], Squares())
    assert all(torch.equal(tensor, before[name]) for name, tensor in snapshot(engine).items())


def test_a_value_head_of_another_width_is_refused(folder: Folder, tmp_path: Path) -> None:
    critic(folder("llama")).save_pretrained(str(tmp_path))
    save_file({"weight": torch.zeros(1, 3), "bias": torch.zeros(1)}, tmp_path / "value_head.safetensors")
    with raises("trainer.value-head", width=64):
        critic(str(tmp_path))
