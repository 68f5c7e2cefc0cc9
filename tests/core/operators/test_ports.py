"""Ports come from annotations, and errors name file and line where the class is defined."""

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
from flowrl.graphs import ppo
from flowrl.operators import GAE, UpdateActor
from flowrl.records import Tokens, Updated
from tests.support.errors import raises
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
def _returns_own_axes(self: Any, values: c.Values) -> c.Rows[c.Values, "demo"]: ...
def _value_with_own_axes(self: Any, updated: c.Rows[Updated, "demo"]) -> c.Values: ...
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


CALL = "Faulty.__call__"
RETURN = "Faulty.__call__, return value"


def at(parameter: str) -> str:
    return f"Faulty.__call__({parameter})"


@pytest.mark.parametrize(
    ("call", "code", "where", "facts"),
    [
        (_no_annotation, "operator.missing-annotation", CALL, {"parameter": "values"}),
        (_no_return, "operator.missing-annotation", CALL, {"parameter": "return"}),
        (_unknown, "column.undefined-name", CALL, {}),
        (_undefined, "column.undefined-name", CALL, {"reason": "name 'Valuse' is not defined"}),
        (_bare_tensor, "column.untyped", at("values"), {"annotation": "Tensor"}),
        (_bare_array, "column.untyped", at("values"), {"annotation": "ndarray"}),
        (_no_column, "column.untyped", at("values"), {"annotation": "Float32[Tensor, 'batch response']"}),
        (_number, "column.untyped", at("size"), {"annotation": "int"}),
        (_union, "column.untyped", at("values"), {}),
        (_optional_without_default, "operator.port-default", CALL, {"port": "old"}),
        (_star, "operator.unnamed-port", CALL, {"parameter": "*values", "kind": "variadic positional"}),
        (_positional, "operator.unnamed-port", CALL, {"parameter": "values", "kind": "positional-only"}),
        (_returns_protocol, "operator.return-type", RETURN, {"found": "Tokens"}),
        (_returns_tensor, "column.untyped", RETURN, {"annotation": "Tensor"}),
        (_returns_own_axes, "column.port-axes", RETURN, {"axes": "demo"}),
        (_value_with_own_axes, "column.port-axes", at("updated"), {"axes": "demo"}),
        (_wide, "column.definition", at("values"), {"column": "wide"}),
        (_numbers, "column.definition", at("values"), {"column": "numbers"}),
        (_anything, "column.definition", at("values"), {"column": "anything"}),
        (_fixed, "column.definition", at("values"), {"column": "fixed", "axes": "batch 3"}),
        (_batchless, "column.definition", at("values"), {"column": "batchless", "axes": "response"}),
        (_no_array, "column.definition", at("values"), {"column": "no_array", "found": "<class 'float'>"}),
        (_twisted, "column.definition", at("values"), {"column": "values"}),
        (_default, "operator.port-default", CALL, {"port": "values", "found": "int"}),
        (_two_metrics, "operator.injected-parameter", CALL, {"parameter": "b"}),
        (_no_port, "operator.no-port", CALL, {}),
        (_no_self, "operator.no-port", CALL, {}),
        (_none, "operator.port-default", CALL, {"port": "values"}),
        (_optional_default, "operator.port-default", CALL, {"port": "old", "found": "int"}),
        (_injected_default, "operator.port-default", CALL, {"port": "key", "found": "int"}),
        (_impure, "column.untyped", at("record"), {"annotation": "float"}),
    ],
)
def test_faulty_ports_are_named_with_file_and_line(
    call: Callable[..., Any], code: str, where: str, facts: dict[str, Any]
) -> None:
    line = call.__code__.co_firstlineno
    with raises(code, where=f"{__file__}:{line}: {where}", **facts):
        operator(call)


def _fine(self: Any, values: c.Values) -> c.Values:
    return values


