"""Tests of `spec.py` and `flowrl/parameter_errors.py`: parameters are typed, checked against ranges, and frozen.

An error names each wrong parameter.
"""

from __future__ import annotations

import copy
import inspect
import math
import pickle
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

import pytest
from pydantic import AfterValidator, Field

from flowrl.backends import TorchScorer, TorchTrainer
from flowrl.core.operators.roles import Role
from flowrl.errors import DataError, DefinitionError, ParameterError
from flowrl.operators import PPOClip, Reward, UpdateActor
from flowrl.spec import Spec, non_default, parameters
from tests.support.errors import raises
from tests.support.kernel import exact


class Inner(Spec):
    x: int = Field(1, ge=0)


class Outer(Spec):
    size: int
    rate: float = Field(0.5, ge=0, le=1)
    inner: Inner = Inner()
    names: tuple[str, ...] = ()
    limit: int | None = None
    KIND: ClassVar[str] = "outer"

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < self.size:
            raise ValueError(f"limit={self.limit} is below size={self.size}; raise the limit.")


KNOWN = " It takes size, rate, inner, names, limit"


def test_a_spec_is_frozen_and_equal_by_value() -> None:
    spec = Outer(3, rate=0.25)
    assert (spec.size, spec.rate, spec.inner, spec.KIND) == (3, 0.25, Inner(1), "outer")
    assert spec == Outer(size=3, rate=0.25) != Outer(3)
    assert hash(spec) == hash(Outer(3, 0.25))
    assert pickle.loads(pickle.dumps(spec)) == spec == copy.deepcopy(spec)
    with raises("parameter.frozen", spec="Outer", parameter="size"):
        spec.size = 4  # type: ignore[misc]


def test_a_spec_with_its_own_constructor_is_refused() -> None:
    with raises("parameter.definition", member="__init__"):

        class Made(Spec):
            def __init__(self) -> None:
                self.size = 3


def test_help_shows_how_a_spec_is_called() -> None:
    """Also where a subclass requires a field after optional ones of its base: that one is given by its name."""

    class Base(Spec):
        first: int
        second: float = 0.5
        aside: tuple[str, ...] = Field(default_factory=tuple, kw_only=True)

    class Derived(Base):
        third: str = Field(min_length=1)
        fourth: int = 4

    assert str(inspect.signature(Base.__init__)) == (
        "(self, /, first: int, second: float = 0.5, *, aside: tuple[str, ...] = Ellipsis)"
    )
    assert str(inspect.signature(Derived.__init__)) == (
        "(self, /, first: int, second: float = 0.5, *, aside: tuple[str, ...] = Ellipsis, third: str, fourth: int = 4)"
    )
    assert Derived(1, third="x") == Derived(first=1, second=0.5, third="x", fourth=4)


def test_a_long_value_is_named_by_its_type() -> None:
    with raises("parameter.invalid", spec="Outer", parameter="size", given="<list>"):
        Outer(list(range(100)))  # type: ignore[arg-type]


def test_parameters_are_listed_all_or_without_the_defaults() -> None:
    assert parameters(Outer(3)) == {"size": 3, "rate": 0.5, "inner": Inner(), "names": (), "limit": None}
    assert non_default(Outer(3)) == {"size": 3}
    assert non_default(Outer(3, 0.5, Inner(2), limit=5)) == {"size": 3, "inner": Inner(2), "limit": 5}


class Saveable:
    """A model object, as of transformers."""

    def save_pretrained(self, folder: str) -> None:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("construct", "parameter", "hint"),
    [
        (lambda: Reward([exact, exact]), "fn", "combine their scores with WeighRewards."),
        (lambda: Reward({"accuracy": exact}), "fn", "combine their scores with WeighRewards."),
        (lambda: TorchScorer(Saveable()), "model", 'call .save_pretrained("folder") and pass model="folder".'),
        (
            lambda: TorchTrainer("m", schedule="cosine"),
            "schedule",
            "Pass schedule=Cosine(start=..., end=...).",
        ),
        (lambda: TorchTrainer("m", optimizer="adamw"), "optimizer", "Pass optimizer=AdamW(lr=...)."),
        (lambda: UpdateActor("gspo"), "loss", "Pass loss=GSPO()."),
        (lambda: PPOClip(epsilon=0.2), "epsilon", "TRL's epsilon is clip_low here."),
    ],
)
def test_errors_about_values_of_other_libraries_say_what_to_write(
    construct: Callable[[], Any], parameter: str, hint: str
) -> None:
    with pytest.raises(ParameterError) as error:
        construct()
    assert error.value.facts["parameter"] == parameter and hint in error.value.message
    assert error.value.message.count(hint) == 1


