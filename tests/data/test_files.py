"""Files and folders that are written whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowrl.data.files import file_digest, replaced, write_text


def test_a_file_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    for text in ("first\n", "second ü\u2028\n"):
        write_text(tmp_path / "run.json", text)
        assert (tmp_path / "run.json").read_text(encoding="utf-8") == text
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_a_folder_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with replaced(tmp_path / "folder") as draft:
            (draft / "deep").mkdir(parents=True)
            (draft / "deep" / name).write_text(name)
        assert [path.name for path in tmp_path.rglob("*")] == ["folder", "deep", name]


def test_an_error_leaves_what_was_there(tmp_path: Path) -> None:
    write_text(tmp_path / "lines", "whole")
    with pytest.raises(OSError, match="no space"), replaced(tmp_path / "lines") as draft:
        draft.write_text("ha")
        raise OSError("no space left on device")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["whole"]


def test_the_next_attempt_clears_up_after_a_crash(tmp_path: Path) -> None:
    (tmp_path / ".folder.partial" / "half").mkdir(parents=True)
    (tmp_path / ".folder.replaced" / "old").mkdir(parents=True)
    (tmp_path / "folder").mkdir()
    with replaced(tmp_path / "folder") as draft:
        draft.mkdir()
    assert [path.name for path in tmp_path.rglob("*")] == ["folder"]


def test_the_digest_is_of_the_content_alone(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"flowrl")
    (tmp_path / "b").write_bytes(b"flowrl")
    (tmp_path / "c").write_bytes(b"flowrl\n")
    a, b, c = (file_digest(tmp_path / name) for name in "abc")
    assert a == b != c and len(a) == 32
