"""Architectures that differ from a plain decoder equal a float64 pass with plain attention (with padding, with a cache,
with an adapter), or are refused with an error that names them."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from flowrl.backends import LoRA, TorchCritic, TorchRollout, TorchScorer, TorchTrainer
from flowrl.backends.torch.score.packed import ATTENTION
from flowrl.data.text.tokenizer import assemble
from tests.backends.torch.generate.rollouts import KEY, SAMPLED, full_log_probs, names
from tests.backends.torch.generate.rollouts import ragged as prompts_of
from tests.backends.torch.train.trainers import CONTEXT, Folder, Pull, all_rows, trainer
from tests.nightly import nightly_except
from tests.support.architectures import architecture
from tests.support.errors import raises
from tests.support.models import Ragged, ragged, unpadded

SCORED = ["afmoe", "deepseek_v3", "deepseek_v4", "falcon", "gpt_oss", "jamba", "mamba", "minimax", "phimoe"]
SCORED += ["qwen3_next", "vaultgemma"]
CACHED = ["afmoe", "deepseek_v3", "falcon", "gpt_oss", "jamba", "mamba", "mamba2", "qwen3_next"]
ADAPTED = ["afmoe", "deepseek_v3", "deepseek_v4", "falcon", "jamba", "mamba", "phimoe", "qwen3_next"]
ON_EVERY_COMMIT = ["deepseek_v3", "gpt_oss", "jamba"]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Folder]:
    """The folder of an architecture, created on first use."""
    path, folders = tmp_path_factory.mktemp("architectures"), dict[str, str]()

    def of(kind: str) -> str:
        if kind not in folders:
            folders[kind] = architecture(path, kind)
        return folders[kind]

    yield of


def float64_log_probs(folder: str, batch: Ragged) -> Tensor:
    """Log-probs of each row alone, unpadded, by one float64 pass with plain attention."""
    plain: Any = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **plain).eval()
    out = torch.zeros(batch.response_mask.shape, dtype=torch.float64)
    for row, ids, counted in unpadded(batch):
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, counted - 1].double() / batch.temperature[row].double()
        out[row, batch.response_mask[row]] = logits.log_softmax(-1).gather(1, ids[0, counted, None]).squeeze(1)
    return out


def test_probe_tolerance_covers_reduced_precision_matmuls() -> None:
    """Each setting in its own process, since it is global to a process."""
    code = """if True:
        import os
        import torch
        from torch.backends import cuda
        from flowrl.backends.torch.probes import tolerance
        print(tolerance(torch.float32), tolerance(torch.bfloat16), flush=True)
        for setting in ("torch.set_float32_matmul_precision('high')", "cuda.matmul.fp32_precision = 'tf32'"):
            if not (child := os.fork()):
                exec(setting)
                print(tolerance(torch.float32), flush=True)
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
        print(tolerance(torch.float32))
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0.001", "0.2", "0.2", "0.2", "0.001"]


@pytest.mark.parametrize("kind", nightly_except(ON_EVERY_COMMIT, SCORED))
def test_log_probs_match_eager_attention_in_float64(kind: str, folder_of: Folder) -> None:
    batch = ragged(rows=4, prompt=12)
    found = TorchScorer(folder_of(kind), device="cpu").build(CONTEXT).log_probs(batch)
    torch.testing.assert_close(found.double(), float64_log_probs(folder_of(kind), batch), atol=3e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", nightly_except(ON_EVERY_COMMIT, CACHED))
def test_cached_decoding_equals_full_forward_passes(kind: str, folder_of: Folder) -> None:
    actor = trainer(folder_of(kind))
    engine = TorchRollout().build(SimpleNamespace(seed=0, rank=0, world_size=1, engine=lambda role: actor))
    engine.sync(actor)
    prompts, mask = prompts_of(engine, [3, 9, 3, 1])
    sampled = engine.generate(prompts, mask, names(4), SAMPLED, KEY)
    plain: Any = AutoModelForCausalLM.from_pretrained(folder_of(kind), attn_implementation="eager", dtype=torch.float32)
    expected = full_log_probs(plain.eval(), prompts, mask, sampled, SAMPLED.temperature)
    torch.testing.assert_close(sampled.log_probs[sampled.response_mask].double(), expected, atol=3e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", nightly_except(["deepseek_v3", "jamba"], ADAPTED))
def test_every_adapted_linear_layer_affects_the_log_probs(kind: str, folder_of: Folder, tmp_path: Path) -> None:
    engine = trainer(folder_of(kind), lora=LoRA(r=2, alpha=2))
    with torch.no_grad():
        for i, (_, tensor) in enumerate(engine.adapter_weights()):
            tensor.copy_(0.1 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(i)))
    engine.save_pretrained(str(tmp_path))
    merged = TorchScorer(str(tmp_path), device="cpu").build(CONTEXT).log_probs(ragged())
    torch.testing.assert_close(engine.log_probs(ragged()), merged, atol=3e-5, rtol=1e-5)
    before = {name: tensor.clone() for name, tensor in engine.adapter_weights()}
    engine.update(ragged(), [all_rows(ragged())], Pull())
    idle = [name for name, tensor in engine.adapter_weights() if torch.equal(tensor, before[name])]
    # Some experts may have no tokens, and short rows are not compressed.
    assert not [name for name in idle if "expert" not in name and "compressor" not in name]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("recurrent_gemma", "RecurrentGemmaForCausalLM"),
        ("rwkv", "RwkvForCausalLM"),
        ("xlstm", "xLSTMForCausalLM"),  # no parameter attention_mask
    ],
)
def test_models_that_cannot_distinguish_padding_from_tokens_are_refused(
    kind: str, name: str, folder_of: Folder
) -> None:
    with raises("model.padding", architecture=name):
        TorchTrainer(folder_of(kind), device="cpu").build(CONTEXT)


