"""What engines by others can do with weights, said by their specs."""

from __future__ import annotations

from typing import Any

import pytest

from flowrl import After, Lag
from flowrl.backends import VLLM, LoRA, SGLang
from flowrl.backends.hosted.spec import EngineSpec
from flowrl.errors import BindError
from flowrl.operators import RolloutCorrection
from tests.support.jobs import job_of


@pytest.mark.parametrize(
    ("backend", "settings", "caches", "words"),
    [
        (VLLM, {"lora": LoRA(r=2)}, "recompute", r"VLLM\('model', lora=.* vLLM scores no probe .* drop lora"),
        (SGLang, {"lora": LoRA(r=2)}, "recompute", r"SGLang\('model', lora=.*SGLang waits until all have ended"),
        (
            SGLang,
            {},
            "reuse",
            r"engine_args={'disable_overlap_schedule': True}\), or Lag\(..., spans=True, caches='recompute'",
        ),
    ],
)
def test_what_an_engine_cannot_swap_is_refused_before_anything_is_loaded(
    backend: Any, settings: Any, caches: Any, words: str
) -> None:
    with pytest.raises(BindError, match=words):
        backend("model", **settings).refuse_swap(caches)
    corrected = {"correction": After("group_advantage", RolloutCorrection("token", "truncate", high=2.0))}
    job = job_of("grpo", "model").edit(lag=Lag(1, spans=True, caches=caches), insert=corrected)
    with pytest.raises(BindError, match=words):
        job.edit(bind={"rollout": backend("model", **settings)}).refuse_unready()


@pytest.mark.parametrize(
    ("backend", "caches"),
    [
        (VLLM("model", tensor_parallel=2), "reuse"),
        (SGLang("model"), "recompute"),
        (SGLang("model", engine_args={"disable_overlap_schedule": True}), "reuse"),
    ],
)
def test_what_it_can_is_not(backend: EngineSpec, caches: Any) -> None:
    backend.refuse_swap(caches)
