"""Episodes of a `TorchRollout` ask a real engine, whose policy learns from its answers
(`flowrl/operators/engines/interact.py`)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flowrl.backends import VLLM
from tests.engines.vllm.vllm_slot import VLLM_SETTINGS, VLLMSlot
from tests.operators.engines import two_policies
from tests.run.engine.collecting import stream_of
from tests.support.models import tiny_folder

STEPS, PROMPTS = 2, 4


@pytest.mark.engines("vllm")
@pytest.mark.nightly
@pytest.mark.timeout(480)
def test_an_asked_vllm_has_the_log_probs_of_its_policy_and_is_synced(
    tiny: str, prompts_file: str, tmp_path: Path, vllm_slot: VLLMSlot
) -> None:
    vllm_slot.free()
    other = tiny_folder(tmp_path / "other", "qwen2", seed=3)
    job = two_policies.job(tiny, other, user=VLLM(other, max_model_len=160, **VLLM_SETTINGS))
    with job.open(seed=5) as executor:
        executor.sync()
        stream = stream_of(tiny, prompts_file)
        nodes = ["sampled", "user_old_log_prob"]
        for step, result in enumerate(
            executor.run(lambda step: stream.next(PROMPTS), range(STEPS), return_nodes=nodes)
        ):
            rows, trainer = result.columns["sampled"], result.columns["user_old_log_prob"]["old_log_probs"]
            mask, metrics = rows["response_mask"], result.metrics.compute()
            assert len(mask) == 2 * PROMPTS and set(rows["token_version"][mask].tolist()) == {step}
            assert torch.allclose(rows["rollout_log_probs"][mask], trainer[mask], atol=1e-4)
            assert metrics["others/user/answers"] == 2 and metrics["sync_user/sync/version"] == step + 1
