"""New axes and several row axes of operators: accepted and refused graphs."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

from flowrl import Operator, PromptBatch, algorithm
from flowrl import columns as c
from flowrl.columns import Rows, Widths
from flowrl.core.operators.ports import PortField
from flowrl.data.proto.dataproto import DataProto
from flowrl.errors import DefinitionError, PortError
from flowrl.files.graph_io import graph_to_dict
from flowrl.graph import Graph
from flowrl.operators import Generate, OldLogProb, Repeat, Reward
from flowrl.records import RolloutBatch
from tests.support.errors import raises
from tests.support.jobs import job_of, prompt_batch, proto, rollout_batch
from tests.support.kernel import exact
from tests.support.runs import walk

BATCH = ("batch", "prompt", "response")


class Demos(Operator):
    """As many rows as `many`, with responses of `width` tokens, whatever the prompts are."""

    new_axes: ClassVar[tuple[str, ...]] = ("batch", "prompt")
    many: int = 2
    width: int = 9

    def __call__(self, prompts: c.Prompts) -> RolloutBatch:
        return rollout_batch(prompt_batch([[7]] * self.many), [[8] * self.width] * self.many)


class Join(Operator):
    """Demonstrations appended to the rollouts."""

    new_axes: ClassVar[tuple[str, ...]] = BATCH

    def __call__(self, rollout: RolloutBatch, demos: Rows[RolloutBatch, "demo"]) -> RolloutBatch:
        return joined(rollout, demos)


class Shorter(Operator):
    """The shorter of two responses to a prompt."""

    new_axes: ClassVar[tuple[str, ...]] = ("response",)

    def __call__(self, first: RolloutBatch, second: Widths[RolloutBatch, "second"]) -> RolloutBatch:
        better = second.response_mask.sum(1) < first.response_mask.sum(1)
        rows = torch.arange(len(better))
        both = DataProto.concat([DataProto(first._asdict()), DataProto(second._asdict())])
        return both[torch.where(better, rows + len(rows), rows)].to_record(RolloutBatch)


class Above(Operator):
    """How far each row's length is above that of the demonstrations."""

    granularity = "row"

    def __call__(self, response_mask: c.ResponseMask, demos: Rows[c.ResponseMask, "demo"]) -> c.Advantages:
        return (response_mask.sum(1, keepdim=True) - demos.sum(1).double().mean()).float() * response_mask


def joined(*parts: RolloutBatch) -> RolloutBatch:
    return DataProto.concat([DataProto(part._asdict()) for part in parts]).to_record(RolloutBatch)


@algorithm
def with_demos(batch: PromptBatch, join: Operator) -> Any:
    prompts = Repeat(2)(batch)
    rollout = Generate(max_new_tokens=4)(prompts)
    both = join(rollout, Demos()(batch.prompts))
    return OldLogProb()(both), Reward(exact)(rollout, prompts)


@algorithm
def of_two(batch: PromptBatch, pick: Operator) -> Any:
    first = Generate(max_new_tokens=3)(batch)
    second = Generate(max_new_tokens=8).named("second")(batch)
    picked = pick(first, second)
    return OldLogProb()(picked), Reward(exact)(picked, batch)


def axes(graph: Graph, edge: str) -> tuple[str, ...]:
    return {str(found): typed.axes for found, typed in graph.types.items()}[edge]


def test_demonstrations_join_rollouts_on_new_rows() -> None:
    graph = with_demos(Join())
    assert axes(graph, "join.input_ids") == ("batch@join", "sequence@join")
    assert axes(graph, "join.responses") == ("batch@join", "response@join")
    assert axes(graph, "old_log_prob.old_log_probs") == ("batch@join", "response@join")
    assert Graph.from_dict(graph_to_dict(graph)).fingerprint() == graph.fingerprint()


def test_responses_of_two_generates_join_on_a_new_response_axis() -> None:
    graph = of_two(Shorter())
    assert axes(graph, "shorter.responses") == ("batch@batch", "response@shorter")
    assert axes(graph, "shorter.prompts") == ("batch@batch", "prompt@batch")
    assert axes(graph, "shorter.input_ids") == ("batch@batch", "sequence@shorter")  # a prompt and its response


def test_joined_rows_have_the_log_probs_of_their_own_tokens(tiny: str) -> None:
    engines = job_of("grpo", tiny).build()
    prompts = proto(prompt_batch([[10, 11], [12], [13, 14, 15]]))
    steps = walk(with_demos(Join()), rollout=engines["rollout"], actor=engines["actor"])
    engines["rollout"].sync(engines["actor"])
    result = steps.step(prompts, 0, return_nodes=("join", "generate", "demos"))
    rollout, demos, both = (result.columns[node] for node in ("generate", "demos", "join"))
    assert (len(rollout), len(demos), len(both)) == (6, 2, 8)
    assert both["responses"].shape[1] == 9 > rollout["responses"].shape[1]
    assert both[:6]["response_text"].tolist() == rollout["response_text"].tolist()
    alone = OldLogProb(actor=engines["actor"])(demos.to_record(RolloutBatch))
    assert result.columns["old_log_prob"]["old_log_probs"][6:] == pytest.approx(alone, abs=1e-5)


