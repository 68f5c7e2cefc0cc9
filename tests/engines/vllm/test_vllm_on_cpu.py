"""Limits of vLLM on a CPU: chunked prefill of rows with their own generator, and unsupported head sizes."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from flowrl.backends.torch.score.engine import TorchTrainerEngine
from flowrl.backends.vllm.engine import VLLM, VLLMEngine
from flowrl.protocols.protocols import Sampling
from tests.engines.contract.answers import KEY, names, ragged, rows, to_score
from tests.engines.vllm.vllm_slot import VLLM_SETTINGS, VLLMSlot
from tests.support.errors import raises
from tests.support.models import char_tokenizer, tiny_config

pytestmark = pytest.mark.engines("vllm")


def test_prompts_longer_than_max_num_batched_tokens_have_exact_log_probs(
    vllm: VLLMEngine, vllm_slot: VLLMSlot, trainer: TorchTrainerEngine
) -> None:
    engine = vllm_slot.claim(vllm)
    engine.sync(trainer)
    prompts, mask = ragged(engine, [150] * 40)
    assert prompts.numel() > engine._llm.llm_engine.vllm_config.scheduler_config.max_num_batched_tokens
    sampling = Sampling(1.0, 0, 1.0, 8)
    sampled = engine.generate(prompts, mask, names(40), sampling, KEY)
    expected = trainer.log_probs(to_score(prompts, mask, sampled, 1.0))
    assert (sampled.log_probs - expected).abs().max() < 1e-4
    alone = engine.generate(prompts[-3:], mask[-3:], names(40)[-3:], sampling, KEY)
    assert rows(alone) == rows(sampled)[-3:]


def test_an_unsupported_head_size_is_named_at_start(vllm_slot: VLLMSlot, tmp_path: Path) -> None:
    config = tiny_config("llama")
    config.head_dim = 16
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    char_tokenizer().save_pretrained(tmp_path)
    with raises("engine.does-not-start", engine="vLLM") as caught:
        vllm_slot.start(VLLM(str(tmp_path), **VLLM_SETTINGS))
    assert "head_dim=16" in caught.value.message
