"""Ports: taken from annotations, and faults told with file and line where the class is defined."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import numpy as np
import pytest
import torch
from jaxtyping import Float, Float32, Shaped
from torch import Tensor

from flowrl import columns as c
from flowrl.columns import Column
from flowrl.core.graphs.after import After
from flowrl.core.operators.operator import Operator, State
from flowrl.core.operators.ports import INJECTED, PortField, snake_case
from flowrl.core.operators.roles import Role
from flowrl.data.keys import Key
from flowrl.data.metrics import Metrics
from flowrl.data.now import Now
from flowrl.errors import DefinitionError, GraphError
from flowrl.graphs import ppo
from flowrl.operators import GAE, UpdateActor
from flowrl.records import Tokens
from tests.support.kernel import Impure, exact

# ---------------------------------------------------------------------------------------------------------- definition


@pytest.mark.parametrize(
    ("name", "snake"),
    [
        ("GAE", "gae"),
        ("KLShape", "kl_shape"),
        ("OldLogProb", "old_log_prob"),
        ("UpdateActor", "update_actor"),
        ("RefLogProb", "ref_log_prob"),
        ("Value", "value"),
        ("Top1Filter", "top1_filter"),
    ],
)
def test_names_are_snake_case(name: str, snake: str) -> None:
    assert snake_case(name) == snake


def test_ports_come_from_annotations() -> None:
    gae = GAE().signature
    assert list(gae.ports) == ["token_level_rewards", "values", "response_mask"]
    assert [str(t) for t in gae.fields.values()] == [
        "reward[batch response] float32",
        "value[batch response] float32",
        "mask[batch response] bool",
    ]
    assert list(gae.outputs) == ["advantages", "returns"]
    update = UpdateActor().signature
    assert list(update.ports["rollout"].fields) == [
        PortField("rollout", column)
        for column in (
            "input_ids", "attention_mask", "position_ids", "response_mask", "temperature", "policy_version"
        )
    ]  # fmt: skip
    assert update.ports["ref_log_prob"].optional
    assert not update.ports["advantages"].optional
    assert update.injected == {"key": Key, "metrics": Metrics, "now": Now}
    assert [str(t) for t in update.outputs.values()] == ["Updated"]


def operator(call: Callable[..., Any] | None = None, **body: Any) -> type:
    annotations = body.pop("annotations", {})
    members = {"__annotations__": annotations, "__module__": __name__, **body}
    return type("Faulty", (Operator,), members if call is None else members | {"__call__": call})


def _no_annotation(self, values) -> c.Values: ...  # type: ignore[no-untyped-def]
def _no_return(self, values: c.Values): ...  # type: ignore[no-untyped-def]
def _unknown(self: Any, values: c.Valuse) -> c.Values: ...  # type: ignore[name-defined]
def _undefined(self: Any, values: Valuse) -> c.Values: ...  # type: ignore[name-defined]
def _bare_tensor(self: Any, values: Tensor) -> c.Values: ...
def _bare_array(self: Any, values: np.ndarray) -> c.Values: ...
def _no_column(self: Any, values: Float32[Tensor, "batch response"]) -> c.Values: ...
def _number(self: Any, values: c.Values, size: int) -> c.Values: ...
def _union(self: Any, values: c.Values | c.Returns) -> c.Values: ...
def _optional_without_default(self: Any, values: c.Values, old: c.OldLogProbs | None) -> c.Values: ...
def _star(self: Any, *values: c.Values) -> c.Values: ...
def _positional(self: Any, values: c.Values, /) -> c.Values: ...
def _returns_protocol(self: Any, values: c.Values) -> Tokens: ...
def _returns_tensor(self: Any, values: c.Values) -> Tensor: ...


Wide = Annotated[Float[Tensor, "batch response"], Column("wide", "value")]
Numbers = Annotated[Float32[np.ndarray, "batch"], Column("numbers", "number")]
Anything = Annotated[Shaped[Tensor, "batch"], Column("anything", "number")]
Fixed = Annotated[Float32[Tensor, "batch 3"], Column("fixed", "number")]
Batchless = Annotated[Float32[Tensor, "response"], Column("batchless", "number")]
NoArray = Annotated[float, Column("no_array", "number")]
Twisted = Annotated[Float32[Tensor, "batch"], Column("values", "value")]


def _wide(self: Any, values: Wide) -> c.Values: ...
def _numbers(self: Any, values: Numbers) -> c.Values: ...
def _anything(self: Any, values: Anything) -> c.Values: ...
def _fixed(self: Any, values: Fixed) -> c.Values: ...
def _batchless(self: Any, values: Batchless) -> c.Values: ...
def _no_array(self: Any, values: NoArray) -> c.Values: ...
def _twisted(self: Any, values: Twisted) -> c.Values: ...


def _default(self: Any, values: c.Values = 3) -> c.Values: ...  # type: ignore[assignment]
def _two_metrics(self: Any, values: c.Values, a: Metrics = INJECTED, b: Metrics = INJECTED) -> c.Values: ...
def _no_port(self: Any, metrics: Metrics = INJECTED) -> c.Values: ...
def _no_self(values: c.Values) -> c.Values: ...
def _none(self: Any, values: c.Values = None) -> c.Values: ...  # type: ignore[assignment]
def _optional_default(self: Any, values: c.Values, old: c.OldLogProbs | None = 0) -> c.Values: ...  # type: ignore
def _injected_default(self: Any, values: c.Values, key: Key = 3) -> c.Values: ...  # type: ignore[assignment]
async def _async(self: Any, values: c.Values) -> c.Values: ...
def _generator(self: Any, values: c.Values) -> c.Values:  # type: ignore[misc]
    yield values


def _impure(self: Any, record: Impure) -> c.Values: ...


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            _no_annotation,
            r"Faulty\.__call__ has the parameter 'values' without an annotation; annotate it with a column",
        ),
        (_no_return, r"Faulty\.__call__ has no return annotation; say which column, record or value it returns"),
        (_unknown, r"Faulty\.__call__: An annotation uses a name that is not defined: .*Valuse"),
        (_undefined, r"Faulty\.__call__: An annotation uses a name that is not defined: .*Valuse"),
        (_bare_tensor, r"Faulty\.__call__\(values\): The annotation Tensor is neither a column.*Use a column of"),
        (_bare_array, r"Faulty\.__call__\(values\): The annotation ndarray is neither a column"),
        (_no_column, r"Faulty\.__call__\(values\): The annotation Float32\[Tensor, 'batch response'\] is neither a"),
        (_number, r"Faulty\.__call__\(size\): The annotation int is neither a column"),
        (_union, r"Faulty\.__call__\(values\): The annotation .* is neither a column"),
        (_optional_without_default, r"Faulty\.__call__\(old\) is optional; give it the default None"),
        (_star, r"Faulty\.__call__ takes \*values as variadic positional; ports are fixed"),
        (_positional, r"Faulty\.__call__ takes values as positional-only; ports are fixed"),
        (_returns_protocol, r"return value: the Protocol Tokens can only be read; expected a NamedTuple"),
        (_returns_tensor, r"Faulty\.__call__, return value: The annotation Tensor is neither a column"),
        (_wide, r"\(values\): Column 'wide' annotates .*Expected a Tensor of exactly one dtype"),
        (_numbers, r"\(values\): Column 'numbers' annotates .*Expected a Tensor of exactly one dtype, such as"),
        (_anything, r"\(values\): Column 'anything' annotates .*Expected a Tensor of exactly one dtype"),
        (_fixed, r"\(values\): Column 'fixed' has the axes 'batch 3'. Expected distinct names"),
        (
            _batchless,
            r"\(values\): Column 'batchless' has the axes 'response'. Expected distinct names, the first one batch",
        ),
        (_no_array, r"\(values\): Column 'no_array' annotates <class 'float'>. Expected a jaxtyping array"),
        (_twisted, r"\(values\): Column 'values' is already defined as value\[batch response\].*another name"),
        (
            _default,
            r"Faulty\.__call__\(values\) has a default, of type int, but a port reads what is wired to it; leave",
        ),
        (_two_metrics, r"Faulty\.__call__\(b\) is a second Metrics; expected one, which is the node's\."),
        (_no_port, r"Faulty\.__call__ has no port, so nothing could be wired to it; expected a method with at least"),
        (_no_self, r"Faulty\.__call__ has no port"),
        (_none, r"Faulty\.__call__\(values\) has the default None; annotate it with `X \| None`\."),
        (_optional_default, r"Faulty\.__call__\(old\) has a default, of type int, but .* or make it None\."),
        (_injected_default, r"Faulty\.__call__\(key\) has a default, of type int, but the runner .* `= INJECTED`\."),
        (_impure, r"\(record\): Impure\.temperature: The annotation float is neither a column"),
    ],
)
def test_faulty_ports_are_told_with_file_and_line(call: Callable[..., Any], said: str) -> None:
    with pytest.raises(DefinitionError, match=said) as error:
        operator(call)
    assert f"test_ports.py:{call.__code__.co_firstlineno}: Faulty" in str(error.value)


def _fine(self: Any, values: c.Values) -> c.Values:
    return values


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, r"Faulty has no __call__; define one whose annotations are its ports"),
        ({"call": _fine, "gamma": 0.9}, r"Faulty\.gamma = 0\.9 has no annotation"),
        ({"call": _fine, "seen": [], "annotations": {"seen": "list[int]"}}, r"Faulty\.seen has the mutable default"),
        ({"call": _fine, "actor": Role("actor")}, r"Faulty\.actor = Role\('actor'\) has no annotation"),
        (
            {"call": _fine, "granularity": "rows"},
            r"Faulty\.granularity is 'rows'; expected one of 'row', 'group', 'batch'",
        ),
        ({"call": _fine, "new_axes": "batch"}, r"Faulty\.new_axes is 'batch'; expected axes that it makes anew"),
        (
            {"call": _fine, "replicated": frozenset({"value"})},
            r"Faulty\.replicated is frozenset\(\{'value'\}\); expected a frozenset of columns that it reads, some of",
        ),
        ({"call": _fine, "replicated": "values"}, r"Faulty\.replicated is 'values'; expected a frozenset of columns"),
        (
            {"call": _fine, "values": 1.0, "annotations": {"values": "float"}},
            r"Faulty has the port 'values' and a parameter or state of that name; .* so that 'faulty\.values' means",
        ),
        ({"call": _fine, "references": frozenset({"fn"})}, r"Faulty\.references is frozenset.*; expected a frozenset"),
        ({"call": _fine, "references": "fn"}, r"Faulty\.references is 'fn'; expected a frozenset of its fields"),
        ({"call": _fine, "run": State(lambda self: 0)}, r"Faulty\.run is a parameter or state, and every operator has"),
        ({"call": _fine, "values": State(lambda self: 0)}, r"Faulty has the port 'values' and a parameter or state"),
        (
            {"call": _fine, "name": "mine", "annotations": {"name": "str"}},
            r"Faulty\.name is a parameter or state, and every operator has something of that name; .*`name: ClassVar\[",
        ),
        (
            {"call": _fine, "replicated": 1, "annotations": {"replicated": "int"}},
            r"Faulty\.replicated is a parameter or state, and every operator",
        ),
        (
            {"call": staticmethod(_fine)},
            r"Faulty\.__call__ is a staticmethod; expected an ordinary method that returns",
        ),
        ({"call": 3}, r"Faulty\.__call__ is an int; expected an ordinary method"),
        ({"call": _async}, r"Faulty\.__call__ is async; expected an ordinary method"),
        ({"call": _generator}, r"Faulty\.__call__ is a generator; expected an ordinary method"),
        (
            {"call": _fine, "n": State(lambda self: 0), "annotations": {"n": "State[int]"}},
            r"Faulty\.n is a State with an annotation.*write `n = State\(\.\.\.\)`",
        ),
    ],
)
def test_faulty_classes_are_told_with_file_and_line(body: dict[str, Any], said: str) -> None:
    line = operator.__code__.co_firstlineno + 3
    with pytest.raises(DefinitionError, match=rf"test_ports\.py:{line}: {said}"):
        operator(body.pop("call", None), **body)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("a.b", "kind"), r"Column\('a\.b', \.\.\.\): the name is not an identifier. Pass a name such as 'values'"),
        ((3, "kind"), r"Column\(3, \.\.\.\): the name is not an identifier"),
        (("mine", None), r"Column\('mine', None\): the kind is not text"),
        (("mine", ""), r"Column\('mine', ''\): the kind is not text"),
        (("mine", "kind", "x"), r"Column\('mine', pad='x'\): the padding is not a number"),
    ],
)
def test_a_column_is_named_and_of_a_kind(arguments: tuple[Any, ...], said: str) -> None:
    with pytest.raises(DefinitionError, match=said):
        Column(*arguments)


def test_an_annotation_is_of_one_column() -> None:
    def call(self: Any, values: Annotated[c.Values, Column("other", "value")]) -> c.Values: ...

    with pytest.raises(DefinitionError, match=r"An annotation has two columns, 'values' and 'other'"):
        operator(call)


@pytest.mark.parametrize(
    ("member", "value", "said"),
    [
        ("rows_factor", 0, r"its rows_factor is 0; expected a count: 1, 2, \.\.\.\."),
        ("rows_factor", True, r"its rows_factor is True"),
        ("row_divisors", {"n": 0}, r"its row_divisors is \{'n': 0\}; expected counts by parameter"),
        ("row_divisors", [4], r"its row_divisors is \[4\]"),
        ("wants", {"value": True}, r"its wants\(\) is \{'value': True\}; expected True or False by optional port, of"),
        ("wants", {"values": True}, r"its wants\(\) is .* of which it has none"),
        ("wants", None, r"its wants\(\) is None"),
    ],
)
def test_what_an_operator_says_of_itself_is_readable(member: str, value: Any, said: str) -> None:
    made = (lambda self: value) if member == "wants" else property(lambda self: value)
    odd = operator(_fine, **{member: made})
    with pytest.raises(GraphError, match=said):
        ppo(exact).edit(insert={"x": After("value", odd())})


def test_a_name_that_a_subclass_takes_twice_is_told() -> None:
    with pytest.raises(DefinitionError, match=r"Child has the port 'values' and a parameter"):
        type(
            "Child", (operator(_fine),), {"__annotations__": {"values": "float"}, "values": 1.0, "__module__": __name__}
        )


def test_an_operator_in_a_function_may_use_columns_of_the_function() -> None:
    Entropy = Annotated[Float32[Tensor, "batch response"], Column("local_entropy", "entropy")]

    class Negated(Operator):
        def __call__(self, local_entropy: Entropy) -> Entropy:
            return -local_entropy

    assert torch.equal(Negated()(torch.ones(2, 3)), -torch.ones(2, 3))
