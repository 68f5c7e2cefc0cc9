"""The weights that an engine selects: which tensors are rounded before they are sent, and accepted dtypes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from flowrl.sync.weight_selection import GatheredWeights, WeightSelection, dtype_mismatch, outgoing, rounded


@pytest.mark.parametrize(
    ("name", "shape", "rounds"),
    [
        ("model.layers.0.mlp.gate_proj.weight", (4, 3), True),
        ("model.layers.0.mlp.experts.3.up_proj.weight", (4, 3), True),
        ("lm_head.weight", (4, 3), True),
        ("model.layers.0.mlp.gate.weight", (4, 3), False),  # routes tokens to experts
        ("model.layers.0.feed_forward.router.weight", (4, 3), False),
        ("backbone.layers.0.mixer.A_log", (4, 3), False),
        ("backbone.layers.0.mixer.conv1d.weight", (4, 1, 3), False),
        ("model.layers.0.self_attn.q_conv1d.weight", (4, 1, 3), False),
        ("model.layers.1.mlp.moe_statics.e_score_correction_bias", (1, 4), False),
        ("layers.0.hc_attn_fn", (4, 3), False),
        ("layers.0.attn.compressor.ape", (4, 3), False),
        ("hc_head_fn", (4, 3), False),
        ("model.norm.weight", (4,), False),
        ("scalar", (), False),
    ],
)
def test_only_matrices_are_rounded(name: str, shape: tuple[int, ...], rounds: bool) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    [(same, found)] = rounded([(name, tensor)], torch.bfloat16)
    assert same == name and found.dtype == (torch.bfloat16 if rounds else torch.float32)
    assert torch.equal(found, tensor.bfloat16() if rounds else tensor)
    assert next(rounded([(name, tensor)], None))[1] is tensor


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16, torch.float64])
def test_other_dtypes_are_sent_unchanged(dtype: torch.dtype) -> None:
    tensor = torch.ones(2, 3, dtype=dtype)
    assert next(rounded([("w", tensor)], torch.float16))[1] is tensor


def test_weights_that_ranks_gather_are_rounded_by_them() -> None:
    """On all ranks at once, also on those that read none."""
    gathered: list[torch.dtype | None] = []

    def gather(dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
        gathered.append(dtype)
        yield "w", torch.ones(2, 2, dtype=dtype)

    weights = GatheredWeights(gather, lambda dtype: iter([gather(dtype)]))
    sent = rounded(weights, torch.bfloat16)
    assert [tensor.dtype for _, tensor in sent] == [torch.bfloat16] and not list(weights)
    unread = GatheredWeights(gather, lambda dtype: iter([gather(dtype)]))
    rounded(unread, torch.bfloat16)
    assert len(list(unread)) == 1 and gathered == [torch.bfloat16] * 2
    exact = GatheredWeights(gather, lambda dtype: iter([gather(dtype)]))
    assert [tensor.dtype for _, tensor in exact] == [torch.float32]


def test_a_rank_sends_its_share_in_rounds() -> None:
    """What it does not read is still gathered, with the other ranks; weights that are not gathered have one sender."""
    gathered: list[str] = []

    def deal(dtype: torch.dtype | None) -> Iterator[Iterator[tuple[str, Tensor]]]:
        for names in ("ab", "", "c"):
            gathered.append(names)
            yield ((name, torch.ones(2, 2, dtype=dtype)) for name in names)

    def plain() -> Iterator[tuple[str, Tensor]]:
        for name in "ab":
            gathered.append(name)
            yield name, torch.ones(2, 2)

    weights = GatheredWeights(lambda dtype: plain(), deal)
    rounds = [dict(one) for one in outgoing(weights, torch.bfloat16, 1)]
    assert [[*one] for one in rounds] == [["a", "b"], [], ["c"]] and gathered == ["ab", "", "c"]
    assert {tensor.dtype for one in rounds for tensor in one.values()} == {torch.bfloat16}
    unread = GatheredWeights(lambda dtype: plain(), deal)
    next(outgoing(unread, None, 1))
    assert [name for name, _ in unread] == ["c"] and gathered[3:] == ["ab", "", "c"]
    whole = [dict(one) for one in outgoing(GatheredWeights(lambda dtype: plain(), deal), None, None)]
    assert [[*one] for one in whole] == [["a", "b"]]
    for share, names in enumerate([["a", "b"], [], []]):
        gathered.clear()
        assert [[name for name, _ in one] for one in outgoing(plain(), torch.bfloat16, share)] == [names]
        assert gathered == ["a", "b"]


def test_adapters_are_sent_unrounded() -> None:
    assert WeightSelection("weights", torch.bfloat16).dtype == torch.bfloat16
    assert WeightSelection("adapter_weights", torch.bfloat16).dtype is None
    assert WeightSelection().dtype is None


@pytest.mark.parametrize(
    ("sent", "expected", "fits"),
    [
        (torch.float32, torch.float32, True),
        (torch.float32, torch.bfloat16, True),
        (torch.float64, torch.float32, True),
        (torch.bfloat16, torch.float16, True),
        (torch.int64, torch.int64, True),
        (torch.bfloat16, torch.float32, False),
        (torch.int64, torch.float32, False),
        (torch.float32, torch.int64, False),
        (torch.bool, torch.float32, False),
        (torch.int32, torch.int64, False),
    ],
)
def test_accepted_combinations_of_dtypes(sent: torch.dtype, expected: torch.dtype, fits: bool) -> None:
    assert (dtype_mismatch(sent, expected) is None) == fits