@pytest.mark.parametrize(
    ("body", "code", "facts"),
    [
        ({}, "operator.no-call", {}),
        ({"call": _fine, "gamma": 0.9}, "parameter.definition", {"parameter": "gamma"}),
        (
            {"call": _fine, "seen": [], "annotations": {"seen": "list[int]"}},
            "parameter.definition",
            {"member": "seen"},
        ),
        ({"call": _fine, "actor": Role("actor")}, "parameter.definition", {"parameter": "actor"}),
        (
            {"call": _fine, "granularity": "rows"},
            "operator.invalid-attribute",
            {"attribute": "granularity", "found": "'rows'"},
        ),
        ({"call": _fine, "new_axes": "batch"}, "operator.invalid-attribute", {"attribute": "new_axes"}),
        ({"call": _fine, "new_axes": ("prompt",)}, "operator.invalid-attribute", {"attribute": "new_axes"}),
        (
            {"call": _fine, "replicated": frozenset({"value"})},
            "operator.invalid-attribute",
            {"attribute": "replicated", "found": "frozenset({'value'})"},
        ),
        ({"call": _fine, "replicated": "values"}, "operator.invalid-attribute", {"attribute": "replicated"}),
        (
            {"call": _fine, "values": 1.0, "annotations": {"values": "float"}},
            "operator.name-taken",
            {"name": "values"},
        ),
        ({"call": _fine, "references": frozenset({"fn"})}, "parameter.definition", {"member": "references"}),
        ({"call": _fine, "references": "fn"}, "parameter.definition", {"member": "references"}),
        ({"call": _fine, "run": State(lambda self: 0)}, "operator.name-taken", {"name": "run"}),
        ({"call": _fine, "values": State(lambda self: 0)}, "operator.name-taken", {"name": "values"}),
        ({"call": _fine, "name": "mine", "annotations": {"name": "str"}}, "operator.name-taken", {"name": "name"}),
        (
            {"call": _fine, "replicated": 1, "annotations": {"replicated": "int"}},
            "operator.name-taken",
            {"name": "replicated"},
        ),
        ({"call": staticmethod(_fine)}, "operator.not-a-function", {"found": "a staticmethod"}),
        ({"call": 3}, "operator.not-a-function", {"found": "an int"}),
        ({"call": _async}, "operator.not-a-function", {"found": "async"}),
        ({"call": _generator}, "operator.not-a-function", {"found": "a generator"}),
        (
            {"call": _fine, "n": State(lambda self: 0), "annotations": {"n": "State[int]"}},
            "operator.state",
            {"state": "n"},
        ),
    ],
)
def test_faulty_classes_are_named_with_file_and_line(body: dict[str, Any], code: str, facts: dict[str, Any]) -> None:
    line = operator.__code__.co_firstlineno + 3
    call = ".__call__" if code == "operator.not-a-function" else ""
    with raises(code, where=f"{__file__}:{line}: Faulty{call}", **facts):
        operator(body.pop("call", None), **body)


@pytest.mark.parametrize(
    "arguments", [("a.b", "kind"), (3, "kind"), ("mine", None), ("mine", ""), ("mine", "kind", "x")]
)
def test_an_invalid_column_definition_is_refused(arguments: tuple[Any, ...]) -> None:
    with raises("column.definition"):
        Column(*arguments)


def test_an_annotation_with_two_columns_is_refused() -> None:
    def call(self: Any, values: Annotated[c.Values, Column("other", "value")]) -> c.Values: ...

    with raises("column.definition"):
        operator(call)


@pytest.mark.parametrize(
    ("member", "value"),
    [
        ("rows_factor", 0),
        ("rows_factor", True),
        ("row_divisors", {"n": 0}),
        ("row_divisors", [4]),
        ("optional_ports", {"value": True}),
        ("optional_ports", {"values": True}),
        ("optional_ports", None),
    ],
)
def test_the_declarations_of_an_operator_are_checked(member: str, value: Any) -> None:
    odd = operator(
        _fine, **{member: (lambda self: value) if member == "optional_ports" else property(lambda self: value)}
    )
    attribute = "optional_ports()" if member == "optional_ports" else member
    with raises("operator.invalid-attribute", where="x", attribute=attribute, found=repr(value)):
        ppo(exact).edit(insert={"x": After("value", odd())})


def test_a_subclass_cannot_reuse_the_name_of_a_port() -> None:
    body = {"__annotations__": {"values": "float"}, "values": 1.0, "__module__": __name__}
    with raises("operator.name-taken", name="values"):
        type("Child", (operator(_fine),), body)


def test_an_operator_in_a_function_may_use_columns_of_the_function() -> None:
    Entropy = Annotated[Float32[Tensor, "batch response"], Column("local_entropy", "entropy")]

    class Negated(Operator):
        def __call__(self, local_entropy: Entropy) -> Entropy:
            return -local_entropy

    assert torch.equal(Negated()(torch.ones(2, 3)), -torch.ones(2, 3))
