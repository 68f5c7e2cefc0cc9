"""Malformed model folders are refused with an error that names the fault, before any computation."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, BertConfig, BertModel

from flowrl.backends import TorchCritic, TorchRollout, TorchScorer
from tests.backends.torch.train.trainers import CONTEXT, Bomb, Folder
from tests.support.errors import raises
from tests.support.models import char_tokenizer, ragged

RANK: Any = SimpleNamespace(seed=0, rank=0, world_size=1)
WEIGHTS = "model.safetensors"
UP = "model.layers.1.mlp.up_proj.weight"


def config(**changes: Any) -> Callable[[Path], None]:
    """Change ``config.json``; None removes a key."""

    def change(path: Path) -> None:
        stated = json.loads((path / "config.json").read_text()) | changes
        (path / "config.json").write_text(json.dumps({k: v for k, v in stated.items() if v is not None}))

    return change


def weights(change: Callable[[dict[str, Tensor]], Any]) -> Callable[[Path], None]:
    """Change the weights."""

    def rewrite(path: Path) -> None:
        tensors = load_file(path / WEIGHTS)
        change(tensors)
        save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})

    return rewrite


def put(name: str, content: bytes | str) -> Callable[[Path], Any]:
    return lambda path: (path / name).write_bytes(content.encode() if isinstance(content, str) else content)


def cut(path: Path) -> None:
    (path / WEIGHTS).write_bytes((path / WEIGHTS).read_bytes()[:-1000])


def pickled(path: Path) -> None:
    (path / WEIGHTS).unlink()
    torch.save({"model.norm.weight": Bomb(path / "run")}, path / "pytorch_model.bin")


def encoder(path: Path) -> None:
    BertModel(BertConfig(vocab_size=84, hidden_size=8, num_hidden_layers=1, num_attention_heads=1)).save_pretrained(
        path
    )


CODE = "from pathlib import Path\nPath(__file__).with_name('run').touch()\nPath('{}').touch()\n"


def with_code(path: Path) -> None:
    config(auto_map={"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}, model_type="own")(path)
    put("own.py", CODE.format(path / "run"))(path)


MALFORMED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "fewer layers": (config(num_hidden_layers=1), "model.unexpected-weights"),
    "more layers": (config(num_hidden_layers=3), "model.missing-weights"),
    "no layers": (config(num_hidden_layers=0), "model.unexpected-weights"),
    "a negative number of layers": (config(num_hidden_layers=-1), "model.unexpected-weights"),
    "a weight is missing": (weights(lambda tensors: tensors.pop(UP)), "model.missing-weights"),
    "no head": (weights(lambda tensors: tensors.pop("lm_head.weight")), "model.missing-weights"),
    "one too many": (weights(lambda tensors: tensors.update(ghost=torch.ones(2))), "model.unexpected-weights"),
    "renamed": (weights(lambda tensors: tensors.update(other=tensors.pop(UP))), "model.missing-weights"),
    "misshaped": (weights(lambda tensors: tensors.update({UP: tensors[UP][1:].clone()})), "model.missing-weights"),
    "a larger vocabulary": (config(vocab_size=200), "model.missing-weights"),
    "another width": (config(hidden_size=32, num_attention_heads=1), "model.missing-weights"),
    "another head size": (config(head_dim=16), "model.missing-weights"),
    "NaN": (
        weights(lambda tensors: tensors[UP].view(-1)[7:8].fill_(float("nan"))),
        "model.not-finite",
    ),
    "infinity": (weights(lambda tensors: tensors[UP].fill_(-float("inf"))), "model.not-finite"),
    "cut off": (cut, "model.not-loadable"),
    "empty weights": (put(WEIGHTS, b""), "model.not-loadable"),
    "weights of zeros": (put(WEIGHTS, bytes(4096)), "model.not-loadable"),
    "weights of ones": (put(WEIGHTS, b"\xff" * 4096), "model.not-loadable"),
    "no weights": (lambda path: (path / WEIGHTS).unlink(), "model.not-loadable"),
    "an index of nothing": (
        lambda path: [
            (path / WEIGHTS).unlink(),
            put(f"{WEIGHTS}.index.json", '{"metadata": {}, "weight_map": {"a": "b.safetensors"}}')(path),
        ],
        "model.not-loadable",
    ),
    "a broken index": (
        lambda path: [(path / WEIGHTS).unlink(), put(f"{WEIGHTS}.index.json", "{")(path)],
        "model.not-loadable",
    ),
    "a broken configuration": (put("config.json", "{"), "model.not-found"),
    "a configuration that is a list": (put("config.json", "[]"), "model.not-found"),
    "a configuration that nests deeply": (put("config.json", "[" * 100_000), "model.not-found"),
    "no type of model": (config(model_type=None, architectures=None), "model.not-loadable"),
    "an unknown type of model": (config(model_type="nothing"), "model.not-loadable"),
    "a type of model that is a number": (config(model_type=3), "model.not-loadable"),
    "another architecture": (config(model_type="gpt2"), "model.missing-weights"),
    "heads that do not divide": (config(num_attention_heads=3, num_key_value_heads=2), "model.not-loadable"),
    "no heads": (config(num_attention_heads=0), "model.not-loadable"),
    "a number of layers in words": (
        config(num_hidden_layers="two"),
        "model.not-loadable",
    ),
    "an unknown activation": (config(hidden_act="martian"), "model.not-loadable"),
    "a dtype that is none": (config(dtype="float3"), "model.not-loadable"),
    "an encoder": (encoder, "model.missing-weights"),
    "a pickle": (pickled, "model.not-loadable"),
    "code of its own": (with_code, "model.not-loadable"),
    "an adapter of another folder": (
        put("adapter_config.json", '{"peft_type": "LORA", "base_model_name_or_path": "/nowhere"}'),
        "model.not-loadable",
    ),
}


FACTS: dict[str, dict[str, Any]] = {
    "a weight is missing": dict(missing=(UP,)),
    "no head": dict(missing=("lm_head.weight",)),
    "one too many": dict(unexpected=("ghost",)),
    "misshaped": dict(missing=(f"{UP}: (127, 64), not (128, 64)",)),
    "NaN": dict(weights=(UP,)),
    "infinity": dict(weights=(UP,)),
}


@pytest.mark.parametrize("name", list(MALFORMED))
def test_a_malformed_folder_is_refused(name: str, folder: Folder, tmp_path: Path) -> None:
    damage, code = MALFORMED[name]
    shutil.copytree(folder("llama"), tmp_path, dirs_exist_ok=True)
    damage(tmp_path)
    for backend in (TorchScorer(str(tmp_path), device="cpu"), TorchRollout(str(tmp_path), device="cpu")):
        with raises(code, **FACTS.get(name, {})):
            backend.build(CONTEXT)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["fewer layers", "more layers", "one too many", "misshaped", "NaN", "infinity"])
def test_a_malformed_folder_is_refused_by_sharded_loading(name: str, folder: Folder, tmp_path: Path) -> None:
    damage, code = MALFORMED[name]
    shutil.copytree(folder("llama"), tmp_path, dirs_exist_ok=True)
    damage(tmp_path)
    try:
        with raises(code, **FACTS.get(name, {})):
            TorchScorer(str(tmp_path), device="cpu", offload=True).build(RANK)
    finally:
        dist.destroy_process_group()


def test_a_tied_head_may_be_absent_from_the_file(folder: Folder, tmp_path: Path) -> None:
    truth = TorchScorer(folder("qwen2"), device="cpu").build(CONTEXT).log_probs(ragged())
    shutil.copytree(folder("qwen2"), tmp_path, dirs_exist_ok=True)
    both = weights(lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    both(tmp_path)
    assert torch.equal(TorchScorer(str(tmp_path), device="cpu").build(CONTEXT).log_probs(ragged()), truth)


def test_a_critic_refuses_a_folder_without_embeddings(folder: Folder, tmp_path: Path) -> None:
    shutil.copytree(folder("qwen2"), tmp_path, dirs_exist_ok=True)
    weights(lambda tensors: tensors.pop("model.embed_tokens.weight"))(tmp_path)
    with raises("model.missing-weights", missing=("model.embed_tokens.weight",)):
        TorchCritic(str(tmp_path), device="cpu").build(CONTEXT)


def test_buffers_stored_by_older_versions_are_accepted(
    folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sharded loading accepts them, too."""
    truth = TorchScorer(folder("llama"), device="cpu").build(CONTEXT).log_probs(ragged())
    shutil.copytree(folder("llama"), tmp_path, dirs_exist_ok=True)
    old = weights(lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)}))
    old(tmp_path)
    assert torch.equal(TorchScorer(str(tmp_path), device="cpu").build(CONTEXT).log_probs(ragged()), truth)
    monkeypatch.delattr("flowrl.backends.torch.train.shards.load_causal_lm")
    try:
        sharded = TorchScorer(str(tmp_path), device="cpu", offload=True).build(RANK)
        assert torch.allclose(sharded.log_probs(ragged()), truth, atol=1e-5)
    finally:
        dist.destroy_process_group()


