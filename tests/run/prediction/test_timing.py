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
HALVES = Fitted(compute=0.5, layer=0.0, experts=0.0, sync=0.5)
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
    traffic = 40 * 68 * 2 * 8 / 8e5
    found = trained_seconds(SHAPE, SPEED, HALVES, Lengths(10.0, 10.0), 4, ALONE, SCORE)
    assert found == pytest.approx(products + traffic, rel=1e-12)


def test_gathers_bound_an_update_of_few_tokens_and_pipelines_wait() -> None:
    lengths, passes = Lengths(10.0, 10.0), update_of(checkpoints=True, lora=False)
    assert (passes.weights, passes.attention, passes.gathers) == (4.0, 4.5, 4.0)
    sharded = Trainer(4, shards=4, tensor=1, micro_batches=50)
    moved = 2 * (2 * 100 * 8 + 2 * (256 + 192)) * 4.0 * 50 * 0.75
    assert trained_seconds(SHAPE, SPEED, HALVES, lengths, 4, sharded, passes) == pytest.approx(moved / 8e4)
    far = dataclasses.replace(sharded, per_machine=2)
    assert trained_seconds(SHAPE, SPEED, HALVES, lengths, 4, far, passes) == pytest.approx(moved / 8e3)
    waits = dataclasses.replace(ALONE, idle=0.5)
    alone = trained_seconds(SHAPE, SPEED, HALVES, lengths, 4, ALONE, passes)
    assert trained_seconds(SHAPE, SPEED, HALVES, lengths, 4, waits, passes) == pytest.approx(2.0 * alone)


def test_decoding_reads_weights_and_cache_and_prefill_computes() -> None:
    one = generated_seconds(SHAPE, SPEED, HALVES, Lengths(64.0, 64.0), 0.0, 1, Rollout(1, 1, 8))
    active, cache = 100 * 8 + 2 * (256 + 192), 2 * 2 * 16
    read = sum((2 * active + (t + 0.5) * cache) / 8e5 + 2 * 5e-5 for t in range(64))
    computed = sum((2 * active + 4 * 2 * 8 * (t + 0.5)) / 5e5 for t in range(64))
    assert one == pytest.approx(read + computed, rel=1e-9)
    prefilled = generated_seconds(SHAPE, SPEED, HALVES, Lengths(64.0, 64.0), 64.0, 1, Rollout(1, 1, 8))
    assert prefilled == pytest.approx(64 * (2 * active + 4 * 2 * 8 * 32) / 5e5)


def test_a_second_engine_halves_rows_that_wait() -> None:
    lengths = Lengths(40.0, 64.0)
    many = generated_seconds(SHAPE, SPEED, HALVES, lengths, 4.0, 1600, Rollout(1, 1, 8))
    assert generated_seconds(SHAPE, SPEED, HALVES, lengths, 4.0, 1600, Rollout(2, 1, 8)) < 0.51 * many


def test_a_sync_sends_bytes_by_link_or_network() -> None:
    size = 2 * (2 * 100 * 8 + 2 * (256 + 192))
    assert synced_seconds(size, SPEED, HALVES, one_machine=True) == pytest.approx(size / 5e4)
    assert synced_seconds(size, SPEED, HALVES, one_machine=False, senders=2) == pytest.approx(size / 1e4)


MIXTURE = dataclasses.replace(SHAPE, sparse=96, experts=4, chosen=2)
"""Two layers of four experts of width 4, of which a token chooses two."""


def test_experts_are_read_and_written_and_their_launches_wait() -> None:
    each = 2 * 2 * (2 * 8 + 3 * 4)  # input, output, two products and their activation, written and read in bfloat16
    assert MIXTURE.traffic_bytes == 2 * (2 * (34 - 19) * 8 + 2 * each)
    lengths, waits = Lengths(10.0, 10.0), HALVES._replace(experts=0.25, layer=0.5)
    trainer = dataclasses.replace(ALONE, micro_batches=3)
    free, held = (trained_seconds(MIXTURE, SPEED, one, lengths, 4, trainer, SCORE) for one in (HALVES, waits))
    assert held - free == pytest.approx(0.25 * 2 * 3)
    free, held = (
        generated_seconds(MIXTURE, SPEED, one, Lengths(64.0, 64.0), 0.0, 1, Rollout(1, 1, 8)) for one in (HALVES, waits)
    )
    assert held - free == pytest.approx(0.5 * 2 * 64)


def test_expert_parallel_gathers_fewer_experts_and_sends_tokens() -> None:
    lengths, apart = Lengths(10.0, 10.0), Trainer(4, shards=4, tensor=1, micro_batches=1000, expert=4)
    whole = trained_seconds(MIXTURE, SPEED, HALVES, lengths, 4, dataclasses.replace(apart, expert=1), SCORE)
    cut = trained_seconds(MIXTURE, SPEED, HALVES, lengths, 4, apart, SCORE)
    assert whole - cut == pytest.approx(2 * 96 * 4 * 2 * 0.75 * 0.75 * 1000 / 8e4)
    few = dataclasses.replace(apart, micro_batches=0)
    sent = trained_seconds(MIXTURE, SPEED, HALVES, lengths, 4, few, SCORE)
    sent -= trained_seconds(MIXTURE, SPEED, HALVES, lengths, 4, dataclasses.replace(few, expert=1), SCORE)
    assert sent == pytest.approx(10 * 2 * 2 * 2 * 2 * 8 * 0.75 / 8e4)


def test_an_engine_that_is_refilled_stays_full() -> None:
    lengths = Lengths(16.0, 64.0)
    full = generated_seconds(SHAPE, SPEED, HALVES, lengths, 0.0, 8, Rollout(1, 1, 8, refilled=True))
    step = (2 * (100 * 8 + 2 * (256 + 192)) + 8 * lengths.context * 64) / 8e5 + 2 * 5e-5
    step += 8 * (2 * (100 * 8 + 2 * (256 + 192)) + 4 * 2 * 8 * lengths.context) / 5e5
    assert full == pytest.approx(16 * step)
    assert full < generated_seconds(SHAPE, SPEED, HALVES, lengths, 0.0, 8, Rollout(1, 1, 8))


def test_all_reduces_of_an_engine_take_their_hops() -> None:
    lengths, fast = Lengths(64.0, 64.0), SPEED._replace(flops=1e30, memory=1e30)
    one, four = (generated_seconds(SHAPE, fast, HALVES, lengths, 0.0, 1, Rollout(1, n, 8)) for n in (1, 4))
    assert four - one == pytest.approx(64 * 2 * 2 * 2 * 2 * 5e-6)
