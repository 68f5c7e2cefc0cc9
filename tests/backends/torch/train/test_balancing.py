"""The load-balancing loss of mixtures of experts (`balancing.py`, and `routing.py` of scores), against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen3MoeConfig
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from flowrl.backends import SGD, TorchTrainer
from flowrl.backends.torch.score.routing import route_sums
from flowrl.protocols.protocols import MiniBatch, ReplicatedMiniBatch
from flowrl.sync.digest import named_weights
from tests.backends.torch.test_lora import Context, Pull
from tests.support.errors import raises
from tests.support.models import VOCAB, char_tokenizer, ragged, tiny_folder

COEF = 0.3


def folder_of(kind: str, path: Path) -> str:
    """A tiny mixture of experts whose routers are not uniform."""
    sizes: Any = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"vocab_size": VOCAB, "num_key_value_heads": 1, "num_experts_per_tok": 2}
    config = (
        MixtralConfig(num_local_experts=4, **sizes)
        if kind == "mixtral"
        else Qwen3MoeConfig(num_experts=6, moe_intermediate_size=16, head_dim=16, **sizes)
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0.0, 0.3)
    model.save_pretrained(path / kind)
    char_tokenizer().save_pretrained(path / kind)
    return str(path / kind)


@pytest.fixture(scope="module", params=["mixtral", "qwen3_moe"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return folder_of(request.param, tmp_path_factory.mktemp("models"))


def trained(folder: str, rows: list[int], pull: bool = True, whole: bool = False, **settings: Any) -> tuple[Any, ...]:
    """Gradients (the change by SGD with rate 1) of one step on these rows, and its metrics."""
    spec = TorchTrainer(folder, SGD(lr=1.0), grad_clip=None, device="cpu", **settings)
    engine = spec.build(Context())
    before = {name: tensor.clone() for name, tensor in engine.weights()}
    batch, chosen = ragged(), torch.tensor(rows)
    weights = batch.response_mask.float()[chosen] * pull
    replicated = ReplicatedMiniBatch(type(batch)(*(x if x is None else x[rows] for x in batch)), weights, chosen)
    mini = MiniBatch(chosen, weights, replicated._replace(own=torch.arange(len(rows))) if whole else None)
    metrics = engine.update(batch, [mini], Pull())
    return {name: before[name] - tensor for name, tensor in engine.weights()}, metrics


def by_transformers(folder: str, rows: list[int]) -> tuple[dict[str, Tensor], float]:
    """The gradient of ``COEF * load_balancing_loss_func`` over padded rows, and the loss."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    batch = ragged()
    mask = batch.attention_mask[rows].long()
    ids = batch.input_ids[rows].where(mask.bool(), 0)
    output = model(
        input_ids=ids, attention_mask=mask, position_ids=batch.position_ids[rows], output_router_logits=True
    )
    (COEF * output.aux_loss).backward()
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return dict(named_weights(model)), float(output.aux_loss.detach())


def close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    scale = max(float(tensor.abs().max()) for tensor in expected.values())
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=2e-5 * scale, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


ROWS = [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("settings", [{}, {"max_tokens": 30}, {"attention": "eager", "gradient_checkpointing": True}])
def test_loss_and_gradient_are_those_of_transformers(folder: str, settings: dict[str, Any]) -> None:
    """Packed in one micro-batch, packed in several, and padded with recomputed layers."""
    expected, loss = by_transformers(folder, ROWS)
    found, metrics = trained(folder, ROWS, pull=False, router_aux_loss_coef=COEF, **settings)
    close(found, expected)
    assert metrics.compute()["actor/aux_loss"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("whole", [False, True])
def test_it_is_added_to_the_gradient_of_the_objective(folder: str, whole: bool) -> None:
    plain, without = trained(folder, ROWS, max_tokens=30)
    expected, loss = by_transformers(folder, ROWS)
    found, metrics = trained(folder, ROWS, whole=whole, max_tokens=30, router_aux_loss_coef=COEF)
    close({name: found[name] - plain[name] for name in found}, expected)
    assert metrics.compute()["actor/aux_loss"] == pytest.approx(loss, rel=1e-5)
    assert "actor/aux_loss" not in without


def test_a_coefficient_of_0_changes_no_bit(folder: str) -> None:
    found, expected = (trained(folder, ROWS, **settings)[0] for settings in ({}, {"router_aux_loss_coef": 0.0}))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_sums_over_layers_equal_transformers_with_padding() -> None:
    draw = torch.Generator().manual_seed(0)
    logits = tuple(torch.randn(15, 5, generator=draw) for _ in range(3))
    mask = torch.rand(3, 5, generator=draw) > 0.3
    probabilities, counts = route_sums(logits, mask, 2)
    tokens = 3 * int(mask.sum())
    assert counts.sum() == 2 * tokens
    found = 5 * (counts / tokens * probabilities / tokens).sum()
    torch.testing.assert_close(found, load_balancing_loss_func(logits, 5, 2, mask))


def test_a_model_without_routers_is_refused(tmp_path: Path) -> None:
    with raises("model.no-router", architecture="LlamaForCausalLM"):
        TorchTrainer(tiny_folder(tmp_path), router_aux_loss_coef=0.01, device="cpu").build(Context())