def test_nan_outputs_are_reported_as_not_finite_and_not_as_a_padding_error(folder: Folder, tmp_path: Path) -> None:
    """Finite weights, but a NaN in the config."""
    shutil.copytree(folder("llama"), tmp_path, dirs_exist_ok=True)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"rms_norm_eps": float("nan")}))
    for backend in (TorchScorer, TorchTrainer, TorchCritic):
        with raises("model.not-finite"):
            backend(str(tmp_path), device="cpu").build(CONTEXT)


@pytest.mark.parametrize("kind", ["recurrent_gemma", "rwkv", "minimax", "deepseek_v4"])
def test_models_whose_cache_changes_results_are_refused(kind: str, folder_of: Folder) -> None:
    with raises("model.cache", path=folder_of(kind)):
        TorchRollout(folder_of(kind), device="cpu").build(CONTEXT)


# Attention


def attention_of(engine: Any) -> str:
    return str(engine.model.config._attn_implementation)


@pytest.mark.parametrize("spec", [TorchScorer, TorchTrainer, TorchRollout])
def test_fused_attention_is_used_only_where_it_equals_the_model(spec: Any, folder: Folder, folder_of: Folder) -> None:
    fused = "sdpa" if spec is TorchRollout else ATTENTION  # equivalent for single rows
    for path, named, used in [
        (folder("llama"), None, fused),
        (folder("llama"), "sdpa", fused),
        (folder("llama"), "eager", "eager"),
        (folder("gemma2"), None, "eager"),
        (folder("gemma2"), "eager", "eager"),
        (folder_of("vaultgemma"), None, "eager"),
        (folder_of("falcon"), None, "eager"),
    ]:
        assert attention_of(spec(path, attention=named, device="cpu").build(CONTEXT)) == used
    with raises("model.attention", architecture="Gemma2ForCausalLM", attention="sdpa") as caught:
        spec(folder("gemma2"), attention="sdpa", device="cpu").build(CONTEXT)
    assert "softcap" in caught.value.message
    with raises("model.not-loadable"):
        spec(folder_of("gpt_oss"), attention="sdpa", device="cpu").build(CONTEXT)


def test_attention_soft_caps_are_detected_with_small_weights(folder: Folder, tmp_path: Path) -> None:
    lm = AutoModelForCausalLM.from_pretrained(folder("gemma2"))
    with torch.no_grad():
        for layer in lm.model.layers:
            layer.self_attn.q_proj.weight.mul_(1e-4)
    lm.save_pretrained(tmp_path)
    assert attention_of(TorchScorer(str(tmp_path), device="cpu").build(CONTEXT)) == "eager"


def test_attention_with_different_results_is_not_used(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers.modeling_utils as utils

    sdpa = utils.ALL_ATTENTION_FUNCTIONS["sdpa"]

    @functools.wraps(sdpa)
    def scaled(module: Any, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        return sdpa(module, 1.01 * query, *args, **kwargs)

    monkeypatch.setitem(utils.AttentionInterface._global_mapping, "sdpa", scaled)
    assert attention_of(TorchScorer(folder("llama"), device="cpu").build(CONTEXT)) == "eager"
    with raises("model.attention", attention="sdpa"):
        TorchScorer(folder("llama"), attention="sdpa", device="cpu").build(CONTEXT)


def test_a_critic_selects_its_attention_by_the_same_probe(folder: Folder) -> None:
    for kind, used in (("llama", ATTENTION), ("gemma2", "eager")):
        engine = TorchCritic(folder(kind), device="cpu").build(CONTEXT)
        assert engine._body.module.config._attn_implementation == used


# A rollout that shares the weights of its trainer


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_rollout_that_shares_weights_uses_the_attention_of_the_trainer(dtype: str, folder: Folder) -> None:
    actor = trainer(folder("llama"), dtype=dtype)
    engine = TorchRollout().build(SimpleNamespace(seed=0, rank=0, world_size=1, engine=lambda role: actor))
    engine.sync(actor)
    prompts, mask = prompts_of(engine, [3, 9, 4, 1])
    sampled = engine.generate(prompts, mask, names(4), SAMPLED, KEY)
    ids, attention, positions = assemble(prompts, mask, sampled.responses, sampled.response_mask)
    temperature = torch.full((4,), SAMPLED.temperature)

    def mismatch(scorer: Any) -> float:
        rows: Any = SimpleNamespace(
            input_ids=ids,
            attention_mask=attention,
            position_ids=positions,
            response_mask=sampled.response_mask,
            temperature=temperature,
        )
        return float((scorer.log_probs(rows) - sampled.log_probs)[sampled.response_mask].abs().mean())

    other = trainer(folder("llama"), dtype="bfloat16" if dtype == "float32" else "float32")
    assert mismatch(actor) < (1e-5 if dtype == "float32" else 0.6 * mismatch(other))
