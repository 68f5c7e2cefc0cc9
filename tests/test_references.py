"""References: functions are named, resolved, checked without running them, and compared by their source."""

from __future__ import annotations

import functools
import re
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from flowrl import references as functions
from tests.support.errors import raises
from tests.support.rows.reward_rows import SCORES


class Called:
    def __call__(self, x: float) -> float:
        return x


def test_reference_and_resolve_are_inverse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "user" / "scores.py"
    file.parent.mkdir()
    file.write_text(SCORES, encoding="utf-8")

    def scores(name: str) -> str:
        return f"{file}:{name}"

    for name in ("exact", "Marker.length"):
        fn = functions.resolve(scores(name))
        assert fn is functions.resolve(scores(name))
        assert functions.reference(fn) == scores(name)
    monkeypatch.chdir(file.parent.parent)  # below the working directory, a path is relative
    assert functions.reference(fn) == f"{file.parent.name}/scores.py:Marker.length"
    assert functions.resolve(f"{file.parent.name}/scores.py:Marker.length") is fn
    assert functions.reference(textwrap.dedent) == "textwrap:dedent"
    assert functions.resolve("textwrap:dedent") is textwrap.dedent
    for unnamed in (lambda: 1, functools.partial(textwrap.dedent), Called().__call__):
        assert functions.reference(unnamed) is None
    with raises("reference.not-a-function", reference=scores("number"), found="a float"):
        functions.resolve(scores("number"))


def test_check_reads_a_file_without_running_it(tmp_path: Path) -> None:
    file = tmp_path / "loud.py"
    file.write_text("def f(): pass\nif f:\n    from os import path as g\nraise SystemExit('was run')\n")
    functions.check(f"{file}:f")
    functions.check(f"{file}:g")
    with raises("reference.undefined-name", name="h", known=("f",)):
        functions.check(f"{file}:h")
    file.write_text("from os import *\n")
    functions.check(f"{file}:anything")
    for broken in ("def f(:\n", "return 1\n"):
        file.write_text(broken)
        with raises("reference.broken-file", path=str(file), line=1):
            functions.check(f"{file}:f")


@pytest.mark.parametrize(
    "binding",
    [
        "f = 1",
        "g = f = 1",
        "(g, *f) = h",
        "f: int = 1",
        "del f",
        "(f := 1)",
        "def f(): ...",
        "async def f(): ...",
        "class f: ...",
        "import f",
        "import f.g",
        "import g as f",
        "from g import f",
        "from g import h as f",
        "for f in (): ...",
        "with open('x') as f: ...",
        "try: ...\nexcept ValueError as f: ...",
        "try: ...\nfinally: f = 1",
        "if g:\n    while h: f = 1",
        "match g:\n    case [1, f]: ...",
        "match g:\n    case [*f]: ...",
        "match g:\n    case {**f}: ...",
        "match g:\n    case int() as f: ...",
    ],
)
def test_check_finds_each_form_of_binding(binding: str, tmp_path: Path) -> None:
    file = tmp_path / "forms.py"
    file.write_text(f"{binding}\n")
    if "f = 1" not in binding and "class" not in binding and "int =" not in binding:
        functions.check(f"{file}:f")
    file.write_text(f"f = 1\n{binding}\n")  # two meanings
    functions.check(f"{file}:f")


@pytest.mark.parametrize("other", ["f", "print(f)", "f: int", "def g():\n    f = 1", "import g.f", "x.f = 1"])
def test_check_does_not_mistake_a_use_for_a_binding(other: str, tmp_path: Path) -> None:
    file = tmp_path / "forms.py"
    file.write_text(f"{other}\n")
    with raises("reference.undefined-name", name="f"):
        functions.check(f"{file}:f")


ENDLESS = "x = " + "+".join(["1"] * 50_000) + "\ndef f(): pass\n"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"def f(): pass\n\0", "source code string cannot contain null bytes"),
        ("\n\n\n# é\ndef f(): pass\n".encode("latin-1"), "utf-8"),
        (b"# coding: martian\ndef f(): pass\n", "unknown encoding .*martian"),
        (ENDLESS.encode(), "recursion"),
    ],
    ids=["a NUL", "another encoding", "an unknown encoding", "an endless sum"],
)
def test_a_file_that_is_not_python_is_named(tmp_path: Path, content: bytes, reason: str) -> None:
    file = tmp_path / "odd.py"
    file.write_bytes(content)
    for look in (functions.check, functions.named_source_hash):
        with raises("reference.broken-file", reference=f"{file}:f", path=str(file)) as error:
            look(f"{file}:f")
        assert re.search(reason, str(error.value.facts["reason"]))


