"""Adapters as folders of PEFT: `adapter_folder.py`, and training that starts from one, or with `modules_to_save`."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from flowrl.backends import SGD, VLLM, AdamW, LoRA, SGLang, TorchRollout, TorchScorer, TorchTrainer
from flowrl.errors import ParameterError
from flowrl.hub.repositories import Commits
from flowrl.sync.digest import named_weights, weights_digest
from tests.backends.torch.test_lora import ADAPTER, Context, greedy, rollout, train, trainer
from tests.support.errors import raises
from tests.support.hub import Hub
from tests.support.hub import hub as hub  # a fixture
from tests.support.models import ragged, tiny_folder

SAVED = LoRA(r=4, alpha=8, modules_to_save=("embed_tokens", "lm_head"))
MODULES = ("base_model.model.lm_head.weight", "base_model.model.model.embed_tokens.weight")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_folder(tmp_path_factory.mktemp("models"), "llama")


def started(folder: str, path: Path | str, lora: LoRA = ADAPTER, **settings: Any) -> Any:
    """A trainer that starts from the adapter in `path`."""
    given = {name: getattr(lora, name) for name in ("r", "alpha", "targets", "modules_to_save")}
    return trainer(folder, seed=7, lora=LoRA(**given, adapter_path=path), **settings)


def adapter(engine: Any) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in engine.adapter_weights()}


# From an adapter


@pytest.mark.parametrize("lora", [ADAPTER, SAVED])
def test_training_continues_from_an_exported_adapter_bit_for_bit(llama: str, lora: LoRA, tmp_path: Path) -> None:
    """SGD has no state, so the adapter's weights are all that there is to continue from."""
    engine = trainer(llama, lora=lora, optimizer=SGD(lr=0.05))
    train(engine)
    engine.save_pretrained(str(tmp_path))
    resumed = started(llama, tmp_path / "adapter", lora, optimizer=SGD(lr=0.05))
    assert resumed.adapter_of == engine.adapter_of
    assert weights_digest(resumed.adapter_weights()) == weights_digest(engine.adapter_weights())
    before = adapter(engine)
    assert train(engine) == train(resumed)
    assert weights_digest(resumed.adapter_weights()) == weights_digest(engine.adapter_weights())
    assert any(not torch.equal(before[name], tensor) for name, tensor in resumed.adapter_weights())


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_peft_loads_an_exported_adapter(kind: str, tmp_path: Path) -> None:
    lora = LoRA(r=4, alpha=8, modules_to_save=("lm_head", "embed_tokens", "norm") if kind == "llama" else ("ln_f",))
    folder = tiny_folder(tmp_path, kind)
    engine = trainer(folder, lora=lora)
    train(engine)
    engine.save_pretrained(str(tmp_path / "saved"))
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, str(tmp_path / "saved" / "adapter")).eval()
    ids = torch.arange(10, 22)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=ids).logits, engine.model(input_ids=ids).logits)
    config = json.loads((tmp_path / "saved" / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == folder and config["task_type"] == "CAUSAL_LM"


@pytest.mark.parametrize(("modules", "rslora"), [(None, True), (["lm_head"], False)])
def test_training_starts_from_an_adapter_of_peft(
    llama: str, modules: list[str] | None, rslora: bool, tmp_path: Path
) -> None:
    """The first log-probs are those of PEFT's model."""
    base = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    names = ["q_proj", "down_proj"]
    config = LoraConfig(r=4, lora_alpha=6, target_modules=names, modules_to_save=modules, use_rslora=rslora)
    model: Any = get_peft_model(base, config)
    with torch.no_grad():
        for i, (name, parameter) in enumerate(model.named_parameters()):
            if "lora_" in name or "modules_to_save" in name:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i)))
    model.save_pretrained(tmp_path)
    alpha = 12.0 if rslora else 6.0  # 6 / sqrt(4) = 12 / 4
    lora = LoRA(4, alpha, ("q_proj", "down_proj"), tuple(modules or ()))
    engine = started(llama, tmp_path, lora)
    ids = torch.arange(10, 22)[None]
    with torch.no_grad():
        found = engine.model(input_ids=ids).logits
        torch.testing.assert_close(found, model.eval()(input_ids=ids).logits)
    plain = TorchScorer(llama, device="cpu").build(Context())
    assert torch.equal(TorchScorer().build(Context(engine)).log_probs(ragged()), plain.log_probs(ragged()))
    assert not torch.equal(engine.log_probs(ragged()), plain.log_probs(ragged()))


def test_an_adapter_with_other_settings_is_refused_with_those_that_fit(llama: str, tmp_path: Path) -> None:
    engine = trainer(llama, lora=LoRA(r=2, alpha=6, targets=("q_proj", "v_proj"), modules_to_save=("norm",)))
    engine.save_pretrained(str(tmp_path))
    path = str(tmp_path / "adapter")
    fit = LoRA(r=2, alpha=6.0, targets=("q_proj", "v_proj"), modules_to_save=("norm",), adapter_path=path)
    for other in (
        LoRA(adapter_path=path),
        LoRA(4, 6, ("q_proj", "v_proj"), ("norm",), adapter_path=path),
        LoRA(2, 4, ("q_proj", "v_proj"), ("norm",), adapter_path=path),
        LoRA(2, 6, ("q_proj",), ("norm",), adapter_path=path),
        LoRA(2, 6, ("q_proj", "v_proj"), adapter_path=path),
    ):
        with raises("lora.adapter-mismatch") as caught:
            trainer(llama, lora=other)
        written = str(caught.value).partition("Pass those: ")[2].partition(". [")[0]
        assert eval(written, {"LoRA": LoRA}) == fit
    trainer(llama, lora=fit)


