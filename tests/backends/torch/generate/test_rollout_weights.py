"""Weights of `TorchRollout`: shared or copied, their digests, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, MixtralConfig

from flowrl.backends import LoRA, TorchRollout, TorchTrainer
from flowrl.backends.torch.generate.rollout import TorchRolloutEngine
from flowrl.data.keys import Key
from flowrl.errors import ParameterError
from flowrl.protocols.protocols import Rollout, Sampling
from flowrl.sync.digest import named_weights, tensor_digest, weights_digest
from tests.backends.torch.generate.rollouts import GREEDY, KEY, SAMPLED, Actor, Context, as_lists, names, ragged, synced
from tests.support.errors import raises
from tests.support.models import KINDS, VOCAB, char_tokenizer, tiny_folder

# Weights: sharing


def test_a_sync_of_shared_weights_copies_nothing(actor: Actor) -> None:
    engine = TorchRollout().build(Context(actor))
    assert isinstance(engine, Rollout)
    assert engine.receipt is None and engine.model is actor.model
    receipt = engine.sync(actor)  # type: ignore[arg-type]
    assert receipt == engine.receipt == (0, "alias", 0, 0.0, "alias")


def test_generation_before_the_first_sync_is_refused(actor: Actor) -> None:
    prompts, mask = torch.tensor([[5]]), torch.tensor([[True]])
    for engine in (TorchRollout().build(Context(actor)), TorchRollout(actor.folder).build(Context(None))):
        with raises("engine.no-receipt", engine="TorchRollout"):
            engine.generate(prompts, mask, ["a"], GREEDY, KEY)


def test_generation_with_shared_weights_updated_since_the_sync_is_refused(
    actor: Actor, engine: TorchRolloutEngine
) -> None:
    prompts, mask = ragged(engine, [3])
    actor.version = 1
    with raises("engine.version-mismatch", found=1, expected=0):
        engine.generate(prompts, mask, names(1), GREEDY, KEY)
    assert engine.sync(actor).version == 1  # type: ignore[arg-type]
    engine.generate(prompts, mask, names(1), GREEDY, KEY)


def test_a_shared_engine_refuses_to_sync_another_trainer(actor: Actor, engine: TorchRolloutEngine) -> None:
    with raises("engine.other-trainer", found="Actor"):
        engine.sync(Actor(actor.folder))  # type: ignore[arg-type]
    assert engine.receipt is None


def test_invalid_backend_settings_are_refused(actor: Actor) -> None:
    with pytest.raises(ParameterError, match="max_rows"):
        TorchRollout(max_rows=0)
    for unused in ({"dtype": "bfloat16"}, {"device": "cpu"}, {"ranks": 2}, {"lora": LoRA()}):
        with pytest.raises(ParameterError, match=f"drop {next(iter(unused))}, or name a folder"):
            TorchRollout(**unused)  # type: ignore[arg-type]
    with raises("engine.cannot-share-weights", found="object"):
        TorchRollout().build(Context(object()))


# Weights: copying


@pytest.mark.parametrize("kind", KINDS)
def test_a_synced_copy_samples_like_a_shared_engine(folders: dict[str, str], tmp_path: Path, kind: str) -> None:
    actor = Actor(tiny_folder(tmp_path, kind, seed=1), version=7)
    engine = TorchRollout(folders[kind]).build(Context(None))
    receipt = engine.sync(actor)  # type: ignore[arg-type]
    assert (receipt.version, receipt.transport) == (7, "copy")
    assert receipt.digest == weights_digest(actor.weights()) == weights_digest(named_weights(engine.model))
    assert receipt.bytes == sum(4 * p.numel() for p in actor.model.parameters())  # torch lists tied weights once
    prompts, mask = ragged(engine, [4, 6])
    copied, shared = (e.generate(prompts, mask, names(2), SAMPLED, KEY) for e in (engine, synced(actor)))
    assert as_lists(copied) == as_lists(shared)
    with torch.no_grad():
        actor.model.get_input_embeddings().weight.zero_()
    assert as_lists(engine.generate(prompts, mask, names(2), SAMPLED, KEY)) == as_lists(copied)  # a copy, not an alias


def test_fused_experts_are_synced(tmp_path: Path) -> None:
    """Transformers fuses the experts of a layer in memory; saved and synced weights name each expert."""
    sizes: Any = dict(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_local_experts=2
    )
    config = MixtralConfig(vocab_size=VOCAB, num_key_value_heads=1, **sizes)
    for name in "ab":
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / name)
        char_tokenizer().save_pretrained(tmp_path / name)
    actor = Actor(str(tmp_path / "a"))
    engine = TorchRollout(str(tmp_path / "b")).build(Context(None))
    engine.sync(actor)  # type: ignore[arg-type]
    for name, tensor in actor.model.state_dict().items():
        assert torch.equal(engine.model.state_dict()[name], tensor)


def test_an_engine_with_another_dtype_casts_synced_weights(folders: dict[str, str], actor: Actor) -> None:
    engine = TorchRollout(folders["llama"], dtype="bfloat16").build(Context(None))
    receipt = engine.sync(actor)  # type: ignore[arg-type]
    assert receipt.digest == weights_digest(actor.weights())  # of the tensors before the cast
    for name, tensor in actor.model.named_parameters():
        assert torch.equal(engine.model.get_parameter(name), tensor.bfloat16())
    prompts, mask = ragged(engine, [4, 6])
    got = engine.generate(prompts, mask, names(2), GREEDY, KEY)
    assert got.log_probs.dtype == torch.float32


def test_the_probe_detects_stale_weights(actor: Actor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = TorchRollout(tiny_folder(tmp_path, "llama", seed=1)).build(Context(None))
    engine.sync(actor)  # type: ignore[arg-type]
    stale = "model.layers.1.mlp.up_proj.weight"
    with torch.no_grad():
        actor.model.get_parameter(stale).mul_(1.001)
    actor.version = 1
    load = TorchRolloutEngine._load
    monkeypatch.setattr(
        TorchRolloutEngine,
        "_load",
        lambda self, received: load(self, {name: tensor for name, tensor in received.items() if name != stale}),
    )
    with raises("sync.damaged", version=1, faults=(f"{stale} is not what was sent",)):
        engine.sync(actor)  # type: ignore[arg-type]
    assert engine.receipt is None
    with raises("engine.no-receipt"):
        engine.generate(*ragged(engine, [3]), names(1), GREEDY, KEY)
    monkeypatch.undo()
    assert engine.sync(actor).version == 1  # type: ignore[arg-type]


def test_mismatched_weights_are_named(actor: Actor, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = TorchRollout(actor.folder).build(Context(None))
    sent = dict(actor.weights())

    def refused(weights: dict[str, Tensor], *faults: str) -> None:
        engine.sync(actor)  # type: ignore[arg-type]
        with monkeypatch.context() as patch, raises("engine.weights-mismatch", faults=faults):
            patch.setattr(actor, "weights", lambda: iter(weights.items()))
            engine.sync(actor)  # type: ignore[arg-type]
        assert engine.receipt is None

    refused({n: t for n, t in sent.items() if n != "model.norm.weight"}, "model.norm.weight is missing")
    refused(sent | {"extra.bias": torch.zeros(2)}, "extra.bias is unexpected")
    refused(sent | {"model.norm.weight": torch.ones(63)}, "model.norm.weight has shape (63,), not (64,)")
    refused({}, *(f"{name} is missing" for name in sent))


# Digests


def test_tied_weights_are_sent_once(folders: dict[str, str]) -> None:
    tied = dict(Actor(folders["qwen2"]).weights())
    assert "model.embed_tokens.weight" in tied and "lm_head.weight" not in tied
    assert list(tied) == sorted(tied)
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= dict(Actor(folders["llama"]).weights()).keys()


def test_weights_digest_covers_name_dtype_shape_and_bytes() -> None:
    tensor = torch.arange(6, dtype=torch.float32)
    variants = [
        ("a", tensor),
        ("b", tensor),
        ("a", tensor.view(torch.int32)),
        ("a", tensor.view(2, 3)),
        ("a", tensor.view(3, 2)),
        ("a", tensor + torch.tensor([0, 0, 0, 0, 0, 1e-6])),
        ("a", tensor.bfloat16()),
        ("a", tensor[:5]),
    ]
    assert len({tensor_digest(name, value) for name, value in variants}) == len(variants)
    assert tensor_digest("a", tensor.view(2, 3)) == tensor_digest("a", tensor.view(2, 3).T.contiguous().T)
    assert len(tensor_digest("a", torch.tensor(1.0))) == 32


def test_weights_digest_does_not_depend_on_order() -> None:
    one, two = ("a", torch.ones(2)), ("b", torch.zeros(2))
    assert weights_digest([one, two]) == weights_digest([two, one])
    assert weights_digest([one, two]) != weights_digest([one]) != weights_digest([])
    assert weights_digest([("a", two[1]), ("b", one[1])]) != weights_digest([one, two])


# Turns


def test_a_sleeping_engine_refuses_to_generate(folders: dict[str, str]) -> None:
    trainer = TorchTrainer(folders["llama"], device="cpu").build(Context(None))  # type: ignore[arg-type]
    shared, own = (TorchRollout(model).build(Context(trainer)) for model in (None, folders["llama"]))  # type: ignore[arg-type]
    for engine, sleeper in ((shared, trainer), (shared, shared), (own, own)):
        engine.sync(trainer)
        prompts, mask = ragged(engine, [3, 2])
        before = engine.generate(prompts, mask, names(2), Sampling(1.0, 0, 1.0, 4), Key.of(0))
        sleeper.sleep()
        with raises("engine.asleep", call="generate"):
            engine.generate(prompts, mask, names(2), Sampling(1.0, 0, 1.0, 4), Key.of(0))
        sleeper.wake()
        after = engine.generate(prompts, mask, names(2), Sampling(1.0, 0, 1.0, 4), Key.of(0))
        assert as_lists(before) == as_lists(after)
