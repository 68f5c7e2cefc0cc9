"""A student trains on the samples of a frozen real engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flowrl.backends import SGD, SGLang, TorchTrainer
from flowrl.backends.vllm.engine import VLLM
from flowrl.records import FROZEN
from flowrl.sync.digest import weights_digest
from tests.engines.contract.answers import CONTEXT
from tests.engines.vllm.vllm_slot import VLLMSlot
from tests.operators.updates.test_frozen import seq_kd
from tests.run.engine.collecting import stream_of
from tests.run.engine.test_lag import log_probs
from tests.support.models import tiny_folder

ENGINES: dict[str, Any] = {
    "vllm": lambda folder: VLLM(folder, frozen=True, dtype="float32", max_model_len=64, kv_cache_bytes=64 << 20),
    "sglang": lambda folder: SGLang(folder, frozen=True, dtype="float32", max_model_len=64, max_num_seqs=8),
}


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("vllm", marks=[pytest.mark.engines("vllm"), pytest.mark.nightly]),
        pytest.param("sglang", marks=pytest.mark.engines("sglang")),
    ],
)
@pytest.mark.timeout(480)
def test_a_student_trains_on_the_samples_of_a_frozen_engine(
    kind: str, tiny: str, prompts_file: str, tmp_path: Path, vllm_slot: VLLMSlot
) -> None:
    vllm_slot.free()
    folder = tiny_folder(tmp_path / "teacher", seed=1)
    job = seq_kd().bind(actor=TorchTrainer(tiny, SGD(lr=0.5), device="cpu"), teacher=ENGINES[kind](folder))
    job.refuse_unready(4)  # FR002 asks for no Sync
    losses = []
    with job.open() as executor:
        executor.sync()
        receipt = executor.runner.engines["teacher"].receipt
        assert receipt.version == FROZEN and receipt.frozen
        assert receipt.digest == weights_digest(TorchTrainer(folder, device="cpu").build(CONTEXT).weights())
        stream = stream_of(tiny, prompts_file)
        for result in executor.run(lambda step: stream.next(4), range(2), return_nodes=["generate"]):
            losses.append(float(result.metrics["actor/pg_loss"].compute()))
            rows = result.columns["generate"]
            mask = rows["response_mask"]
            assert set(rows["policy_version"].tolist()) == set(rows["token_version"][mask].tolist()) == {FROZEN}
            responses = rows["input_ids"][:, -mask.shape[1] :]
            expected = log_probs(Path(folder), {**rows.columns, "responses": responses})
            assert torch.allclose(rows["rollout_log_probs"][mask], expected[mask], atol=1e-4)
    assert losses[1] < losses[0]