def test_the_shorter_of_two_responses_has_its_own_width(tiny: str) -> None:
    engines = job_of("grpo", tiny).build()
    engines["rollout"].sync(engines["actor"])
    steps = walk(of_two(Shorter()), rollout=engines["rollout"], actor=engines["actor"])
    result = steps.step(
        proto(prompt_batch([[10, 11], [12], [13, 14, 15]])), 0, return_nodes=("generate", "second", "shorter")
    )
    lengths = [result.columns[node]["response_mask"].sum(1) for node in ("generate", "second", "shorter")]
    assert torch.equal(lengths[2], torch.minimum(lengths[0], lengths[1]))


def test_a_port_with_its_own_row_axis_does_not_constrain_other_ports() -> None:
    mask, demos = torch.ones(3, 2, dtype=torch.bool), torch.ones(1, 5, dtype=torch.bool)
    assert torch.equal(Above()(mask, demos), torch.full((3, 2), -3.0))

    @algorithm
    def above(batch: PromptBatch) -> Any:
        rollout = Generate()(Repeat(2)(batch))
        return Above()(rollout.response_mask, Demos()(batch.prompts).response_mask)

    graph = above()
    assert graph["above"].inputs[PortField("demos")] == ("demos", "response_mask")
    assert axes(graph, "above.advantages") == ("batch@repeat", "response@generate")


# -------------------------------------------------------------------------------------------------------------- refused


class NewRowsOnly(Join):
    new_axes = ("batch",)


class NoNewAxes(Shorter):
    new_axes = ()


class OneAxis(Operator):
    def __call__(self, first: RolloutBatch, second: RolloutBatch) -> c.Advantages:
        return first.rollout_log_probs - second.rollout_log_probs


@pytest.mark.parametrize(
    ("make", "code", "facts"),
    [
        (
            lambda: with_demos(NewRowsOnly()),
            "graph.undeclared-axis",
            {"node": "new_rows_only", "output": "prompts", "axis": "prompt", "expected": ("batch", "prompt")},
        ),
        (
            lambda: of_two(NoNewAxes()),
            "graph.undeclared-axis",
            {"node": "no_new_axes", "output": "responses", "axis": "response", "expected": ("response",)},
        ),
        (
            lambda: of_two(OneAxis()),
            "graph.axis-mismatch",
            {"port": "second.responses", "axis": "response", "suggestion": "second: Widths[..., 'second']"},
        ),
    ],
)
def test_an_operator_with_undeclared_axes_is_refused_when_the_graph_is_built(
    make: Any, code: str, facts: dict[str, Any]
) -> None:
    with raises(code, **facts):
        make()


def test_an_output_narrower_than_its_axis_is_refused_with_the_declaration_to_add() -> None:
    class Cut(Operator):
        def __call__(self, response_mask: c.ResponseMask) -> c.ResponseMask:
            return response_mask[:, :1]

    with pytest.raises(PortError, match=r"cut\.response_mask .* or declare a new axis: new_axes: ClassVar = \('resp"):
        Cut()(torch.ones(2, 3, dtype=torch.bool))


def own_axes(annotation: Any) -> Any:
    def __call__(self: Any, values: Any) -> Any: ...

    __call__.__annotations__ = {"values": annotation, "return": c.Returns}
    return type("Faulty", (Operator,), {"__call__": __call__, "__module__": __name__})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Rows["demo", RolloutBatch], r"Rows\[\.\.\.\] needs a record .* Rows\[RolloutBatch, \"demo\"\]"),
        (
            lambda: Widths[RolloutBatch, "batch"],
            r"Widths\[\.\.\.\] needs a record .* name of its axes other than batch",
        ),
        (lambda: Rows[RolloutBatch], r"Rows\[\.\.\.\] needs a record"),
        (lambda: own_axes(Rows[Widths[c.Values, "a"], "b"]), r"two names of axes, 'a' and 'b'"),
        (lambda: own_axes(Rows[Graph, "b"]), r"A batchless value has no axes of its own. Remove the name 'b'"),
    ],
)
def test_invalid_axes_of_a_port_are_refused(make: Any, message: str) -> None:
    with pytest.raises(DefinitionError, match=message):
        make()


def test_outputs_have_no_axes_of_their_own_and_new_axes_names_axes_of_outputs() -> None:
    with raises("column.port-axes", axes="demo"):

        class Out(Operator):
            def __call__(self, values: c.Values) -> Rows[c.Returns, "demo"]: ...

    with raises("operator.invalid-attribute", attribute="new_axes", found="('prompt',)"):

        class Misnamed(Operator):
            new_axes: ClassVar[tuple[str, ...]] = ("prompt",)

            def __call__(self, values: c.Values) -> c.Returns: ...
