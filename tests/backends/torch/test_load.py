"""Model folders that do not hold what they say: refused by name, before anything is computed with them."""

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
from flowrl.errors import BindError, DataError
from tests.backends.torch.train.trainers import CONTEXT, Bomb, Folder
from tests.support.models import char_tokenizer, ragged

RANK: Any = SimpleNamespace(seed=0, rank=0, world_size=1)
WEIGHTS = "model.safetensors"
UP = "model.layers.1.mlp.up_proj.weight"


def config(**changes: Any) -> Callable[[Path], None]:
    """Changes ``config.json``; None takes a key out."""

    def change(path: Path) -> None:
        stated = json.loads((path / "config.json").read_text()) | changes
        (path / "config.json").write_text(json.dumps({k: v for k, v in stated.items() if v is not None}))

    return change


def weights(change: Callable[[dict[str, Tensor]], Any]) -> Callable[[Path], None]:
    """Changes the weights."""

    def rewrite(path: Path) -> None:
        held = load_file(path / WEIGHTS)
        change(held)
        save_file(held, path / WEIGHTS, metadata={"format": "pt"})

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
    "fewer layers": (config(num_hidden_layers=1), r"holds 9 weights that LlamaForCausalLM does not have by its config"),
    "more layers": (config(num_hidden_layers=3), r"lacks 9 weights of LlamaForCausalLM.*layers\.2"),
    "no layers": (config(num_hidden_layers=0), "holds 18 weights that LlamaForCausalLM does not have"),
    "a negative number of layers": (config(num_hidden_layers=-1), "folder"),
    "a weight is missing": (weights(lambda held: held.pop(UP)), r"lacks 1 weights .*layers\.1\.mlp\.up_proj"),
    "no head": (weights(lambda held: held.pop("lm_head.weight")), "lacks 1 weights .*lm_head"),
    "one too many": (weights(lambda held: held.update(ghost=torch.ones(2))), r"holds 1 weights .*\(ghost\)"),
    "renamed": (weights(lambda held: held.update(other=held.pop(UP))), "lacks 1 weights"),
    "misshaped": (weights(lambda held: held.update({UP: held[UP][1:].clone()})), r"up_proj\.weight: \(127, 64\), not"),
    "a larger vocabulary": (config(vocab_size=200), "embed_tokens"),
    "another width": (config(hidden_size=32, num_attention_heads=1), "folder"),
    "another head size": (config(head_dim=16), "self_attn"),
    "NaN": (
        weights(lambda held: held[UP].view(-1)[7:8].fill_(float("nan"))),
        r"holds NaN or infinity in 1 weights .*up",
    ),
    "infinity": (weights(lambda held: held[UP].fill_(-float("inf"))), r"holds NaN or infinity in 1 weights"),
    "cut off": (cut, "does not load as a causal LM"),
    "empty weights": (put(WEIGHTS, b""), "does not load as a causal LM"),
    "weights of zeros": (put(WEIGHTS, bytes(4096)), "does not load as a causal LM"),
    "weights of ones": (put(WEIGHTS, b"\xff" * 4096), "does not load as a causal LM"),
    "no weights": (lambda path: (path / WEIGHTS).unlink(), "does not load as a causal LM"),
    "an index of nothing": (
        lambda path: [
            (path / WEIGHTS).unlink(),
            put(f"{WEIGHTS}.index.json", '{"metadata": {}, "weight_map": {"a": "b.safetensors"}}')(path),
        ],
        "does not load as a causal LM",
    ),
    "a broken index": (
        lambda path: [(path / WEIGHTS).unlink(), put(f"{WEIGHTS}.index.json", "{")(path)],
        "does not load as a causal LM",
    ),
    "a broken configuration": (put("config.json", "{"), "config.json|causal LM"),
    "a configuration that is a list": (put("config.json", "[]"), "has a config.json that is not an object"),
    "a configuration that nests deeply": (put("config.json", "[" * 100_000), "has a config.json that is not JSON"),
    "no type of model": (config(model_type=None, architectures=None), "causal LM|tokeni[sz]er"),
    "an unknown type of model": (config(model_type="nothing"), "causal LM|tokeni[sz]er"),
    "a type of model that is a number": (config(model_type=3), "causal LM|tokeni[sz]er"),
    "another architecture": (config(model_type="gpt2"), "folder"),
    "heads that do not divide": (config(num_attention_heads=3, num_key_value_heads=2), "folder"),
    "no heads": (config(num_attention_heads=0), "causal LM"),
    "a number of layers in words": (
        config(num_hidden_layers="two"),
        "does not load as a causal LM .*num_hidden_layers",
    ),
    "an unknown activation": (config(hidden_act="martian"), "causal LM"),
    "a dtype that is none": (config(dtype="float3"), "causal LM|tokeni[sz]er"),
    "an encoder": (encoder, "folder"),
    "a pickle": (pickled, "does not load as a causal LM"),
    "code of its own": (with_code, "does not load|no tokeniser|Cannot load a tokenizer"),
    "an adapter of another folder": (
        put("adapter_config.json", '{"peft_type": "LORA", "base_model_name_or_path": "/nowhere"}'),
        "folder",
    ),
}


