"""LoRA: training, merging, syncing, and the reference, which is the actor with its adapter disabled."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, MixtralConfig

from flowrl.backends import SGD, AdamW, LoRA, TorchRollout, TorchScorer, TorchTrainer
from flowrl.data.keys import Key
from flowrl.data.sources.prompts import PromptData
from flowrl.errors import ParameterError
from flowrl.graph import Graph
from flowrl.graphs import grpo
from flowrl.protocols.protocols import Adapted, Checkpointed, MiniBatch, Rollout, Sampling, Scorer, Sleeper, Trainer
from flowrl.run.training.job import Job
from flowrl.run.training.training import Training
from flowrl.sync.digest import named_weights, weights_digest
from tests.nightly import nightly_except
from tests.support.errors import raises
from tests.support.models import KINDS, VOCAB, Ragged, char_tokenizer, ragged, tiny_folder
from tests.support.rewards import digits

ADAPTER = LoRA(r=4, alpha=8)


class Context:
    """A build context with one actor."""

    def __init__(self, actor: Any = None, seed: int = 0, rank: int = 0, world_size: int = 1) -> None:
        self.actor, self.seed, self.rank, self.world_size = actor, seed, rank, world_size

    def engine(self, role: str) -> Any:
        assert role == "actor"
        return self.actor


def trainer(folder: str, seed: int = 0, **settings: Any) -> Any:
    settings = {"device": "cpu", "lora": ADAPTER, "optimizer": AdamW(lr=0.02)} | settings
    return TorchTrainer(folder, **settings).build(Context(seed=seed))


def rollout(folder: str | None, actor: Any = None, **settings: Any) -> Any:
    return TorchRollout(folder, **settings).build(Context(actor))


class Pull:
    """Log-probs weighted by a column."""

    wants_entropy = False
    of_distribution, of_tokens = None, True

    def __call__(self, output: Tensor, entropy: Any, batch: Ragged, weights: Tensor, metrics: Any) -> Tensor:
        return (weights * batch.pull * output).sum()


def train(engine: Any, steps: int = 2) -> Any:
    batch = ragged()
    minis = [MiniBatch(torch.arange(len(batch.input_ids)), batch.response_mask.float())] * steps
    return engine.update(batch, minis, Pull()).compute()


def stored(engine: Any) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in engine.model.named_parameters()}


def peft_folder(engine: Any, base: str, path: Path) -> str:
    """Save the adapter in PEFT's format; returns the folder."""
    save_file(dict(engine.adapter_weights()), path / "adapter_model.safetensors")
    named = {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name, _ in engine.adapter_weights()}
    config: Any = LoraConfig(r=ADAPTER.r, lora_alpha=8, target_modules=sorted(named), base_model_name_or_path=base)
    config.fan_in_fan_out = "gpt2" in base
    config.save_pretrained(path)
    return str(path)


# Training


@pytest.mark.parametrize("kind", nightly_except(["llama", "gpt2"], KINDS))
@pytest.mark.parametrize("checkpointing", [False, True])
def test_an_update_changes_only_the_adapter(folders: dict[str, str], kind: str, checkpointing: bool) -> None:
    engine = trainer(folders[kind], gradient_checkpointing=checkpointing)
    before = stored(engine)
    train(engine)
    after = stored(engine)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if ".lora_" in name}
    assert {name for name, p in engine.model.named_parameters() if p.requires_grad} == moved
    assert len(engine.state_dict()["optimizer"]["state"]) == len(moved)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_an_adapter_step_equals_the_chain_rule_on_full_weights(folders: dict[str, str], kind: str) -> None:
    """W = W0 + s B A (Hu et al. 2021), so dL/dB = s dL/dW Aᵀ and dL/dA = s Bᵀ dL/dW, with dL/dW of the merged model."""
    engine = trainer(folders[kind], optimizer=SGD(lr=1.0), grad_clip=None)
    with torch.no_grad():
        for i, (_, tensor) in enumerate(engine.adapter_weights()):
            tensor.copy_(0.05 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(i)))
    before = {name: tensor.double() for name, tensor in engine.adapter_weights()}
    whole = trainer(folders[kind], lora=None, optimizer=SGD(lr=1.0), grad_clip=None)
    whole.model.load_state_dict(dict(engine.weights()), strict=False)  # tied weights are listed once
    tensors = dict(named_weights(whole.model))
    start = {name: tensor.double().clone() for name, tensor in tensors.items()}
    train(whole, 1)
    slope = {name: start[name] - tensors[name].double() for name in tensors}  # with a learning rate of 1
    train(engine, 1)
    for name, after in engine.adapter_weights():
        layer, _, part = name.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".")
        w = slope[f"{layer}.weight"].T if kind == "gpt2" else slope[f"{layer}.weight"]  # Conv1D stores W transposed
        a, b = (before[f"base_model.model.{layer}.{p}.weight"] for p in ("lora_A", "lora_B"))
        due = 2 * (b.T @ w if part == "lora_A" else w @ a.T)
        assert float((before[name] - after.double() - due).norm() / due.norm()) < 1e-4, name


