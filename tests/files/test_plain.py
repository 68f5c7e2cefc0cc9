"""Untrusted files: plain data, or an error with the line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flowrl.files import plain
from tests.support.errors import raises


def bomb(levels: int) -> str:
    """A few lines that expand to ``10 ** levels`` values."""
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, levels)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("g.json", "[" * 100_000, "it nests more than 64 lists and mappings"),
        ("g.json", '{"a":' * 3_000 + "1" + "}" * 3_000, "it nests more than 64 lists and mappings"),
        ("g.json", "[" * 65 + "]" * 65, "it nests more than 64 lists and mappings"),
        ("g.yaml", "[" * 100_000, "it nests more than 64 lists and mappings"),
        (
            "g.yaml",
            "\n".join(f"{' ' * i}a:" for i in range(300)),
            "it nests more than 64 lists and mappings",
        ),
        ("g.yaml", "- " * 65 + "1", "it nests more than 64 lists and mappings"),
        ("g.yaml", bomb(9), "it holds more than 200000 values, counting what aliases repeat"),
        ("g.yaml", "a: &a [*a]", "it nests more than 64 lists and mappings"),
        ("g.yaml", "a: &a {b: *a}", "it nests more than 64 lists and mappings"),
        ("g.yaml", "a: [", "line 1, column 5: expected the node content, but found '<stream end>'"),
        ("g.yaml", "a: 1\n  b: 2", "line 2, column 4: mapping values are not allowed here"),
        ("g.yaml", "a: \x00", "character 4: special characters are not allowed"),
        ("g.yaml", "a: 2020-01-01", "a is a date, which JSON does not have"),
        ("g.yaml", "a: [1, {b: !!binary aGk=}]", "a[1].b is a bytes, which JSON does not have"),
        ("g.yaml", "a: !!set {b}", "a is a set, which JSON does not have"),
        ("g.yaml", "1: 2", "it has the key 1, an int; keys must be text"),
        ("g.yaml", "a: {null: 2}", "a has the key None, a NoneType; keys must be text"),
        ("g.yaml", "[1]: 2", "line 1, column 1: found unhashable key"),
        ("g.yaml", "a: 1\nb: 2\na: 3", "line 1, column 1: duplicate key 'a' in one mapping"),
        ("g.json", '{"a": {"b": 1, "b": 2}}', "ValueError: duplicate key 'b' in one mapping"),
        ("g.yaml", "a: !!int x", "ValueError: "),
        ("g.yaml", "a: !!int", "IndexError: "),
        ("g.yaml", "a: !!bool x", "KeyError: 'x'"),
        ("g.yaml", "a: !!timestamp x", "AttributeError: "),
        ("g.yaml", "a: 2020-13-45", "ValueError: "),
        (
            "g.yaml",
            "a: !!python/object/apply:os.system ['true']",
            "line 1, column 4: could not determine a constructor",
        ),
        ("g.yaml", "a: 1\n---\nb: 2", "line 2, column 1: but found another document"),
        ("g.json", "{", "line 1, column 2: Expecting property name"),
        ("g.json", "1" * 5000, "ValueError: Exceeds the limit"),
        ("g.json", "{} {}", "line 1, column 4: Extra data"),
        ("g.json", "", "line 1, column 1: Expecting value"),
    ],
)
def test_deeply_nested_and_non_plain_data_is_refused_with_its_place(
    name: str, text: str, reason: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_text(text)
    with raises("file.unreadable", path=str(path)) as caught:
        plain.read(path)
    assert caught.value.facts["reason"].startswith(reason)
    assert "\n" not in str(caught.value) and "unicode string" not in str(caught.value)


@pytest.mark.parametrize("name", ["a\0b.json", "gone.json", "folder.yaml"])
def test_a_path_without_a_file_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder.yaml").mkdir()
    with raises("file.unreadable"):
        plain.read(tmp_path / name)


def test_bytes_that_are_not_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "g.json"
    path.write_bytes(b"\xff\xfe")
    with raises("file.unreadable", path=str(path)) as caught:
        plain.read(path)
    assert caught.value.facts["reason"].startswith("UnicodeDecodeError: ")


@pytest.mark.parametrize(
    "data", [None, 3, "text", [1.5, True, None], {"a": {"b": [{}, []]}}, json.loads("[" * 64 + "]" * 64)]
)
def test_plain_data_round_trips_as_json_and_yaml(data: Any, tmp_path: Path) -> None:
    (tmp_path / "g.json").write_text(json.dumps(data))
    (tmp_path / "g.yaml").write_text(json.dumps(data))  # which is YAML too
    assert plain.read(tmp_path / "g.json") == plain.read(tmp_path / "g.yaml") == data


def test_files_may_have_aliases(tmp_path: Path) -> None:
    (tmp_path / "g.yaml").write_text("a: &a {b: 1}\nc: *a\nd: {<<: *a, e: 2}")
    assert plain.read(tmp_path / "g.yaml") == {"a": {"b": 1}, "c": {"b": 1}, "d": {"b": 1, "e": 2}}