def test_an_adapter_of_another_model_is_refused_by_the_names_of_its_layers(llama: str, tmp_path: Path) -> None:
    other = tiny_folder(tmp_path, "gpt2")
    engine = trainer(other)
    engine.save_pretrained(str(tmp_path / "a"))
    with raises("lora.adapter-mismatch") as caught:
        started(llama, tmp_path / "a" / "adapter")
    assert (
        "transformer.h.0" in str(caught.value)
        and "LlamaForCausalLM" in str(caught.value)
        and other in str(caught.value)
    )
    wide = tiny_folder(tmp_path, "llama", seed=1, intermediate_size=48)
    trainer(wide).save_pretrained(str(tmp_path / "b"))
    with raises("lora.adapter-mismatch") as caught:
        started(llama, tmp_path / "b" / "adapter")
    assert "has shape" in str(caught.value)


def test_another_name_of_the_base_model_is_a_warning(
    llama: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer(llama).save_pretrained(str(tmp_path))
    with caplog.at_level(logging.WARNING):
        started(llama, tmp_path / "adapter")
    assert not caplog.records
    config = tmp_path / "adapter" / "adapter_config.json"
    written = json.loads(config.read_text())
    config.write_text(json.dumps(written | {"base_model_name_or_path": "org/other"}))
    with caplog.at_level(logging.WARNING):
        started(llama, tmp_path / "adapter")
    assert [record.args[1] for record in caplog.records] == ["org/other"]  # type: ignore[index]


@pytest.mark.parametrize(
    "option",
    [{"use_dora": True}, {"bias": "all"}, {"rank_pattern": {"q_proj": 2}}, {"peft_type": "IA3"}, {"lora_bias": True}],
)
def test_adapters_of_other_kinds_are_refused(llama: str, option: dict[str, Any], tmp_path: Path) -> None:
    trainer(llama).save_pretrained(str(tmp_path))
    config = tmp_path / "adapter" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | option))
    [(name, value)] = option.items()
    with raises("lora.unsupported-adapter", found=(f"{name}={value!r}",)):
        started(llama, tmp_path / "adapter")


def test_incomplete_and_damaged_adapters_are_refused(llama: str, tmp_path: Path) -> None:
    trainer(llama).save_pretrained(str(tmp_path))
    folder = tmp_path / "adapter"
    weights, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    complete = load_file(weights)
    first = next(iter(complete))
    for tensors in (
        {name: tensor for name, tensor in complete.items() if name != first},
        complete | {first: complete[first] * torch.nan},
    ):
        save_file(tensors, weights)
        with raises("lora.adapter-mismatch"):
            started(llama, folder)
    weights.write_bytes(weights.read_bytes()[:-9])
    with raises("lora.adapter-mismatch"):
        started(llama, folder)
    weights.unlink()
    for found, prepare in (
        ("has no adapter_model.safetensors", lambda: None),
        ("has a adapter_config.json that is not an object", lambda: config.write_text("[]")),
        ("has no adapter_config.json", config.unlink),
        ("does not exist", folder.rmdir),
    ):
        prepare()
        spec = TorchTrainer(llama, lora=LoRA(adapter_path=folder))
        with raises("lora.adapter-not-found", path=str(folder), found=found):
            spec.refuse_missing()
        with raises("lora.adapter-not-found", path=str(folder), found=found):
            spec.build(Context())


def test_an_adapter_of_the_hub_is_resolved_and_downloaded(llama: str, hub: Hub, tmp_path: Path) -> None:
    engine = trainer(llama)
    train(engine)
    engine.save_pretrained(str(tmp_path))
    commit = hub.add("org/adapter", tmp_path / "adapter")
    commits = Commits()
    spec = TorchTrainer(llama, lora=LoRA(r=4, alpha=8, adapter_path="org/adapter"), device="cpu")
    pinned = spec.pinned(commits)
    assert pinned.starts_from_adapter == f"org/adapter@{commit}"
    assert [(one["repository"], one["commit"]) for one in commits.record()] == [("org/adapter", commit)]
    assert hub.downloads() == ["adapter_config.json"]
    pinned.refuse_missing()
    found = pinned.local().build(Context())
    assert weights_digest(found.adapter_weights()) == weights_digest(engine.adapter_weights())
    hub.add("org/pickled", {"adapter_config.json": b"{}", "adapter_model.bin": b""})
    with raises("hub.no-safetensors", repository="org/pickled", missing=("adapter_model.safetensors",)):
        TorchTrainer(llama, lora=LoRA(adapter_path="org/pickled")).pinned(Commits())
    with raises("hub.revision-of-folder"):
        TorchTrainer(llama, lora=LoRA(adapter_path=tmp_path / "adapter", revision="main")).pinned(Commits())