def test_a_new_adapter_is_an_identity_and_depends_only_on_the_seed(folders: dict[str, str]) -> None:
    torch.manual_seed(1)
    one = trainer(folders["llama"], seed=5)
    before = torch.get_rng_state()
    two, other = trainer(folders["llama"], seed=5), trainer(folders["llama"], seed=6)
    assert torch.equal(before, torch.get_rng_state())
    plain = TorchScorer(folders["llama"], device="cpu").build(Context())
    assert torch.equal(one.log_probs(ragged()), plain.log_probs(ragged()))
    a, b, c = (dict(engine.adapter_weights()) for engine in (one, two, other))
    assert all(torch.equal(a[name], b[name]) for name in a)
    lora_a = [name for name in a if "lora_A" in name]
    assert not any(torch.equal(a[name], c[name]) for name in lora_a) and not any(a[n].any() for n in a if "lora_B" in n)
    assert all(float(a[n].abs().max()) <= a[n].shape[1] ** -0.5 and a[n].std() > 0 for n in lora_a)


def test_only_target_layers_are_adapted(folders: dict[str, str]) -> None:
    engine = trainer(folders["llama"], lora=LoRA(r=2, alpha=1, targets=("q_proj", "model.layers.1.mlp.up_proj")))
    assert [name for name, _ in engine.adapter_weights()] == sorted(
        f"base_model.model.model.layers.{layer}.lora_{part}.weight"
        for layer in ("0.self_attn.q_proj", "1.self_attn.q_proj", "1.mlp.up_proj")
        for part in "AB"
    )
    every = {name.rpartition(".lora_")[0].rpartition(".")[2] for name, _ in trainer(folders["llama"]).adapter_weights()}
    assert every == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


# Merging


@pytest.mark.parametrize("kind", nightly_except(["llama", "gpt2"], KINDS))
def test_merged_weights_give_the_log_probs_of_the_adapter(folders: dict[str, str], kind: str, tmp_path: Path) -> None:
    engine = trainer(folders[kind])
    train(engine)
    engine.save_pretrained(str(tmp_path / "merged"))
    merged = TorchScorer(str(tmp_path / "merged"), device="cpu").build(Context())
    found = engine.log_probs(ragged())
    torch.testing.assert_close(merged.log_probs(ragged()), found, atol=1e-5, rtol=1e-5)
    sent = dict(engine.weights())
    assert list(sent) == sorted(sent)
    assert weights_digest(sent.items()) == weights_digest(named_weights(merged.model))
    assert sent.keys() == load_file(tmp_path / "merged" / "model.safetensors").keys()
    base = TorchScorer(folders[kind], device="cpu").build(Context())
    assert (found - base.log_probs(ragged())).abs().max() > 0.1


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_peft_loads_the_adapter_by_its_names(folders: dict[str, str], kind: str, tmp_path: Path) -> None:
    engine = trainer(folders[kind])
    train(engine)
    base = AutoModelForCausalLM.from_pretrained(folders[kind], dtype=torch.float32)
    peft_model = PeftModel.from_pretrained(base, peft_folder(engine, folders[kind], tmp_path)).eval()
    ids = torch.arange(10, 22)[None]
    with torch.no_grad():
        torch.testing.assert_close(peft_model(input_ids=ids).logits, engine.model(input_ids=ids).logits)


def test_experts_stay_unfused_in_saved_folders(tmp_path: Path) -> None:
    sizes: Any = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = MixtralConfig(vocab_size=VOCAB, num_key_value_heads=1, num_local_experts=2, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "experts")
    char_tokenizer().save_pretrained(tmp_path / "experts")
    engine = trainer(str(tmp_path / "experts"), lora=LoRA(targets=("q_proj", "v_proj")))
    train(engine)
    own = rollout(str(tmp_path / "experts"), device="cpu")
    assert own.sync(engine).digest == weights_digest(engine.weights())
    engine.save_pretrained(str(tmp_path / "merged"))
    stored = load_file(tmp_path / "merged" / "model.safetensors")
    assert stored.keys() == load_file(tmp_path / "experts" / "model.safetensors").keys()
    merged = TorchScorer(str(tmp_path / "merged"), device="cpu").build(Context())
    torch.testing.assert_close(merged.log_probs(ragged()), engine.log_probs(ragged()), atol=1e-5, rtol=1e-5)


