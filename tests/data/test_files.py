"""Files and folders that are written whole or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from flowrl.data.files import file_digest, parse_json, replaced, write
from tests.support.errors import raises


def test_writing_replaces_an_existing_file(tmp_path: Path) -> None:
    for text in ("first\n", "second ü\u2028\n"):
        write(tmp_path / "run.json", text.encode())
        assert (tmp_path / "run.json").read_text(encoding="utf-8") == text
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_writing_replaces_an_existing_folder(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with replaced(tmp_path / "folder") as draft:
            (draft / "deep").mkdir(parents=True)
            (draft / "deep" / name).write_text(name)
        assert [path.name for path in tmp_path.rglob("*")] == ["folder", "deep", name]


def test_an_error_leaves_the_existing_file_unchanged(tmp_path: Path) -> None:
    write(tmp_path / "lines", b"whole")
    with pytest.raises(OSError, match="no space"), replaced(tmp_path / "lines") as draft:
        draft.write_text("ha")
        raise OSError("no space left on device")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["whole"]


def test_the_next_write_removes_the_leftovers_of_a_crash(tmp_path: Path) -> None:
    (tmp_path / ".folder.partial" / "half").mkdir(parents=True)
    (tmp_path / ".folder.replaced" / "old").mkdir(parents=True)
    (tmp_path / "folder").mkdir()
    with replaced(tmp_path / "folder") as draft:
        draft.mkdir()
    assert [path.name for path in tmp_path.rglob("*")] == ["folder"]


def test_file_digest_depends_only_on_content(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"flowrl")
    (tmp_path / "b").write_bytes(b"flowrl")
    (tmp_path / "c").write_bytes(b"flowrl\n")
    a, b, c = (file_digest(tmp_path / name) for name in "abc")
    assert a == b != c and len(a) == 32


def test_an_existing_link_is_replaced_and_its_target_stays(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "kept").write_text("kept")
    for name, target in (("folder", "elsewhere"), ("dangling", "nowhere"), ("file", "elsewhere/kept")):
        (tmp_path / name).symlink_to(target)
        with replaced(tmp_path / name) as draft:
            draft.mkdir()
        assert (tmp_path / name).is_dir() and not (tmp_path / name).is_symlink()
    assert (tmp_path / "elsewhere" / "kept").read_text() == "kept"


def test_writing_a_file_over_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "trace.json").mkdir()
    with raises("data.unwritable-file", path=f"{tmp_path}/trace.json", reason="Is a directory"):
        write(tmp_path / "trace.json", b"{}")
    assert [path.name for path in tmp_path.rglob("*")] == ["trace.json"]


def test_a_failed_write_is_reported_with_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    with raises("data.unwritable-file", path=f"{tmp_path}/run.json", reason="No space left on device"):
        write(tmp_path / "run.json", b"{}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", [b"[" * 100_000, b"{", b"\xff", b"", "9" * 5000], ids=lambda text: str(text)[:10])
def test_invalid_json_is_a_value_error(text: bytes | str) -> None:
    with pytest.raises(ValueError):
        parse_json(text)
