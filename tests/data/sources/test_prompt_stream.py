"""Sampling prompts in batches and epochs, and resuming."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowrl.data.keys import Key
from flowrl.data.sources.prompts import PromptData
from flowrl.records import PromptBatch
from tests.nightly import examples
from tests.support.errors import raises
from tests.support.rows.prompt_files import Characters, load, record, truths, write_jsonl

# ---- batches


def test_batches_have_the_columns_of_prompt_batch(tmp_path: Path) -> None:
    stream = load(write_jsonl(tmp_path / "a.jsonl", [record(0, "ab"), record(1, "c")]), shuffle=False)
    batch = stream.next(2)
    assert list(batch.columns) == list(PromptBatch._fields)
    assert batch["prompts"].tolist() == [[*map(ord, "addab")], [0, *map(ord, "addc")]]
    assert batch["prompts"].dtype == torch.int64
    assert batch["prompt_mask"].tolist() == [[True] * 5, [False] + [True] * 4]
    assert list(batch["uid"]) == list(batch["row_id"]) == ["0/0/0", "0/1/0"]
    assert list(batch["data_source"]) == ["source-0", "source-1"]
    assert truths(batch) == ["0", "1"]
    assert list(batch["extra_info"]) == [{"index": 0, "split": "train"}, {"index": 1, "split": "train"}]
    assert batch["raw_prompt"][1] == [{"role": "system", "content": "add"}, {"role": "user", "content": "c"}]
    batch.to_record(PromptBatch)


def test_batches_are_padded_to_their_longest_prompt(tmp_path: Path) -> None:
    stream = load(write_jsonl(tmp_path / "a.jsonl", [record(i) for i in range(4)]), shuffle=False)
    assert len(stream) == 4
    assert [stream.next(2)["prompts"].shape[1] for _ in range(2)] == [5, 7]


def test_lists_of_equal_length_stay_one_object_per_row(tmp_path: Path) -> None:
    rows = [record(i) | {"reward_model": {"ground_truth": [i, i + 1]}} for i in range(3)]
    batch = load(write_jsonl(tmp_path / "a.jsonl", rows), shuffle=False).all()
    for name in ("uid", "row_id", "data_source", "ground_truth", "extra_info", "raw_prompt"):
        assert batch[name].shape == (3,) and batch[name].dtype == np.dtype(object)
    assert truths(batch) == [[0, 1], [1, 2], [2, 3]]


def test_extra_info_is_optional_and_other_columns_are_not_read(tmp_path: Path) -> None:
    rows = [record(i) | {"ability": "math"} for i in range(2)]
    del rows[0]["extra_info"]
    rows[1]["extra_info"] = None
    assert list(load(write_jsonl(tmp_path / "a.jsonl", rows)).all()["extra_info"]) == [{}, {}]


def test_changes_to_a_record_do_not_reach_later_epochs(tmp_path: Path) -> None:
    stream = load(write_jsonl(tmp_path / "a.jsonl", [record(0)]))
    first = stream.next(1)
    first["extra_info"][0]["index"] = "changed"
    first["raw_prompt"][0].clear()
    assert stream.next(1)["extra_info"][0] == {"index": 0, "split": "train"}
    assert len(stream.next(1)["raw_prompt"][0]) == 2


def test_each_prompt_is_tokenized_once(tmp_path: Path) -> None:
    tokenizer = Characters()
    stream = PromptData(write_jsonl(tmp_path / "a.jsonl", [record(i) for i in range(5)])).load(tokenizer, 0)  # type: ignore[arg-type]
    stream.next(12)
    stream.all()
    assert tokenizer.calls == 5


# ---- epochs


def test_row_order_is_the_permutation_of_the_epoch_key(tmp_path: Path) -> None:
    stream = load(write_jsonl(tmp_path / "a.jsonl", [record(i) for i in range(10)]), seed=5)
    for epoch in range(3):
        order = torch.randperm(10, generator=Key.of(5).derive("data", epoch).generator()).tolist()
        batch = stream.next(10)
        assert truths(batch) == [str(i) for i in order]
        assert list(batch["uid"]) == [f"{epoch}/{i}/0" for i in order]


def test_seeds_and_epochs_have_different_orders(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [record(i) for i in range(20)])
    a, b = load(path, seed=0), load(path, seed=1)
    orders = [truths(s.next(20)) for s in (a, a, b, b)]
    assert len({tuple(order) for order in orders}) == 4


def test_without_shuffling_rows_come_in_file_order(tmp_path: Path) -> None:
    stream = load(write_jsonl(tmp_path / "a.jsonl", [record(i) for i in range(3)]), shuffle=False)
    assert list(stream.next(7)["uid"]) == ["0/0/0", "0/1/0", "0/2/0", "1/0/0", "1/1/0", "1/2/0", "2/0/0"]


@examples(40)
@given(
    rows=st.integers(1, 9),
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=8),
    seed=st.integers(0, 99),
    shuffle=st.booleans(),
)
def test_every_epoch_has_every_row_once(rows: int, sizes: list[int], seed: int, shuffle: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        stream = load(write_jsonl(Path(folder) / "a.jsonl", [record(i) for i in range(rows)]), seed, shuffle=shuffle)
    uids = []
    for size in sizes:
        batch = stream.next(size)
        assert len(batch) == size
        assert truths(batch) == [uid.split("/")[1] for uid in batch["uid"]]
        uids += list(batch["uid"])
    assert len(set(uids)) == len(uids)
    epochs = [int(uid.split("/")[0]) for uid in uids]
    assert epochs == sorted(epochs)
    full, rest = divmod(len(uids), rows)
    assert Counter(epochs) == Counter({**{e: rows for e in range(full)}, **({full: rest} if rest else {})})
    assert stream.position == {"epoch": full, "offset": rest, "rows": rows}


@examples(40)
@given(
    rows=st.integers(1, 9),
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=8),
    stop=st.integers(0, 8),
    seed=st.integers(0, 99),
    shuffle=st.booleans(),
)
def test_a_resumed_stream_returns_the_remaining_batches(
    rows: int, sizes: list[int], stop: int, seed: int, shuffle: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = write_jsonl(Path(folder) / "a.jsonl", [record(i) for i in range(rows)])
        uninterrupted, resumed = load(path, seed, shuffle=shuffle), load(path, seed, shuffle=shuffle)
    for size in sizes[:stop]:
        uninterrupted.next(size)
    resumed.next(3)  # the previous position must not matter
    resumed.seek(json.loads(json.dumps(uninterrupted.position)))
    assert resumed.position == uninterrupted.position
    for size in [*sizes[stop:], rows]:
        assert resumed.next(size).equal(uninterrupted.next(size))


def test_seek_refuses_invalid_positions(tmp_path: Path) -> None:
    stream = load(write_jsonl(tmp_path / "a.jsonl", [record(i) for i in range(3)]))
    stream.next(1)
    for wrong in ({"offset": 3}, {"epoch": -1}, {"epoch": 0.0}, {"rows": 4}, {"rows": 2}, {"row": 3}):
        with raises("sampler.wrong-position", rows=3, found=str({"epoch": 0, "offset": 0, "rows": 3} | wrong)):
            stream.seek({"epoch": 0, "offset": 0, "rows": 3} | wrong)  # type: ignore[arg-type]
    for other in ({"epoch": 0, "offset": 0}, None, [0, 0, 3]):
        with raises("sampler.wrong-position", rows=3):
            stream.seek(other)  # type: ignore[arg-type]
    assert stream.position == {"epoch": 0, "offset": 1, "rows": 3}


def test_validation_batches_have_every_row_once_in_file_order(tmp_path: Path) -> None:
    stream = load(write_jsonl(tmp_path / "a.jsonl", [record(i) for i in range(5)]))
    stream.next(2)
    before = stream.position
    batches = list(stream.batches(2))
    assert [len(b) for b in batches] == [2, 2, 1]
    assert [t for b in batches for t in truths(b)] == truths(stream.all()) == ["0", "1", "2", "3", "4"]
    assert list(stream.all()["uid"]) == [f"0/{i}/0" for i in range(5)]
    assert stream.position == before


def test_empty_batches_are_refused(tmp_path: Path) -> None:
    stream = load(write_jsonl(tmp_path / "a.jsonl", [record(0)]))
    with raises("data.not-a-count", call="next", found=0):
        stream.next(0)
    with raises("data.not-a-count", call="batches", found=-1):
        stream.batches(-1)
