"""Errors of flowrl: base classes, pickling, and suggestions for unknown names."""

from __future__ import annotations

import inspect
import pickle

import pytest

from flowrl import errors
from flowrl.errors import ColumnNotFoundError, FlowrlError, offer

CLASSES = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, FlowrlError)]


@pytest.mark.parametrize("cls", CLASSES)
def test_message_code_and_facts_survive_pickling(cls: type[FlowrlError]) -> None:
    error = cls("gae.values is missing.", code="graph.unwired-port", node="gae", port="values", row=3)
    there = pickle.loads(pickle.dumps(error))
    assert type(there) is cls
    assert (there.message, there.code) == ("gae.values is missing.", "graph.unwired-port")
    assert there.facts == {"node": "gae", "port": "values", "row": 3}


def test_the_text_of_an_error_ends_with_its_code() -> None:
    assert str(FlowrlError("gae.values is missing.", code="graph.unwired-port")) == (
        "gae.values is missing. [graph.unwired-port]"
    )
    assert str(FlowrlError("gae.values is missing.")) == "gae.values is missing."


def test_facts_are_plain_values() -> None:
    error = FlowrlError("", given=int, found={"b", "a"}, rows=[1, (2.5, None)])
    assert error.facts == {"given": "<class 'int'>", "found": ("a", "b"), "rows": (1, (2.5, None))}


@pytest.mark.parametrize("cls", [cls for cls in CLASSES if cls is not FlowrlError])
def test_every_error_derives_from_a_builtin_exception(cls: type[FlowrlError]) -> None:
    assert any(
        base.__module__ in ("builtins", "dataclasses") and base not in (object, Exception, BaseException)
        for base in cls.__mro__
    )


def test_a_missing_column_is_a_key_error_and_an_attribute_error() -> None:
    for builtin in (KeyError, AttributeError):
        with pytest.raises(builtin):
            raise ColumnNotFoundError("no column 'value'.")
    assert str(ColumnNotFoundError("no column 'value'.")) == "no column 'value'."  # and not the repr of a KeyError


@pytest.mark.parametrize(
    ("name", "known", "message"),
    [
        ("gea", ["reward", "gae"], "it has reward, gae; did you mean 'gae'?"),
        ("sampler", ["reward", "gae"], "it has reward, gae."),
        ("gae", [], "it has none."),
        (3, ["gae"], "it has gae."),
    ],
)
def test_offers_list_known_names_and_the_nearest(name: object, known: list[str], message: str) -> None:
    assert offer(name, known) == message
