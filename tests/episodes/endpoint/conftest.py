"""Clients at an endpoint send nothing elsewhere."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _local_prices(monkeypatch: pytest.MonkeyPatch) -> None:
    """LiteLLM fetches a list of prices when it is imported; a variable turns that off."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
