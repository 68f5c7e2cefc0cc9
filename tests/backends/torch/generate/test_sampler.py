"""Sampling from many columns in blocks, against plain cumulative sums."""

from __future__ import annotations

import pytest
import torch

from flowrl.backends.torch.generate.sampler import BLOCK, next_token
from flowrl.protocols.protocols import Sampling

PLAIN = Sampling(1.0, 0, 1.0, 1)


@pytest.mark.parametrize("columns", [8 * BLOCK, 8 * BLOCK + 1, 10 * BLOCK, 12 * BLOCK - 1])
def test_block_search_equals_a_search_of_the_full_vocabulary(columns: int) -> None:
    generator = torch.Generator().manual_seed(columns)
    logits = 4 * torch.randn(50, columns, generator=generator)
    logits[:, ::3] = -torch.inf
    logits[:, 4 * BLOCK : 6 * BLOCK] = -torch.inf  # complete blocks without probability
    logits[:25, -2 * BLOCK :] = -torch.inf
    uniforms = torch.rand(50, dtype=torch.float64, generator=generator)
    uniforms[[0, 30]], uniforms[[1, 31]] = 0.0, 1 - 2**-53
    tokens, log_probs = next_token(logits, uniforms, PLAIN)
    exact = logits.double().softmax(-1)
    upper = exact.cumsum(-1).gather(1, tokens[:, None]).squeeze(1)
    lower = upper - exact.gather(1, tokens[:, None]).squeeze(1)
    assert (lower - 1e-6 < uniforms).all() and (uniforms < upper + 1e-6).all()
    assert logits.gather(1, tokens[:, None]).isfinite().all()
    torch.testing.assert_close(log_probs.double(), (upper - lower).log(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("columns", [5, 9 * BLOCK])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_of_non_finite_logits_has_nan_log_probs_and_changes_no_other_row(columns: int, bad: float) -> None:
    logits = torch.zeros(3, columns)
    logits[1, 3] = bad
    for sampling in (PLAIN, Sampling(0.7, 4, 0.9, 1), Sampling(0.0, 0, 1.0, 1)):
        tokens, log_probs = next_token(logits, torch.full((3,), 0.4, dtype=torch.float64), sampling)
        assert log_probs.isnan().tolist() == [False, True, False]
        assert (tokens < columns).all()