# The reference


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_shared_reference_equals_the_base_model_bit_for_bit(folders: dict[str, str], dtype: str) -> None:
    engine = trainer(folders["qwen2"], dtype=dtype)
    reference = TorchScorer().build(Context(engine))
    assert isinstance(reference, Scorer) and not isinstance(reference, Trainer)
    assert TorchScorer().shares == "actor" and TorchScorer(folders["qwen2"]).shares is None
    truth = TorchScorer(folders["qwen2"], device="cpu", dtype=dtype).build(Context()).log_probs(ragged())  # type: ignore[arg-type]
    assert torch.equal(engine.log_probs(ragged()), truth)
    for _ in range(2):
        assert torch.equal(reference.log_probs(ragged()), truth)
        before = engine.log_probs(ragged())
        assert torch.equal(reference.log_probs(ragged()), truth)  # and the adapter is enabled again
        assert torch.equal(engine.log_probs(ragged()), before)
        train(engine)
        assert not torch.equal(engine.log_probs(ragged()), before)


def test_a_shared_teacher_disables_the_adapter(folders: dict[str, str]) -> None:
    engine, truth = trainer(folders["qwen2"]), TorchScorer(folders["qwen2"], device="cpu").build(Context())
    train(engine)
    teacher, batch = TorchScorer().build(Context(engine)), ragged()
    results, expected = teacher.last_states(batch), truth.last_states(batch)
    assert torch.equal(results.states, expected.states) and results.head == expected.head
    assert torch.equal(teacher.logit_norms(batch), truth.logit_norms(batch))
    assert all(map(torch.equal, teacher.top_log_probs(batch, 5), truth.top_log_probs(batch, 5)))
    assert not torch.equal(engine.top_log_probs(batch, 5).rest, truth.top_log_probs(batch, 5).rest)


def test_an_error_in_the_reference_reenables_the_adapter(folders: dict[str, str]) -> None:
    engine, batch = trainer(folders["llama"]), ragged()
    train(engine)
    before = engine.log_probs(batch)
    with raises("model.temperature"):
        TorchScorer().build(Context(engine)).log_probs(batch._replace(temperature=0 * batch.temperature))
    assert torch.equal(engine.log_probs(batch), before)


def test_a_shared_reference_without_an_adapter_is_refused(folders: dict[str, str]) -> None:
    plain = TorchTrainer(folders["llama"], device="cpu").build(Context())
    with raises("lora.no-adapter", found="TorchTrainerEngine"):
        TorchScorer().build(Context(plain))
    with pytest.raises(ParameterError, match="drop max_tokens, or name a folder"):
        TorchScorer(max_tokens=100)


def test_a_reference_that_shares_weights_sleeps_with_the_trainer(folders: dict[str, str]) -> None:
    engine = trainer(folders["llama"])
    reference, batch = TorchScorer().build(Context(engine)), ragged()
    assert isinstance(engine, Sleeper) and isinstance(engine, Checkpointed) and isinstance(reference, Sleeper)
    for sleeper in (engine, reference):
        sleeper.sleep()
        with raises("engine.asleep", call="log_probs"):
            reference.log_probs(batch)
        sleeper.wake()
    reference.log_probs(batch)


# Sync


def greedy(engine: Any) -> list[Any]:
    prompts = torch.arange(10, 30).view(4, 5)
    sampling = Sampling(temperature=0.0, top_k=0, top_p=1.0, max_new_tokens=8)
    sampled = engine.generate(prompts, torch.ones_like(prompts, dtype=torch.bool), list("abcd"), sampling, Key.of(0))
    return [sampled.responses.tolist(), sampled.log_probs]


