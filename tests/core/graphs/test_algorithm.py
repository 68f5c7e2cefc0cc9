"""Tests of `algorithm.py`, `flowrl/core/operators/symbols.py` and `flowrl/record_types.py`.

`@algorithm` traces a function into a graph, or runs it on tensors.
"""

from __future__ import annotations

import copy
import math
import pickle
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from flowrl import columns as c
from flowrl.core.operators.operator import Operator
from flowrl.core.operators.ports import PortField
from flowrl.core.operators.session import Session
from flowrl.core.operators.symbols import Edge
from flowrl.errors import ColumnNotFoundError, DefinitionError
from flowrl.graph import algorithm
from flowrl.operators import GAE, Generate, OldLogProb, Repeat, Reward, UpdateCritic, Value, Whiten
from flowrl.record_types import record_tuple
from flowrl.records import PromptBatch, RolloutBatch, Sequences
from tests.support.errors import raises
from tests.support.kernel import LengthPenalty, TwoHeads, answers, exact, scored


class Row(NamedTuple):
    """An input without prompts."""

    token_level_rewards: c.TokenLevelRewards
    values: c.Values
    response_mask: c.ResponseMask


class Sum(Operator):
    """Two values into one."""

    def __call__(self, first: c.Values, second: c.Values) -> c.Values:
        return first + second


@algorithm
def advantages(row: Row, *, gamma: float = 1.0) -> Any:
    """No role in it, so it runs without a job."""
    adv = GAE(gamma)(row.token_level_rewards, row.values, row.response_mask)
    return Whiten()(adv.advantages, row.response_mask)


def test_calling_an_algorithm_traces_its_operators_into_a_graph() -> None:
    graph = scored(n=3)
    assert graph.name == "scored"
    assert list(graph.nodes) == ["batch", "repeat", "generate", "reward"]
    assert graph.sinks == ("reward",)
    assert graph["repeat"].operator == Repeat(3)
    assert graph["reward"].sources == ["generate", "repeat"]
    assert graph["reward"].inputs[PortField("rollout", "response_text")] == Edge("generate", "response_text")
    assert graph.inputs == {"batch": PromptBatch}
    assert scored(n=3).fingerprint() == graph.fingerprint() != scored(n=4).fingerprint()


def test_step_runs_the_traced_lines_on_tensors() -> None:
    row = Row(torch.tensor([[0.0, 0.0, 1.0]]), torch.zeros(1, 3), torch.ones(1, 3, dtype=torch.bool))
    by_hand = torch.tensor([0.25, 0.5, 1.0])  # lam=0.95 at gamma=0.5 / 0.95 discounts by exactly a half a token
    got = advantages.step(row, gamma=0.5 / 0.95)
    expected = (by_hand - by_hand.mean()) / by_hand.std()
    torch.testing.assert_close(got[0], expected)
    assert list(advantages(gamma=0.5).nodes) == ["row", "gae", "whiten"]


def test_each_step_call_increments_the_step_of_the_session() -> None:
    row = Row(torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool))
    session = Session({}, seed=0)
    with session.active():
        advantages.step(row)
        advantages.step(row)
    assert session.step == 2
    advantages.step(row)
    assert session.step == 2


def test_a_call_passes_parameters_only_and_checks_their_names() -> None:
    assert repr(scored) == "<algorithm scored(n: 'int' = 2, fn: 'Any' = <function exact at " + repr(exact)[19:] + ")>"
    assert scored.__doc__ == "The smallest evaluation: responses and their scores."
    with raises("algorithm.bad-call", algorithm="scored", reason="got an unexpected keyword argument 'm'"):
        scored(m=3)


def test_each_record_parameter_is_an_input_of_the_graph() -> None:
    @algorithm
    def two(row: Row, other: Row) -> Any:
        first = Sum()(row.values, row.values)
        return first, Sum().named("second")(other.values, other.values)

    assert set(two().inputs) == {"row", "other"}

    @algorithm
    def mixed(row: Row, other: Row) -> Any:
        return Sum()(row.values, other.values)

    with raises("graph.axis-mismatch", axis="batch", edge="other.values"):
        mixed()


def test_an_algorithm_may_return_symbols_records_nested_tuples_and_none() -> None:
    @algorithm
    def nested(row: Row) -> Any:
        heads = TwoHeads()(row.values)
        total = Sum()(row.values, heads.values)
        return [total, (heads, None)], heads.returns

    assert nested().sinks == ("sum", "two_heads")


