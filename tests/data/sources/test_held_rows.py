"""Rows in memory: lists of dicts, and objects of `datasets`."""

from __future__ import annotations

import copy
from datetime import date
from typing import Any

import datasets
import numpy as np
import pytest

from flowrl import PromptData
from flowrl.data.sources.held_rows import HeldRows
from flowrl.errors import ParameterError
from tests.support.rows.prompt_files import Characters, truths

ROWS = [{"prompt": f"{i}", "solution": i, "extra_info": {"day": i}} for i in range(3)]


def test_a_list_and_a_dataset_of_the_same_rows_are_equal() -> None:
    a, b = PromptData(ROWS), PromptData(datasets.Dataset.from_list(ROWS).with_format("torch"))
    assert a == b and a.digests() == b.digests() and repr(a.path) == repr(b.path) == "<3 rows in memory>"
    assert a != PromptData(ROWS[:2]) and a != PromptData("a.jsonl")
    first, second = (data.load(Characters(), 5) for data in (a, b))  # type: ignore[arg-type]
    assert first.next(4).equal(second.next(4)) and first.digest() == second.digest()


def test_rows_are_copied() -> None:
    rows = copy.deepcopy(ROWS)
    data = PromptData(rows, shuffle=False)
    digest = data.digests()
    rows[0]["solution"] = 9
    rows.clear()
    stream = data.load(Characters(), 0)  # type: ignore[arg-type]
    assert truths(stream.all()) == [0, 1, 2]
    assert HeldRows(ROWS).digest == digest[0]


def test_arrays_are_lists_and_dates_are_kept() -> None:
    row = next(iter(HeldRows([{"a": np.arange(2), "b": np.float32(0.5), "c": date(2026, 1, 2), "d": (1, [2])}])))
    assert row == {"a": [0, 1], "b": 0.5, "c": date(2026, 1, 2), "d": [1, [2]]}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}), r"splits 'train'; .* data\['train'\]"),
        (datasets.Dataset.from_list(ROWS).to_iterable_dataset(), r"pass list\(dataset.take\(n\)\)"),
        (datasets.Dataset.from_list(ROWS).select([]), "it has no rows"),
        ([{"a": object()}], "row 0 has 'a', which holds an object"),
    ],
)
def test_what_is_not_rows_is_refused(rows: Any, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        PromptData(rows)