@pytest.mark.parametrize("kind", nightly_except(["llama", "gpt2"], KINDS))
def test_only_adapter_weights_are_synced(folders: dict[str, str], kind: str) -> None:
    engine = trainer(folders[kind])
    shared, adapted, whole = (
        rollout(None, engine),
        rollout(folders[kind], lora=ADAPTER, device="cpu"),
        rollout(folders[kind], device="cpu"),
    )
    assert isinstance(engine, Adapted) and isinstance(adapted, Rollout)
    results: list[Any] = []
    for version in range(3):
        receipts = [each.sync(engine) for each in (shared, adapted, whole)]
        assert [receipt.version for receipt in receipts] == [version] * 3
        assert receipts[0].bytes == 0
        sent, merged = dict(engine.adapter_weights()), dict(engine.weights())
        assert receipts[1].bytes == sum(tensor.nbytes for tensor in sent.values()) < receipts[2].bytes / 4
        assert receipts[1].digest == weights_digest(sent.items())
        assert receipts[2].digest == weights_digest(merged.items())
        outputs = [greedy(each) for each in (shared, adapted, whole)]
        for tokens, log_probs in outputs[1:]:
            assert tokens == outputs[0][0]
            torch.testing.assert_close(log_probs, outputs[0][1], atol=1e-5, rtol=1e-5)
        assert torch.equal(outputs[1][1], outputs[0][1])  # the same computation
        results.append(outputs[0][1])
        train(engine)
    assert results[0].shape != results[2].shape or (results[0] - results[2]).abs().max() > 0.01


def test_a_base_or_scaling_that_differs_is_refused(folders: dict[str, str], tmp_path: Path) -> None:
    engine = trainer(folders["llama"])
    base = TorchScorer(folders["llama"], device="cpu").build(Context()).model
    assert engine.adapter_of == f"base weights {weights_digest(named_weights(base))}, scaled by 2.0"
    refused = [
        (tiny_folder(tmp_path, "llama", seed=1), ADAPTER, engine, "checkpoint.mismatch"),
        (folders["llama"], LoRA(r=4, alpha=4), engine, "checkpoint.mismatch"),
        (folders["llama"], LoRA(r=2, alpha=4), engine, "engine.weights-mismatch"),
        (folders["llama"], LoRA(r=4, alpha=8, targets=("q_proj",)), engine, "engine.weights-mismatch"),
        (folders["llama"], ADAPTER, trainer(folders["llama"], lora=None), "checkpoint.mismatch"),
    ]
    for folder, lora, source, code in refused:
        receiver = rollout(folder, lora=lora, device="cpu")
        with raises(code):
            receiver.sync(source)
        assert receiver.receipt is None


