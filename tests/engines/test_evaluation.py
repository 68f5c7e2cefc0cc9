"""An evaluation on vLLM has the greedy responses of the model itself, and the rows of its seed."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowrl import Evaluation, PromptData
from flowrl.backends import TorchRollout
from flowrl.backends.vllm.engine import VLLM
from flowrl.operators import Generate
from tests.engines.vllm.vllm_slot import VLLMSlot
from tests.support.runs import lines

REWARD = "tests.support.rewards:digits"


@pytest.mark.engines("vllm")
def test_an_evaluation_on_vllm(tiny: str, prompts_file: str, tmp_path: Path, vllm_slot: VLLMSlot) -> None:
    vllm_slot.free()
    engine = VLLM(tiny, dtype="float32", max_model_len=64, kv_cache_bytes=64 << 20, frozen=True)
    rows = {}
    for name, one in {"vllm": engine, "torch": TorchRollout(tiny, frozen=True)}.items():
        greedy = Generate(temperature=0.0, max_new_tokens=6)
        found = Evaluation(one, PromptData(prompts_file), REWARD, greedy, batch=5, folder=str(tmp_path / name)).run()
        rows[name] = lines(found.folder / "predictions.jsonl")
    assert rows["vllm"] == rows["torch"] and len(rows["vllm"]) == 12