@pytest.mark.parametrize(
    ("arguments", "keywords", "message"),
    [
        ((), {}, f"size is missing.{KNOWN}."),
        ((3, 1.5), {}, "rate=1.5: expected a number less than or equal to 1."),
        ((), {"size": "k"}, "size='k': expected an integer."),
        ((3,), {"rat": 1}, f"there is no parameter 'rat' (given 1).{KNOWN}; did you mean 'rate'?"),
        ((3, 0.5, Inner(), (), 9, 7), {}, f"7 is one argument too many.{KNOWN}."),
        ((3, 0.5, Inner(), ("a", 1)), {}, "names.1=1: expected a string."),
        ((3,), {"inner": {"x": -1}}, "inner.x=-1: expected a number greater than or equal to 0."),
        ((3,), {"inner": {"y": 1}}, "inner.y=1: unexpected keyword argument."),
        ((3,), {"inner": Inner}, "inner=<class 'tests.test_spec.Inner'>: expected Inner(...)."),
        ((3,), {"names": "abc"}, "names='abc': expected a tuple: ('abc',)."),
        ((3,), {"x": 2}, f"there is no parameter 'x' (given 2), but inner=Inner(x=...) has one.{KNOWN}."),
        ((3,), {"limit": 2}, "limit=2 is below size=3; raise the limit."),
        ((3,), {"limit": "x"}, "limit='x': expected an integer."),
    ],
)
def test_wrong_parameters_are_named(arguments: tuple[Any, ...], keywords: dict[str, Any], message: str) -> None:
    """All parameters are listed only if a name was wrong."""
    with pytest.raises(ParameterError) as error:
        Outer(*arguments, **keywords)
    assert error.value.message == f"Outer(...): {message}"
    assert isinstance(error.value, ValueError)


@pytest.mark.parametrize(
    ("arguments", "keywords", "code", "facts"),
    [
        ((), {}, "missing", {"parameter": "size"}),
        ((3, 1.5), {}, "invalid", {"parameter": "rate", "given": "1.5"}),
        ((3,), {"rat": 1}, "unknown", {"parameter": "rat", "given": "1"}),
        ((3, 0.5, Inner(), (), 9, 7), {}, "unknown", {"given": "7"}),
        ((3,), {"inner": {"y": 1}}, "invalid", {"parameter": "inner", "given": "1"}),
        ((3,), {"limit": 2}, "invalid", {}),
    ],
)
def test_an_error_has_a_code_and_the_parameter(
    arguments: tuple[Any, ...], keywords: dict[str, Any], code: str, facts: dict[str, Any]
) -> None:
    known = {} if code == "invalid" else {"known": ("size", "rate", "inner", "names", "limit")}
    with raises(f"parameter.{code}", spec="Outer", **facts, **known):
        Outer(*arguments, **keywords)


def refuse(value: int) -> int:
    raise DataError("The file is empty.", code="data.empty", path="a.jsonl")


def test_an_error_that_a_validator_raised_keeps_its_code_and_facts() -> None:
    class Checked(Spec):
        path: Annotated[int, AfterValidator(refuse)]

    with raises("data.empty", path="a.jsonl") as error:
        Checked(1)
    assert error.value.message == "Checked(...): path=1: The file is empty."


class Choices(Spec):
    size: int


class Choice(Spec):
    on_error: Literal["raise"] | Annotated[float, Field(gt=0)] = "raise"
    inner: tuple[Inner, ...] = ()
    either: Inner | Choices | tuple[str, ...] = ()
    pair: tuple[int, int] = (1, 2)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        (
            {"on_error": "stop"},
            "on_error='stop': expected 'raise', or a number",
        ),
        ({"on_error": -1}, "on_error=-1: expected 'raise', or a number greater than 0."),
        ({"inner": [{"x": -1}]}, "inner.0.x=-1: expected a number greater than or equal to 0."),
        ({"either": "x"}, "either='x': expected Inner(...), or Choices(...), or a tuple: ('x',)."),
        ({"pair": (1,)}, "pair=(1,): it lacks item 1."),
        (
            {"either": {"kind": "a"}},
            "either.kind='a': unexpected keyword argument; either={'kind': 'a'}: it lacks size",
        ),
    ],
)
def test_members_of_a_union_share_one_sentence(keywords: dict[str, Any], message: str) -> None:
    """pydantic's names for them, such as ``constrained-float``, do not appear."""
    with pytest.raises(ParameterError) as error:
        Choice(**keywords)
    assert str(error.value).startswith(f"Choice(...): {message}")
    assert "float" not in str(error.value) and str(error.value).count("on_error") <= 1


def test_all_wrong_parameters_are_named_at_once() -> None:
    with pytest.raises(ParameterError, match=r"size is missing; rate=2\.0: expected a number"):
        Outer(rate=2.0)  # type: ignore[call-arg]


def define(body: dict[str, Any], annotations: dict[str, Any] | None = None) -> type:
    return type("Defined", (Spec,), {"__annotations__": annotations or {}, "__module__": __name__, **body})