@pytest.mark.parametrize(
    ("result", "code"),
    [(None, "graph.no-sink"), ({}, "algorithm.wrong-return"), (torch.zeros(2), "algorithm.wrong-return")],
)
def test_other_return_values_are_refused(result: Any, code: str) -> None:
    @algorithm
    def wrong(row: Row) -> Any:
        TwoHeads()(row.values)
        return result

    with raises(code, algorithm="wrong"):
        wrong()


def test_returning_an_output_of_another_graph_is_refused() -> None:
    """Even if this graph has a node and an output of the same names."""
    outputs: list[Any] = []

    @algorithm
    def first(row: Row) -> Any:
        outputs.append(TwoHeads()(row.values).values)
        return outputs

    @algorithm
    def second(row: Row) -> Any:
        TwoHeads()(row.values)
        return outputs

    first()
    with raises("algorithm.foreign-input", algorithm="second", found="two_heads.values"):
        second()


def test_an_algorithm_needs_an_input() -> None:
    with raises("algorithm.no-input", algorithm="nothing") as error:

        @algorithm
        def nothing(n: int) -> Any: ...

    assert re.search(r"_algorithm\.py:\d+: the algorithm nothing", error.value.message)
    with pytest.raises(DefinitionError, match=r"_algorithm\.py:\d+: the algorithm typo: .*'PromtBatch' is not defined"):

        @algorithm
        def typo(batch: PromtBatch) -> Any: ...  # type: ignore[name-defined]


def test_an_algorithm_is_a_plain_function() -> None:
    async def later(batch: PromptBatch) -> Any: ...

    class Made: ...

    for odd, what in ((later, "an async function"), (Made, "a type"), (Repeat(2), "a Repeat"), (3, "an int")):
        with raises("algorithm.not-a-function") as error:
            algorithm(odd)  # type: ignore[arg-type, call-overload]
        assert f"is {what}; expected" in error.value.message


def test_records_defined_in_a_function_are_accepted() -> None:
    class Mine(NamedTuple):
        values: c.Values

    @algorithm
    def local(mine: Mine) -> Any:
        return TwoHeads()(mine.values)

    assert local().inputs == {"mine": Mine}


@pytest.mark.parametrize(
    ("use", "lacks"),
    [
        (bool, r"truth value \(`if`, `and`, `not`\)"),
        (lambda s: not s, "truth value"),
        (list, "elements to iterate over"),
        (lambda s: 3 in s, "elements to iterate over"),
        (len, "length"),
        (lambda s: s[0], "elements to index"),
        (lambda s: s.__setitem__(0, 1), "elements to index"),
        (lambda s: s + 1, "arithmetic or comparison"),
        (lambda s: 1 - s, "arithmetic or comparison"),
        (lambda s: 2**s, "arithmetic or comparison"),
        (lambda s: s % 2, "arithmetic or comparison"),
        (lambda s: ~s, "arithmetic or comparison"),
        (lambda s: -s, "arithmetic or comparison"),
        (lambda s: s & s, "arithmetic or comparison"),
        (lambda s: s == 0, "arithmetic or comparison"),
        (lambda s: s != 0, "arithmetic or comparison"),
        (lambda s: s < 0, "arithmetic or comparison"),
        (lambda s: s in [1], "arithmetic or comparison"),
        (float, "number in it"),
        (range, "number in it"),
        (lambda s: s.mean(-1), "attribute 'mean'"),
        (lambda s: s.shape, "attribute 'shape'"),
        (lambda s: torch.ones(2) + s, "tensor for torch's add"),
        (lambda s: torch.stack([s, s]), r"tensor for torch's stack\(\)"),
        (lambda s: torch.where(s, torch.ones(1), torch.zeros(1)), r"tensor for torch's where\(\)"),
        (lambda s: torch.sum(input=s), r"tensor for torch's sum\(\)"),
        (np.exp, "array in it"),
        (np.asarray, "array in it"),
        (lambda s: np.ones(2) * s, "array in it"),
        (math.sqrt, "number in it"),
        (lambda s: f"{s:.2f}", r"text of the form '\.2f'"),
        (copy.copy, "copy"),
        (copy.deepcopy, "copy"),
        (pickle.dumps, "copy"),
    ],
)
def test_symbols_can_be_passed_to_operators_and_to_nothing_else(use: Callable[[Any], Any], lacks: str) -> None:
    @algorithm
    def misused(batch: PromptBatch) -> Any:
        rollout = Generate()(batch)
        use(rollout.response_mask)
        return rollout

    with raises("symbol.used-as-value", node="generate", column="response_mask") as error:
        misused()
    assert re.match(lacks, str(error.value.facts["missing"]))