@pytest.mark.parametrize(("head", "encoding"), [("# coding: latin-1\n", "latin-1"), ("", "utf-8-sig")])
def test_a_file_is_read_in_its_own_encoding(tmp_path: Path, head: str, encoding: str) -> None:
    own = "def f(x, y='é'):\n    return x\n"
    for name, text, written in (("plain", own, "utf-8"), ("other", head + own, encoding)):
        (tmp_path / f"{name}.py").write_text(text, encoding=written)
    plain, other = (f"{tmp_path / name}.py:f" for name in ("plain", "other"))
    functions.check(other)
    assert functions.named_source_hash(other) == functions.named_source_hash(plain)


def test_check_accepts_names_of_unknown_kind(tmp_path: Path) -> None:
    """An annotation only, a loop, and an invalid literal: `resolve` finds out what these are."""
    file = tmp_path / "odd.py"
    file.write_text("score: object\ndef score(x): ...\nfor other in (1, 2): ...\nbroken = {[]: 1}\n")
    for name in ("score", "other", "broken"):
        functions.check(f"{file}:{name}")


@pytest.mark.parametrize("ref", ["f.py", "f", ":f", "a b:f", "a.py:f g", "a.py:", ""])
def test_a_malformed_reference_is_refused(ref: str) -> None:
    with raises("reference.format", reference=ref):
        functions.check(ref)


@pytest.mark.parametrize(
    ("ref", "fact"),
    [("no_such.py:f", "path"), ("no_such_module:f", "module"), ("no_such.module:f", "module")],
)
def test_a_missing_file_or_module_is_named(ref: str, fact: str) -> None:
    with raises("reference.missing-source", reference=ref) as error:
        functions.check(ref)
    assert str(error.value.facts[fact]).endswith(ref.partition(":")[0])


@pytest.mark.parametrize(
    ("content", "line", "reason"),
    [("x = 1\n\nx.y\n", 3, "raises AttributeError"), ("x = 1\nexit()\n", 2, "exits"), ("def f(:\n", 1, "not compile")],
)
def test_a_failed_import_names_path_and_line(tmp_path: Path, content: str, line: int, reason: str) -> None:
    file = tmp_path / "failing.py"
    file.write_text(content)
    with raises("reference.broken-file", path=str(file), line=line) as error:
        functions.resolve(f"{file}:f")
    assert reason in str(error.value.facts["reason"])


def test_source_hash_distinguishes_functions(tmp_path: Path) -> None:
    def bounded(limit: float) -> Callable[[float], float]:
        def inner(x: float) -> float:
            return min(x, limit)

        return inner

    def recursive() -> Callable[[int], int]:
        def count(n: int) -> int:
            return count(n - 1) if n else 0

        return count

    one, two = (lambda x: x + 1), (lambda x: x + 2)
    hashes = [
        functions.source_hash(fn)
        for fn in (
            *(
                one,
                two,
                lambda x, y=3: x,
                lambda x, y=4: x,
                bounded,
                bounded(1.0),
                bounded(2.0),
                recursive(),
                len,
                Called,
            ),
            *(Called(), functools.partial(one, 1), functools.partial(one, 2), functools.partial(one, x=1)),
        )
    ]
    assert len({*hashes}) == len(hashes) - 1  # an instance is as its class is
    assert functions.source_hash(bounded(1.0)) == functions.source_hash(bounded(1.0))
    assert all(re.fullmatch("[0-9a-f]{32}", h) for h in hashes)
    file = tmp_path / "versions.py"
    file.write_text("def f():\n    return 1\n")
    first = functions.source_hash(functions.resolve(f"{file}:f"))
    file.write_text("\n\n# moved\ndef f():\n    return 1\n")
    assert functions.source_hash(functions.resolve(f"{file}:f")) == first
    file.write_text("def f():\n    return 2\n")
    assert functions.source_hash(functions.resolve(f"{file}:f")) != first
