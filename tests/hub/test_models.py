"""Which files of a model arrive, and repositories without usable weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from huggingface_hub import constants

from flowrl.hub.models import cached, metadata, model
from tests.support.errors import raises
from tests.support.hub import Hub
from tests.support.hub import hub as hub  # a fixture

OTHERS = {
    "README.md": b"",
    "modeling_own.py": b"raise SystemExit",
    "pytorch_model.bin": b"pickle",
    "original/consolidated.00.pth": b"pickle",
    "consolidated.safetensors": b"twice",
    "onnx/model.onnx": b"",
}
"""What a repository may have besides, and no run reads."""
CONFIG = {name: name.encode() for name in ("config.json", "tokenizer.json", "generation_config.json", "merges.txt")}


def test_weights_configuration_tokenizer_and_template_arrive_and_nothing_else(hub: Hub) -> None:
    commit = hub.add("org/one", {**CONFIG, **OTHERS, "model.safetensors": b"w"})
    assert cached("org/one", commit) is None
    folder = metadata("org/one", commit)
    assert cached("org/one", commit) == folder
    assert {path.name for path in folder.iterdir()} == CONFIG.keys()
    assert model("org/one", commit) == folder
    assert {path.name for path in folder.iterdir()} == {*CONFIG, "model.safetensors"}
    assert sorted(hub.downloads()) == sorted([*CONFIG, "model.safetensors"])  # each once


def test_of_shards_those_of_the_index_arrive(hub: Hub) -> None:
    shards = {"model-1-of-2.safetensors": b"1", "model-2-of-2.safetensors": b"2", "model.fp16.safetensors": b"3"}
    index = json.dumps({"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}).encode()
    commit = hub.add("org/one", {**CONFIG, **shards, "model.safetensors.index.json": index})
    found = {path.name for path in model("org/one", commit).glob("*.safetensors")}
    assert found == {"model-1-of-2.safetensors", "model-2-of-2.safetensors"}
    del shards["model-2-of-2.safetensors"]
    commit = hub.add("org/one", {**CONFIG, **shards, "model.safetensors.index.json": index})
    with raises("hub.no-safetensors", missing=("model-2-of-2.safetensors",)):
        metadata("org/one", commit)


def test_pickled_weights_are_refused_before_anything_large_arrives(hub: Hub) -> None:
    commit = hub.add("org/one", {**CONFIG, **OTHERS})
    with raises("hub.no-safetensors", repository="org/one", missing=("model.safetensors",)):
        metadata("org/one", commit)
    assert set(hub.downloads()) <= CONFIG.keys()


def test_a_cache_without_the_weights_is_incomplete_offline(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = hub.add("org/one", {**CONFIG, "model.safetensors": b"w"})
    folder = metadata("org/one", commit)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert metadata("org/one", commit) == folder
    with raises("hub.offline", repository="org/one"):
        model("org/one", commit)


def test_a_cache_that_another_library_filled_serves_offline(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import hf_hub_download

    commit = hub.add("org/one", {**CONFIG, "model.safetensors": b"w"})
    for name in ("config.json", "model.safetensors"):  # file by file, so without a list of all files
        hf_hub_download("org/one", name)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert (Path(model("org/one", commit)) / "model.safetensors").read_bytes() == b"w"
