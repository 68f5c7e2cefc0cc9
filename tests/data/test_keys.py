"""Keys: randomness depends on names and row ids, and on nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from flowrl.data.keys import Key
from tests.support.errors import raises

names = st.one_of(st.text(alphabet="a1:\x1fstr", max_size=8), st.integers(-5, 5))


@given(st.lists(names, max_size=4), st.lists(names, max_size=4))
def test_different_names_give_different_keys(first: list[str | int], second: list[str | int]) -> None:
    key = Key.of(0)
    assert (key.derive(*first) == key.derive(*second)) == (
        [(type(p), p) for p in first] == [(type(p), p) for p in second]
    )


@pytest.mark.parametrize("seed", ["1", 1.0, True, None])
def test_a_seed_is_an_int(seed: Any) -> None:
    with raises("data.wrong-type", found=repr(seed)):
        Key.of(seed)


def test_types_positions_and_parents_change_the_key() -> None:
    key = Key.of(0)
    keys = [
        key.derive(1),
        key.derive("1"),
        key.derive(1, 2),
        key.derive(12),
        key.derive("1\x1fint:2"),
        key.derive("1", 2),
        key.derive("1", "2"),
        key.derive("1\x1fstr:2"),
        key.derive("1\x1f\x1fstr:2"),
        key.derive(1).derive(2),
        Key.of(1).derive(1),
    ]
    assert len(set(keys)) == len(keys)
    assert all(0 <= k.bits < 2**128 for k in keys)


def test_key_values_are_stable_across_versions() -> None:
    """The text that is hashed, spelled out: a run must repeat years later."""
    root = xxhash.xxh3_128_intdigest(f"{0:032x}\x1fstr:seed\x1fint:7".encode())
    child = xxhash.xxh3_128_intdigest(f"{root:032x}\x1fstr:step\x1fint:3\x1fstr:generate".encode())
    assert Key.of(7).derive("step", 3, "generate").bits == child


def test_random_numbers_of_a_row_do_not_depend_on_the_batch() -> None:
    key = Key.of(0).derive("generate")
    rows = [f"0/{i}" for i in range(5)]
    whole = key.uniforms(rows, 7)
    assert whole.shape == (5, 7)
    assert whole.dtype == torch.float64
    assert torch.equal(key.uniforms(rows[::-1], 7), whole.flip(0))
    assert torch.equal(torch.cat([key.uniforms([row], 7) for row in rows]), whole)
    assert torch.equal(key.uniforms(rows, 3), whole[:, :3])
    assert key.uniforms([], 7).shape == (0, 7)
    assert not torch.equal(Key.of(1).derive("generate").uniforms(rows, 7), whole)


def test_random_numbers_are_uniform_and_independent_across_rows() -> None:
    draws = Key.of(0).uniforms([str(i) for i in range(500)], 20).numpy()
    assert draws.min() >= 0
    assert draws.max() < 1
    ranks = np.arange(1, draws.size + 1) / draws.size
    assert np.abs(np.sort(draws, axis=None) - ranks).max() < 1.95 / np.sqrt(draws.size)  # Kolmogorov-Smirnov at 0.1 %
    assert abs(np.corrcoef(draws[:-1].ravel(), draws[1:].ravel())[0, 1]) < 0.05


def test_generators_are_seeded_and_do_not_change_the_global_state() -> None:
    state = torch.get_rng_state()
    first, second = (torch.randn(4, generator=Key.of(3).generator()) for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(first, torch.randn(4, generator=Key.of(4).generator()))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("seed", [0, -1, 2**70])
def test_any_integer_is_a_seed(seed: int) -> None:
    assert Key.of(seed) == Key.of(seed)
    Key.of(seed).generator()
