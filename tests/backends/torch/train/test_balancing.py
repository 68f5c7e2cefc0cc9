"""The load-balancing loss of mixtures of experts (`balancing.py`, and `routing.py` of scores), against transformers."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen3MoeConfig
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from flowrl.backends import SGD, TorchTrainer
from flowrl.backends.torch.score.routing import route_sums
from flowrl.backends.torch.score.rows import take
from flowrl.data.metrics import Metrics
from flowrl.protocols.protocols import MiniBatch, ReplicatedMiniBatch
from flowrl.sync.digest import named_weights
from tests import ROOT
from tests.backends.torch.test_lora import Context, Pull
from tests.support.errors import raises
from tests.support.models import VOCAB, char_tokenizer, ragged, tiny_folder

COEF = 0.3
RANKS: Any = None
"""The build context of this process, if it is one of several ranks."""


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


def trained(folder: str, pull: float = 0.0, whole: bool = False, **settings: Any) -> tuple[dict[str, Tensor], Metrics]:
    """The gradient of one mini-batch of all rows (the change by SGD with rate 1), and its metrics; of the `RANKS`, each
    has a part of the rows."""
    context, batch = RANKS or Context(), ragged()
    spec = TorchTrainer(folder, SGD(lr=1.0), grad_clip=None, device="cpu", **settings)
    engine = spec.build(context)
    before = {name: tensor.clone() for name, tensor in engine.weights()}
    own = torch.arange(len(batch.input_ids))[context.rank :: context.world_size]
    weights = pull * batch.response_mask.float()
    replicated = ReplicatedMiniBatch(batch, weights, own) if whole else None
    rows = take(batch, own)
    metrics = engine.update(rows, [MiniBatch(torch.arange(len(own)), weights[own], replicated)], Pull())
    return {name: before[name] - tensor for name, tensor in engine.weights()}, metrics


def by_transformers(folder: str) -> tuple[dict[str, Tensor], float]:
    """The gradient of ``COEF * load_balancing_loss_func`` over padded rows, and the loss."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    batch = ragged()
    mask = batch.attention_mask.long()
    ids = batch.input_ids.where(mask.bool(), 0)
    output = model(input_ids=ids, attention_mask=mask, position_ids=batch.position_ids, output_router_logits=True)
    (COEF * output.aux_loss).backward()
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return dict(named_weights(model)), float(output.aux_loss.detach())


def close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    scale = max(float(tensor.abs().max()) for tensor in expected.values())
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=2e-5 * scale, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("settings", [{}, {"max_tokens": 30}, {"attention": "eager", "gradient_checkpointing": True}])
def test_loss_and_gradient_are_those_of_transformers(folder: str, settings: dict[str, Any]) -> None:
    """Packed in one micro-batch, packed in several, and padded with recomputed layers."""
    expected, loss = by_transformers(folder)
    found, metrics = trained(folder, router_aux_loss_coef=COEF, **settings)
    close(found, expected)
    assert metrics.compute()["actor/aux_loss"] == pytest.approx(loss, rel=1e-5)


def test_sharded_weights_have_the_same_gradient(folder: str) -> None:
    try:
        close(trained(folder, router_aux_loss_coef=COEF, offload=True, max_tokens=30)[0], by_transformers(folder)[0])
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("whole", [False, True])
def test_it_is_added_to_the_gradient_of_the_objective(folder: str, whole: bool) -> None:
    plain, without = trained(folder, pull=1e-3, max_tokens=30)
    expected, loss = by_transformers(folder)
    found, metrics = trained(folder, 1e-3, whole, max_tokens=30, router_aux_loss_coef=COEF)
    close({name: found[name] - plain[name] for name in found}, expected)
    assert metrics.compute()["actor/aux_loss"] == pytest.approx(loss, rel=1e-5)
    assert "actor/aux_loss" not in without


@pytest.mark.nightly
def test_two_ranks_equal_one_process(folder: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.backends.torch.train.test_balancing", folder, str(tmp_path)]
    processes = [subprocess.Popen([*command, str(rank)], cwd=ROOT) for rank in range(2)]
    assert [process.wait(timeout=300) for process in processes] == [0, 0]
    expected, loss = by_transformers(folder)
    parts = [pickle.loads((tmp_path / f"{rank}.pickle").read_bytes()) for rank in range(2)]
    for found, _ in parts:
        close(found, expected)
    merged = Metrics()
    for _, metrics in parts:
        merged.merge(metrics)
    assert merged.compute()["actor/aux_loss"] == pytest.approx(loss, rel=1e-5)


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


if __name__ == "__main__":
    model, out, rank = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    dist.init_process_group("gloo", init_method=f"file://{out}/group", rank=rank, world_size=2)
    RANKS = Context(rank=rank, world_size=2)
    result = trained(model, router_aux_loss_coef=COEF, ranks=2, max_tokens=30)
    (out / f"{rank}.pickle").write_bytes(pickle.dumps(result))