def test_the_probe_detects_an_unloaded_adapter(folders: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    engine, receiver = trainer(folders["llama"]), rollout(folders["llama"], lora=ADAPTER, device="cpu")
    train(engine)
    stale = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"
    load = type(receiver)._load
    monkeypatch.setattr(
        type(receiver), "_load", lambda self, got: load(self, {n: t for n, t in got.items() if n != stale})
    )
    with raises("sync.damaged", faults=(f"{stale} is not what was sent",)):
        receiver.sync(engine)
    assert receiver.receipt is None


def test_a_bfloat16_rollout_has_the_cast_adapter(folders: dict[str, str]) -> None:
    engine, receiver = (
        trainer(folders["llama"]),
        rollout(folders["llama"], lora=ADAPTER, dtype="bfloat16", device="cpu"),
    )
    train(engine)
    assert receiver.sync(engine).digest == weights_digest(engine.adapter_weights())
    assert {p.dtype for p in receiver.model.parameters()} == {torch.bfloat16}
    tensors = {n.replace(".default.", "."): p for n, p in receiver.model.named_parameters() if ".lora_" in n}
    for name, tensor in engine.adapter_weights():
        assert torch.equal(tensors[name.removeprefix("base_model.model.")], tensor.bfloat16())
    assert len(greedy(receiver)[0]) == 4


def test_each_rank_of_a_rollout_gets_the_same_synced_adapter(folders: dict[str, str]) -> None:
    engine, spec = trainer(folders["llama"]), TorchRollout(folders["llama"], ranks=2, lora=ADAPTER, device="cpu")
    assert (spec.receives, TorchRollout(folders["llama"]).receives) == ("adapter_weights", "weights")
    replicas = [spec.build(Context(rank=rank, world_size=2)) for rank in range(2)]
    receipts = [replica.sync(engine) for replica in replicas]
    assert receipts[0].digest == receipts[1].digest
    assert greedy(replicas[0])[0] == greedy(replicas[1])[0] == greedy(synced(rollout(None, engine), engine))[0]


def synced(receiver: Any, engine: Any) -> Any:
    receiver.sync(engine)
    return receiver


# Checkpoints


@pytest.mark.parametrize("optimizer", [AdamW(lr=0.02), SGD(lr=0.02, momentum=0.9)])
def test_resuming_is_bit_exact_with_adapter_checkpoints(
    folders: dict[str, str], optimizer: Any, tmp_path: Path
) -> None:
    engine = trainer(folders["llama"], optimizer=optimizer)
    train(engine)
    engine.save_checkpoint(str(tmp_path / "checkpoint"))
    size = sum(file.stat().st_size for file in (tmp_path / "checkpoint").iterdir())
    assert size < sum(tensor.nbytes for _, tensor in engine.weights())
    state = {**engine.state_dict()}
    by_state, by_folder = (trainer(folders["llama"], seed=9, optimizer=optimizer) for _ in range(2))
    by_state.load_state_dict(state)
    by_folder.load_checkpoint(str(tmp_path / "checkpoint"))
    logs = [train(each) for each in (engine, by_state, by_folder)]
    assert logs[0] == logs[1] == logs[2]
    digests = {weights_digest(each.weights()) for each in (engine, by_state, by_folder)}
    assert len(digests) == 1 and by_folder.version == 2


def test_a_checkpoint_of_another_base_model_is_refused(folders: dict[str, str], tmp_path: Path) -> None:
    engine, path = trainer(folders["llama"]), str(tmp_path / "checkpoint")
    engine.save_checkpoint(path)
    others = [
        trainer(tiny_folder(tmp_path, "llama", seed=1)),
        trainer(folders["llama"], lora=LoRA(r=4, alpha=1)),
        trainer(folders["llama"], lora=None),
    ]
    for other in others:
        before = weights_digest(other.weights())
        with raises("checkpoint.mismatch", path=path):
            other.load_checkpoint(path)
        with raises("checkpoint.mismatch", role="actor"):
            other.load_state_dict(engine.state_dict())
        assert weights_digest(other.weights()) == before


# Refusals


def test_unknown_target_layers_are_refused(folders: dict[str, str]) -> None:
    known = ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
    for targets, unknown in (
        (("q_proj", "qproj"), ("qproj",)),
        (("embed_tokens", "lm_head"), ("embed_tokens", "lm_head")),
        (("proj",), ("proj",)),
    ):
        for build in (trainer, rollout):
            with raises("lora.unknown-target", targets=unknown, known=known):
                build(folders["llama"], lora=LoRA(targets=targets), device="cpu")  # type: ignore[operator]
    for bad in ({"r": 0}, {"alpha": 0}, {"targets": ()}, {"targets": "q_proj"}, {"dropout": 0.1}):
        with pytest.raises(ParameterError, match=next(iter(bad))):
            LoRA(**bad)  # type: ignore[arg-type]


def test_without_peft_lora_is_refused_with_the_extra_to_install(
    folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    for backend in (TorchTrainer, TorchRollout):
        with raises("package.not-installed", package="peft", extra="lora"):
            backend(folders["llama"], lora=LoRA()).build(Context())


# Whole runs


def job(folder: str, own: bool) -> Job:
    graph = grpo(digits, n=4, max_new_tokens=6, temperature=1.0)
    return graph.bind(
        actor=TorchTrainer(folder, SGD(lr=0.5), device="cpu", lora=ADAPTER),
        ref=TorchScorer(),
        rollout=TorchRollout(folder, device="cpu", lora=ADAPTER) if own else TorchRollout(),
    )


@pytest.mark.parametrize("own", [False, True])
def test_grpo_trains_an_adapter(folders: dict[str, str], own: bool, prompts_file: str, tmp_path: Path) -> None:
    bound = job(folders["llama"], own)
    assert Graph.from_dict(bound.graph.to_dict()).fingerprint() == bound.graph.fingerprint()
    run = Training(bound, PromptData(prompts_file), steps=3, prompts=3, folder=str(tmp_path / "run")).run()
    kl = [metrics["actor/kl_loss"] for metrics in run.metrics]
    assert kl[0] == 0.0 < kl[2]  # exactly 0: old, new and reference log-probs are the same computation
    actor = run.engines["actor"]
    assert actor.version == 3
    saved = TorchScorer(str(tmp_path / "run" / "actor"), device="cpu").build(Context())
    assert weights_digest(named_weights(saved.model)) == weights_digest(actor.weights())
    sent = sum(tensor.nbytes for _, tensor in actor.adapter_weights())
    assert [metrics["sync/bytes"] for metrics in run.metrics] == [sent if own else 0] * 3


def test_a_run_with_a_shared_reference_and_no_adapter_is_refused(
    folders: dict[str, str], prompts_file: str, tmp_path: Path
) -> None:
    bound = job(folders["llama"], False).edit(bind={"actor": TorchTrainer(folders["llama"], SGD(lr=0.5), device="cpu")})
    with raises("lora.no-adapter"):
        Training(bound, PromptData(prompts_file), steps=1, prompts=3, folder=str(tmp_path / "run")).run()