def test_symbols_can_be_printed_and_stored() -> None:
    seen: list[Any] = []

    @algorithm
    def printed(batch: PromptBatch) -> Any:
        rollout = Generate()(batch)
        seen.append(rollout.responses)
        return {rollout.responses: rollout}[rollout.responses]

    printed()
    assert repr(seen[0]) == "<generate.responses: tokens[batch response] int64>"

    @algorithm
    def borrowed(batch: PromptBatch) -> Any:
        rollout = Generate()(batch)
        return OldLogProb()(rollout._replace(response_mask=seen[0]))

    with raises(
        "algorithm.foreign-input", node="old_log_prob", port="rollout.response_mask", found="generate.responses"
    ):
        borrowed()


def test_nodes_of_one_name_are_refused() -> None:
    @algorithm
    def twice(row: Row, named: bool) -> Any:
        first = TwoHeads()(row.values)
        second = TwoHeads().named("again") if named else TwoHeads()
        return second(first.values)

    assert list(twice(True).nodes) == ["row", "two_heads", "again"]
    with raises("graph.duplicate-name", node="two_heads") as error:
        twice(False)
    assert 'TwoHeads(...).named("two_heads_2nd")' in error.value.message


def test_a_constant_tensor_as_an_operator_input_is_refused() -> None:
    @algorithm
    def constant(batch: PromptBatch) -> Any:
        return LengthPenalty()(torch.zeros(2, 2), Generate()(batch).response_mask)

    with raises("algorithm.constant-input", node="length_penalty", port="token_level_scores", found="Tensor"):
        constant()


def test_a_record_in_place_of_a_column_is_refused() -> None:
    @algorithm
    def whole(batch: PromptBatch) -> Any:
        rollout = Generate()(batch)
        return Whiten()(rollout, rollout.response_mask)

    with raises("call.type", node="whiten", port="advantages", found="RolloutBatch"):
        whole()

    @algorithm
    def part(batch: PromptBatch) -> Any:
        return OldLogProb()(Generate()(batch).input_ids)

    with raises("call.type", node="old_log_prob", port="rollout"):
        part()

    @algorithm
    def lacking(batch: PromptBatch) -> Any:
        return OldLogProb()(batch)

    with raises("call.type", node="old_log_prob", port="rollout", found="a PromptBatch"):
        lacking()


def test_an_unknown_column_of_a_record_has_a_suggestion() -> None:
    @algorithm
    def misspelled(batch: PromptBatch) -> Any:
        rollout = Generate()(batch)
        assert isinstance(rollout, RolloutBatch) and not hasattr(rollout, "rewards")
        return Whiten()(rollout.response_maks, rollout.response_mask)  # type: ignore[attr-defined]

    with raises("column.not-in-record") as error:
        misspelled()
    assert isinstance(error.value, ColumnNotFoundError)
    assert error.value.message.endswith("token_version; did you mean 'response_mask'?")
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)


def test_an_operator_that_reads_a_column_which_its_record_lacks_is_refused() -> None:
    class Greedy(Operator):
        def __call__(self, rollout: Sequences) -> c.ResponseMask:
            return rollout.response_maks  # type: ignore[attr-defined, no-any-return]

    assert copy.deepcopy(record_tuple(Sequences)(1, 2, 3, 4, 5)) == (1, 2, 3, 4, 5)
    with raises("column.not-in-record"):
        Greedy()(answers())


def test_an_update_that_is_not_returned_is_refused() -> None:
    @algorithm
    def without_update(batch: PromptBatch) -> object:
        rollout = Generate()(batch)
        values = Value()(rollout)
        scores = Reward(lambda data_source, solution_str, ground_truth, extra_info=None: 1.0)(rollout, batch)
        adv = GAE()(scores, values, rollout.response_mask)
        UpdateCritic()(rollout, values, adv.returns)
        return adv

    with raises("algorithm.unused-update", algorithm="without_update", node="update_critic"):
        without_update()
