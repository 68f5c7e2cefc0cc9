"""Custom sources, and the scores that streams receive."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flowrl import PromptData, Source
from flowrl.data.sources.samplers import ByDifficulty
from flowrl.data.sources.source import Stream
from tests.support.errors import raises
from tests.support.rows.prompt_files import Characters, record, write_jsonl


def stream_of(tmp_path: Path, rows: int = 6, **settings: Any) -> Any:
    path = write_jsonl(tmp_path / "rows.jsonl", [record(i) for i in range(rows)])
    return PromptData(path, sampler=ByDifficulty(), **settings).load(Characters(), 0)  # type: ignore[arg-type]


def test_scores_are_recorded_for_their_rows(tmp_path: Path) -> None:
    """A uid has the row's index in the file, dropped rows included."""
    stream = stream_of(tmp_path, max_prompt_length=6, overlong="drop")  # of "add" and 1 to 6 characters
    assert (len(stream), stream.dropped) == (3, 3)
    batch = stream.next(3)
    assert sorted(batch["uid"]) == ["0/0/0", "0/1/0", "0/2/0"]
    stream.learn(1, {"0/2/0": [1.0, 1.0], "0/0/0": [0.0]})
    known = stream.position["known"]
    assert known["2"][1:] == [3.0, 1.0] and known["0"][1:] == [1.0, 2.0] and known["1"][1:] == [1.0, 1.0]
    assert stream.last_scored_step == 1


def test_scores_of_repeated_groups_count_once(tmp_path: Path) -> None:
    stream = stream_of(tmp_path)
    uid = stream.next(1)["uid"][0]
    stream.learn(1, {uid: [1.0], f"{uid}+1": [1.0], f"{uid}+2": [1.0]})
    assert next(iter(stream.position["known"].values()))[1:] == [2.0, 1.0]


@pytest.mark.parametrize("uid", ["a", "", "0/9/0", "0/1", "0/x/0", "0/1/x", "0/1/"])
def test_scores_of_unknown_groups_are_refused(uid: str, tmp_path: Path) -> None:
    stream = stream_of(tmp_path)
    with raises("sampler.unknown-group", uid=uid):
        stream.learn(1, {uid: [1.0]})


def test_batches_of_an_endless_stream_are_refused(tmp_path: Path) -> None:
    with raises("prompts.endless-stream", stream="PromptStream"):
        Stream.batches(stream_of(tmp_path), 2)


def test_a_source_has_default_methods(tmp_path: Path) -> None:
    class Bare(Source):
        level: int = 3

    bare = Bare()
    assert (bare.learns, bare.digests(), bare.identity()) == (False, [], {"level": 3})
    bare.refuse_missing()
    with pytest.raises(NotImplementedError, match="Bare has no load"):
        bare.load(Characters(), 0)  # type: ignore[arg-type]
