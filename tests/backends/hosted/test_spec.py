"""Specs of vLLM and SGLang refuse unsupported live weight updates."""

from __future__ import annotations

from typing import Any

import pytest

from flowrl import After, Lag
from flowrl.backends import VLLM, LoRA, SGLang
from flowrl.backends.hosted.spec import EngineSpec
from flowrl.operators import RolloutCorrection
from tests.support.errors import raises
from tests.support.jobs import job_of


@pytest.mark.parametrize(
    ("backend", "settings", "caches"),
    [
        (VLLM, {"lora": LoRA(r=2)}, "recompute"),
        (SGLang, {"lora": LoRA(r=2)}, "recompute"),
        (SGLang, {}, "reuse"),
    ],
)
def test_an_unsupported_swap_is_refused_before_loading(backend: Any, settings: Any, caches: Any) -> None:
    with raises("engine.no-swap", engine=backend.__name__, caches=caches):
        backend("model", **settings).refuse_swap(caches)
    corrected = {"correction": After("group_advantage", RolloutCorrection("token", "truncate", high=2.0))}
    job = job_of("grpo", "model").edit(lag=Lag(1, spans=True, caches=caches), insert=corrected)
    with raises("engine.no-swap"):
        job.edit(bind={"rollout": backend("model", **settings)}).refuse_unready()


@pytest.mark.parametrize(
    ("backend", "caches"),
    [
        (VLLM("model", tensor_parallel=2), "reuse"),
        (SGLang("model"), "recompute"),
        (SGLang("model", engine_args={"disable_overlap_schedule": True}), "reuse"),
    ],
)
def test_a_supported_swap_is_accepted(backend: EngineSpec, caches: Any) -> None:
    backend.refuse_swap(caches)
