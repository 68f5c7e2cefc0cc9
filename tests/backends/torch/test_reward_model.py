"""`TorchRewardModel`: what transformers says of each row alone, whatever the padding; and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForSequenceClassification

from flowrl.backends import TorchRewardModel
from flowrl.run.build import EngineBuilder
from tests.architectures import SETTINGS
from tests.models import EOS, KINDS, PAD, VOCAB, char_tokenizer, ragged, tiny_config

OTHERS = ["deepseek_v3", "falcon", "gpt_oss", "jamba", "phimoe", "qwen3_next"]
"""Of the other architectures, those that transformers can classify by."""


def reward_folder(path: Path, kind: str = "llama", labels: int = 1, pad: int | None = PAD, seed: int = 3) -> str:
    """A tiny random reward model, and its tokeniser."""
    ids = dict(vocab_size=VOCAB, pad_token_id=pad, eos_token_id=EOS, bos_token_id=EOS)
    config = tiny_config(kind) if kind in KINDS else CONFIG_MAPPING[kind](**ids, **SETTINGS[kind])
    config.num_labels, config.pad_token_id = labels, pad
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim > 1 and "A_log" not in name and "conv" not in name:
                    parameter.normal_(0.0, 0.15)
    folder = str(path / f"{kind}-{labels}")
    model.save_pretrained(folder)
    char_tokenizer().save_pretrained(folder)
    return folder


def build(spec: TorchRewardModel) -> Any:
    return EngineBuilder({"reward_model": spec}, 0).engine("reward_model")


@torch.no_grad()
def alone(folder: str, rows: list[torch.Tensor], label: int = 0) -> torch.Tensor:
    """What transformers gives for each row without padding."""
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation="eager").eval()
    return torch.stack([model(input_ids=row[None]).logits[0, label] for row in rows])


@pytest.mark.parametrize("kind", [*KINDS, *OTHERS])
def test_each_row_has_the_score_that_transformers_gives_it_alone(kind: str, tmp_path: Path) -> None:
    folder = reward_folder(tmp_path, kind)
    batch = ragged(rows=8, seed=5)
    rows = [ids[mask] for ids, mask in zip(batch.input_ids, batch.attention_mask, strict=True)]
    found = build(TorchRewardModel(model=folder, device="cpu", max_tokens=40)).rewards(batch)
    expected = alone(folder, rows)
    assert expected.std() > 0.01
    assert found.dtype == torch.float32 and torch.allclose(found, expected, atol=1e-5, rtol=1e-5)