def test_a_critic_loads_without_a_language_model_head(folder: Folder, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(folder("llama")).base_model.save_pretrained(tmp_path)
    char_tokenizer().save_pretrained(tmp_path)
    TorchCritic(str(tmp_path), device="cpu").build(CONTEXT)
    with raises("model.missing-weights", missing=("lm_head.weight",)):
        TorchScorer(str(tmp_path), device="cpu").build(CONTEXT)


@pytest.mark.parametrize(("context", "offload"), [(CONTEXT, False), (RANK, True)], ids=["whole", "sharded"])
def test_a_critic_starts_from_the_body_of_a_reward_model(
    folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, context: Any, offload: bool
) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(folder("llama"), num_labels=1)
    model.save_pretrained(tmp_path / "scores")
    char_tokenizer().save_pretrained(tmp_path / "scores")
    if offload:  # loads directly into shards
        monkeypatch.delattr("flowrl.backends.torch.train.shards.load_causal_lm")
    try:
        critic = TorchCritic(str(tmp_path / "scores"), device="cpu", offload=offload).build(context)
        critic.save_pretrained(str(tmp_path / "critic"))
    finally:
        if offload:
            dist.destroy_process_group()
    saved = {name.removeprefix("model."): tensor for name, tensor in load_file(tmp_path / "critic" / WEIGHTS).items()}
    body = model.model.state_dict()
    assert saved.keys() == body.keys() and all(torch.equal(saved[name], body[name]) for name in body)


def test_the_malicious_pickle_of_these_tests_runs_when_unpickled(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Bomb(tmp_path / "run")))
    assert (tmp_path / "run").exists()


def test_tokens_outside_the_vocabulary_are_refused(folder: Folder) -> None:
    engines: list[Any] = [TorchScorer(folder("llama"), device="cpu").build(CONTEXT)]
    engines.append(TorchCritic(folder("llama"), device="cpu").build(CONTEXT))
    batch = ragged()
    for token in (-1, len(char_tokenizer())):
        ids = batch.input_ids.clone()
        ids[2][batch.attention_mask[2].nonzero()[0]] = token
        for engine, call in zip(engines, ("log_probs", "values"), strict=True):
            with raises("model.unknown-token", row=2, token_id=token):
                getattr(engine, call)(batch._replace(input_ids=ids))