@pytest.mark.parametrize(
    ("body", "annotations", "code", "facts"),
    [
        ({"gamma": 0.9}, {}, "parameter.definition", {"parameter": "gamma"}),
        ({"gamma": Field(0.9)}, {}, "parameter.definition", {"parameter": "gamma"}),
        ({"inner": Inner()}, {}, "parameter.definition", {"parameter": "inner"}),
        ({"actor": Role("actor")}, {}, "parameter.definition", {"parameter": "actor"}),
        ({"seen": []}, {"seen": "list[int]"}, "parameter.definition", {"member": "seen"}),
        ({"seen": Field({})}, {"seen": "dict[str, int]"}, "parameter.definition", {"member": "seen"}),
        ({"references": "fn"}, {}, "parameter.definition", {"member": "references", "known": ()}),
        ({}, {"x": "Missing"}, "column.undefined-name", {"reason": "Missing"}),
    ],
)
def test_an_ill_formed_class_is_refused_with_file_and_line(
    body: dict[str, Any], annotations: dict[str, Any], code: str, facts: dict[str, Any]
) -> None:
    line = define.__code__.co_firstlineno + 1
    with raises(code, where=f"{__file__}:{line}: Defined", **facts) as error:
        define(body, annotations)
    assert isinstance(error.value, DefinitionError)


def test_constants_methods_and_factories_are_allowed() -> None:
    class Base(Spec):
        mode: ClassVar[str] = "row"
        seen: list[int] = Field(default_factory=list)

        @property
        def double(self) -> int:
            return 2 * len(self.seen)

        class Nested:
            pass

    class Derived(Base):
        mode = "batch"
        _cache = None

    assert (Derived.mode, Base.mode) == ("batch", "row")
    first, second = Derived(), Derived([1])
    assert (first.seen, second.double, first.seen is Derived().seen) == ([], 2, False)


def test_a_class_in_a_function_may_name_types_of_the_function() -> None:
    class Local(Spec):
        x: int = 1

    class Holder(Spec):
        local: Local = Local()
        other: Local | None = None

    assert Holder(Local(2)).local.x == 2
    with raises("parameter.invalid", spec="Holder", parameter="local", given="3"):
        Holder(3)  # type: ignore[arg-type]


class Numbers(Spec):
    """Numbers in every wrapping."""

    count: int = 1
    ratio: float | None = None
    pair: tuple[Annotated[float, Field(ge=0)], ...] = ()
    flag: bool = False
    either: int | bool = 0
    level: Literal["a", 1] = "a"
    anything: Any = None
    unbounded: float = Field(default=0.0, allow_inf_nan=True)
    weights: Mapping[str | tuple[str, int], float | tuple[float, ...]] = Field(default_factory=dict)
    options: Mapping[str, Any] = Field(default_factory=dict)
    switches: Mapping[str, bool | int] = Field(default_factory=dict)


class KeywordOnlyFirst(Spec):
    reads: str = Field("", kw_only=True)
    count: int = Field(1, ge=1)
    ratio: float = Field(0.5, ge=0)


@pytest.mark.parametrize(("arguments", "parameter"), [((0,), "count"), ((1, -1.0), "ratio"), ((True,), "count")])
def test_an_argument_by_position_is_named_without_counting_keyword_only_parameters(
    arguments: tuple[Any, ...], parameter: str
) -> None:
    with raises("parameter.invalid", parameter=parameter):
        KeywordOnlyFirst(*arguments)


@pytest.mark.parametrize("value", [True, False, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("field", ["count", "ratio", "pair"])
def test_neither_bools_nor_infinities_are_numbers(field: str, value: Any) -> None:
    with raises("parameter.invalid", spec="Numbers", parameter=field):
        Numbers(**{field: (1.0, value) if field == "pair" else value})
    if field == "count":
        with raises("parameter.invalid", spec="Numbers", parameter=field):
            Numbers(value)


@pytest.mark.parametrize(
    ("weights", "path"),
    [
        ({"a": 1.0, "b": True}, "weights.b=True"),
        ({"a": (0.5, False)}, "weights.a.1=False"),
        ({("a", 1): True}, "weights=True"),
    ],
)
def test_bools_are_no_numbers_in_mappings(weights: Any, path: str) -> None:
    with raises("parameter.invalid", spec="Numbers", parameter="weights") as error:
        Numbers(weights=weights)
    assert error.value.message == f"Numbers(...): {path}: expected a number, not a bool."


def test_bools_and_infinities_are_accepted_where_declared() -> None:
    made = Numbers(flag=True, either=True, anything=True, unbounded=math.inf)
    assert Numbers(options={"on": True}, switches={"on": False}).options == {"on": True}
    assert (made.flag, made.either, made.anything, made.unbounded) == (True, True, True, math.inf)