@pytest.mark.parametrize("name", list(MALFORMED))
def test_a_malformed_folder_is_refused(name: str, folder: Folder, tmp_path: Path) -> None:
    break_it, said = MALFORMED[name]
    shutil.copytree(folder("llama"), tmp_path, dirs_exist_ok=True)
    break_it(tmp_path)
    for backend in (TorchScorer(str(tmp_path), device="cpu"), TorchRollout(str(tmp_path), device="cpu")):
        with pytest.raises(BindError, match=said):
            backend.build(CONTEXT)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["fewer layers", "more layers", "one too many", "misshaped", "NaN", "infinity"])
def test_a_malformed_folder_is_refused_where_shards_are_loaded(name: str, folder: Folder, tmp_path: Path) -> None:
    break_it, said = MALFORMED[name]
    shutil.copytree(folder("llama"), tmp_path, dirs_exist_ok=True)
    break_it(tmp_path)
    try:
        with pytest.raises(BindError, match=said):
            TorchScorer(str(tmp_path), device="cpu", offload=True).build(RANK)
    finally:
        dist.destroy_process_group()


def test_a_tied_head_may_be_stored_or_not(folder: Folder, tmp_path: Path) -> None:
    truth = TorchScorer(folder("qwen2"), device="cpu").build(CONTEXT).log_probs(ragged())
    shutil.copytree(folder("qwen2"), tmp_path, dirs_exist_ok=True)
    both = weights(lambda held: held.update({"lm_head.weight": held["model.embed_tokens.weight"].clone()}))
    both(tmp_path)
    assert torch.equal(TorchScorer(str(tmp_path), device="cpu").build(CONTEXT).log_probs(ragged()), truth)


def test_a_critic_needs_embeddings_that_are_tied_to_its_head(folder: Folder, tmp_path: Path) -> None:
    shutil.copytree(folder("qwen2"), tmp_path, dirs_exist_ok=True)
    weights(lambda held: held.pop("model.embed_tokens.weight"))(tmp_path)
    with pytest.raises(BindError, match=r"lacks 1 weights .*embed_tokens"):
        TorchCritic(str(tmp_path), device="cpu").build(CONTEXT)


def test_buffers_that_older_versions_stored_are_no_fault(
    folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor do they keep a model from going straight into shards."""
    truth = TorchScorer(folder("llama"), device="cpu").build(CONTEXT).log_probs(ragged())
    shutil.copytree(folder("llama"), tmp_path, dirs_exist_ok=True)
    old = weights(lambda held: held.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)}))
    old(tmp_path)
    assert torch.equal(TorchScorer(str(tmp_path), device="cpu").build(CONTEXT).log_probs(ragged()), truth)
    monkeypatch.delattr("flowrl.backends.torch.train.shards.load_causal_lm")
    try:
        sharded = TorchScorer(str(tmp_path), device="cpu", offload=True).build(RANK)
        assert torch.allclose(sharded.log_probs(ragged()), truth, atol=1e-5)
    finally:
        dist.destroy_process_group()


def test_a_critic_needs_a_body_alone(folder: Folder, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(folder("llama")).base_model.save_pretrained(tmp_path)
    char_tokenizer().save_pretrained(tmp_path)
    TorchCritic(str(tmp_path), device="cpu").build(CONTEXT)
    with pytest.raises(BindError, match=r"lacks 1 weights of LlamaForCausalLM .*\(lm_head\.weight\)"):
        TorchScorer(str(tmp_path), device="cpu").build(CONTEXT)


@pytest.mark.parametrize(("context", "offload"), [(CONTEXT, False), (RANK, True)], ids=["whole", "sharded"])
def test_a_critic_starts_from_the_body_of_a_reward_model(
    folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, context: Any, offload: bool
) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(folder("llama"), num_labels=1)
    model.save_pretrained(tmp_path / "scores")
    char_tokenizer().save_pretrained(tmp_path / "scores")
    if offload:  # straight into shards
        monkeypatch.delattr("flowrl.backends.torch.train.shards.load_causal_lm")
    try:
        critic = TorchCritic(str(tmp_path / "scores"), device="cpu", offload=offload).build(context)
        critic.save_pretrained(str(tmp_path / "critic"))
    finally:
        if offload:
            dist.destroy_process_group()
    saved = {name.removeprefix("model."): held for name, held in load_file(tmp_path / "critic" / WEIGHTS).items()}
    body = model.model.state_dict()
    assert saved.keys() == body.keys() and all(torch.equal(saved[name], body[name]) for name in body)


def test_a_planted_pickle_would_run(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Bomb(tmp_path / "run")))
    assert (tmp_path / "run").exists()


def test_rows_of_another_vocabulary_are_refused(folder: Folder) -> None:
    engines: list[Any] = [TorchScorer(folder("llama"), device="cpu").build(CONTEXT)]
    engines.append(TorchCritic(folder("llama"), device="cpu").build(CONTEXT))
    batch = ragged()
    for token in (-1, len(char_tokenizer())):
        ids = batch.input_ids.clone()
        ids[2][batch.attention_mask[2].nonzero()[0]] = token
        for engine, ask in zip(engines, ("log_probs", "values"), strict=True):
            with pytest.raises(DataError, match=rf"row 2 holds the token id {token}, and this model's vocabulary is 0"):
                getattr(engine, ask)(batch._replace(input_ids=ids))