# Modules that are trained in full


def test_saved_modules_are_trained_and_the_reference_has_those_of_the_folder(llama: str) -> None:
    engine = trainer(llama, lora=SAVED)
    reference, plain = TorchScorer().build(Context(engine)), TorchScorer(llama, device="cpu").build(Context())
    truth = plain.log_probs(ragged())
    for _ in range(2):
        assert torch.equal(reference.log_probs(ragged()), truth)
        expected = plain.last_states(ragged())
        found = reference.last_states(ragged())
        assert torch.equal(found.states, expected.states) and found.head == expected.head
        before = engine.log_probs(ragged())
        assert torch.equal(engine.log_probs(ragged()), before)
        train(engine)
        assert not torch.equal(engine.log_probs(ragged()), before)
    moved = adapter(engine)
    base = dict(named_weights(plain.model))
    for name in MODULES:
        assert not torch.equal(moved[name], base[name.removeprefix("base_model.model.")])


def test_a_step_of_saved_modules_equals_one_of_all_weights(llama: str) -> None:
    """With B = 0, the gradient of a module that is trained in full is that of training all weights."""
    settings: Any = {"optimizer": SGD(lr=1.0), "grad_clip": None}
    engine, whole = trainer(llama, lora=SAVED, **settings), trainer(llama, lora=None, **settings)
    start = {name: tensor.clone() for name, tensor in whole.weights()}
    train(engine, 1), train(whole, 1)
    found, expected = dict(engine.weights()), dict(whole.weights())
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        torch.testing.assert_close(found[name] - start[name], expected[name] - start[name], atol=1e-6, rtol=1e-4)


def test_saved_modules_are_merged_and_synced(llama: str, tmp_path: Path) -> None:
    engine = trainer(llama, lora=SAVED)
    train(engine)
    engine.save_pretrained(str(tmp_path))
    merged = TorchScorer(str(tmp_path), device="cpu").build(Context())
    torch.testing.assert_close(merged.log_probs(ragged()), engine.log_probs(ragged()), atol=1e-5, rtol=1e-5)
    shared, adapted, whole = (
        rollout(None, engine),
        rollout(llama, lora=SAVED, device="cpu"),
        rollout(llama, device="cpu"),
    )
    receipts = [each.sync(engine) for each in (shared, adapted, whole)]
    sent = dict(engine.adapter_weights())
    assert set(MODULES) <= sent.keys() and receipts[1].digest == weights_digest(sent.items())
    outputs = [greedy(each) for each in (shared, adapted, whole)]
    assert outputs[0][0] == outputs[1][0] == outputs[2][0]
    assert torch.equal(outputs[0][1], outputs[1][1])
    with raises("engine.weights-mismatch"):
        rollout(llama, lora=ADAPTER, device="cpu").sync(engine)


def test_engines_that_load_low_rank_weights_only_refuse_saved_modules(llama: str) -> None:
    for engine in (VLLM, SGLang):
        with raises("engine.conflicting-settings"):
            engine(llama, lora=SAVED)
        engine(llama), TorchRollout(llama, lora=SAVED)


def test_checkpoints_with_saved_modules_resume_bit_for_bit(llama: str, tmp_path: Path) -> None:
    engine, resumed = (trainer(llama, lora=SAVED, optimizer=AdamW(lr=0.02), seed=seed) for seed in (0, 3))
    train(engine)
    engine.save_checkpoint(str(tmp_path / "checkpoint"))
    train(resumed)
    resumed.load_checkpoint(str(tmp_path / "checkpoint"))
    assert train(engine) == train(resumed)
    assert weights_digest(engine.weights()) == weights_digest(resumed.weights())
    truth = TorchScorer(llama, device="cpu").build(Context()).log_probs(ragged())
    assert torch.equal(TorchScorer().build(Context(resumed)).log_probs(ragged()), truth)
    with raises("checkpoint.mismatch"):
        trainer(llama).load_checkpoint(str(tmp_path / "checkpoint"))


def test_modules_that_cannot_be_saved_are_refused(llama: str, tmp_path: Path) -> None:
    with raises("lora.unknown-target", targets=("lmhead",)):
        trainer(llama, lora=LoRA(modules_to_save=("lmhead",)))
    with raises("lora.unsupported-module"):
        trainer(llama, lora=LoRA(modules_to_save=("mlp",)))
    trainer(llama, lora=LoRA(targets=("q_proj",), modules_to_save=("mlp",)))
    tied = tiny_folder(tmp_path, "qwen2")
    for name in ("embed_tokens", "lm_head"):
        with raises("lora.unsupported-module", modules=(f"model.{name}" if name == "embed_tokens" else name,)):
            trainer(tied, lora=LoRA(modules_to_save=(name,)))
    with pytest.raises(ParameterError, match="modules_to_save"):
        LoRA(modules_to_save="lm_head")  # type: ignore[arg-type]
