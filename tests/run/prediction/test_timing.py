"""`timing.py`: stages by hand, from a shape, a speed and constants of one half."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from flowrl.run.prediction.arithmetic import Shape
from flowrl.run.prediction.timing import (
    SCORE,
    Fitted,
    Lengths,
    Rollout,
    Speed,
    Trainer,
    generated_seconds,
    synced_seconds,
    trained_seconds,
    update_of,
)

SHAPE = Shape(layers=2, hidden=8, vocabulary=100, heads=8, cache=16, attention=256, dense=192)
SPEED = Speed(flops=1e6, memory=1e6, link=1e5, network=1e4)
HALVES = Fitted(compute=0.5, bandwidth=0.5, layer=0.0, sync=0.5)
ALONE = Trainer(1, shards=1, tensor=1, micro_batches=1)


def test_lengths_have_the_mean_and_context_of_their_distribution() -> None:
    lengths = Lengths(mean=300.0, longest=1000.0)
    draws = 1000.0 * np.random.default_rng(0).random(200_000) ** (1.0 / lengths.power)
    assert draws.mean() == pytest.approx(300.0, rel=0.01)
    assert (draws**2).sum() / 2.0 / draws.sum() == pytest.approx(lengths.context, rel=0.01)
    assert (draws > 500.0).mean() == pytest.approx(lengths.alive(0.5), rel=0.01)
    assert Lengths(10.0, 10.0).context == 5.0 and Lengths(10.0, 10.0).alive(0.9) == 1.0


def test_a_score_is_products_and_traffic() -> None:
    active = 100 * 8 + 2 * (256 + 192)
    products = 40 * (2 * active + 4 * 2 * 8 * 5) / 5e5
    traffic = 40 * 68 * 2 * 8 / 5e5
    found = trained_seconds(SHAPE, SPEED, HALVES, Lengths(10.0, 10.0), 4, ALONE, SCORE)
    assert found == pytest.approx(products + traffic, rel=1e-12)


def test_gathers_bound_an_update_of_few_tokens_and_pipelines_wait() -> None:
    lengths, passes = Lengths(10.0, 10.0), update_of(checkpoints=True, lora=False)
    assert (passes.weights, passes.attention, passes.gathers) == (4.0, 4.5, 4.0)
    sharded = Trainer(4, shards=4, tensor=1, micro_batches=50)
    moved = 2 * (2 * 100 * 8 + 2 * (256 + 192)) * 4.0 * 50 * 0.75
    assert trained_seconds(SHAPE, SPEED, HALVES, lengths, 4, sharded, passes) == pytest.approx(moved / 5e4)
    far = dataclasses.replace(sharded, per_machine=2)
    assert trained_seconds(SHAPE, SPEED, HALVES, lengths, 4, far, passes) == pytest.approx(moved / 5e3)
    waits = dataclasses.replace(ALONE, idle=0.5)
    alone = trained_seconds(SHAPE, SPEED, HALVES, lengths, 4, ALONE, passes)
    assert trained_seconds(SHAPE, SPEED, HALVES, lengths, 4, waits, passes) == pytest.approx(2.0 * alone)


def test_decoding_reads_weights_and_cache_and_prefill_computes() -> None:
    one = generated_seconds(SHAPE, SPEED, HALVES, Lengths(64.0, 64.0), 0.0, 1, Rollout(1, 1, 8))
    active, cache = 100 * 8 + 2 * (256 + 192), 2 * 2 * 16
    read = sum((2 * active + (t + 0.5) * cache) / 5e5 for t in range(64))
    computed = sum((2 * active + 4 * 2 * 8 * (t + 0.5)) / 5e5 for t in range(64))
    assert one == pytest.approx(read + computed, rel=1e-9)
    prefilled = generated_seconds(SHAPE, SPEED, HALVES, Lengths(64.0, 64.0), 64.0, 1, Rollout(1, 1, 8))
    assert prefilled == pytest.approx(64 * (2 * active + 4 * 2 * 8 * 32) / 5e5)


def test_a_second_engine_halves_rows_that_wait() -> None:
    lengths = Lengths(40.0, 64.0)
    many = generated_seconds(SHAPE, SPEED, HALVES, lengths, 4.0, 1600, Rollout(1, 1, 8))
    assert generated_seconds(SHAPE, SPEED, HALVES, lengths, 4.0, 1600, Rollout(2, 1, 8)) < 0.51 * many


def test_a_sync_sends_all_weights_in_bfloat16() -> None:
    size = 2 * (2 * 100 * 8 + 2 * (256 + 192))
    assert synced_seconds(SHAPE, SPEED, HALVES, one_machine=True) == pytest.approx(size / 5e4)
    assert synced_seconds(SHAPE, SPEED, HALVES, one_machine=False, senders=2) == pytest.approx(size / 1e4)
