"""`When`: nodes that run in some steps only, in graphs, edits, files, diffs and pictures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import flowrl
from flowrl import PromptData, When, algorithm
from flowrl.core.operators.when import ALWAYS, first_idle
from flowrl.errors import FlowrlError, GraphError
from flowrl.graph import Graph
from flowrl.graphs import grpo, ppo
from flowrl.operators import GAE, Generate, Repeat, Reward, UpdateActor, Whiten
from flowrl.records import PromptBatch
from flowrl.run.validation.validation import Validation
from flowrl.schedules import Linear
from tests.support.errors import raises
from tests.support.kernel import exact

WARM = ppo(exact).edit(when={"update_actor": When(start=20)})


def test_every_and_start_select_the_steps() -> None:
    assert [step for step in range(9) if When(every=3, start=2).runs(step)] == [2, 5, 8]
    assert [step for step in range(4) if When(every=2).runs(step)] == [0, 2]
    assert all(ALWAYS.runs(step) for step in range(9)) and When(1, 0) == ALWAYS


whens = st.builds(When, every=st.integers(1, 6), start=st.integers(0, 12))


@given(st.lists(st.lists(whens, max_size=3), min_size=1, max_size=3))
def test_the_first_idle_step_is_found(sinks: list[list[When]]) -> None:
    """Against 500 steps checked one by one: more than any start plus the period, at most 5 x 4 x 3."""
    idle = [
        s for s in range(500) if not any(all((s - w.start) % w.every == 0 <= s - w.start for w in k) for k in sinks)
    ]
    assert first_idle(sinks) == (idle[0] if idle else None)


def test_a_step_condition_stays_with_its_node_through_edits() -> None:
    @algorithm
    def lines(batch: PromptBatch) -> Any:
        prompts = Repeat(2)(batch)
        rollout = Generate()(prompts)
        return rollout, Reward(exact).when(every=10).named("now_and_then")(rollout, prompts)

    assert lines()["now_and_then"].when == When(every=10) and lines()["generate"].when == ALWAYS
    for edited in (
        WARM,
        WARM.edit(set={"update_actor.loss.clip_low": 0.1}),
        WARM.edit(set={"update_actor.loss.clip_low": Linear(0.2, 0.1, steps=9)}),
        WARM.edit(drop=["whiten"]),
        WARM.edit(replace={"update_actor": UpdateActor().when(start=20)}),
        ppo(exact).edit(set={"update_actor.ppo_epochs": 2}, when={"update_actor": When(start=20)}),
    ):
        assert edited["update_actor"].when == When(start=20)
        assert edited["update_actor"].in_step(3).when == When(start=20)
        assert edited.whens("sync") == (When(start=20),) and edited.whens("update_critic") == ()
    assert WARM.edit(rename={"update_actor": "update"})["update"].when == When(start=20)
    assert WARM.edit(replace={"update_actor": UpdateActor()})["update_actor"].when == ALWAYS  # another operator
    assert WARM.edit(when={"update_actor": ALWAYS}).fingerprint() == ppo(exact).fingerprint()
    both = WARM.edit(when={"gae": When(every=2)})
    assert set(both.whens("sync")) == {When(start=20), When(every=2)} and both.whens("update_critic") == (When(2),)


def test_diffs_pictures_and_files_show_step_conditions(tmp_path: Path) -> None:
    assert str(ppo(exact).diff(WARM)).splitlines()[1:] == ["~ update_actor.when: None -> When(every=1, start=20)"]
    assert "when(start=20)" in WARM.mermaid() and "always → when(start=20)" in ppo(exact).diff(WARM).mermaid()
    assert "when(start=20)" in repr(WARM) and "when" not in repr(ppo(exact))
    other = ppo(exact).edit(replace={"whiten": Whiten().when(every=2).named("white")})
    assert "+ white: Whiten().when(every=2)  <- gae, generate" in str(ppo(exact).diff(other)).splitlines()
    written = ppo("tests.support.kernel:exact").edit(when={"update_actor": When(2, 4)})
    flowrl.save(written, tmp_path / "graph.yaml")
    read = flowrl.load(tmp_path / "graph.yaml")
    assert read.fingerprint() == written.fingerprint() and read["update_actor"].when == When(2, 4)
    assert "when" not in ppo("tests.support.kernel:exact").to_dict()["nodes"]["gae"]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda: ppo(exact).edit(when={"batch": When(2)}), r"names an input, but every step has a batch"),
        (lambda: ppo(exact).edit(when={"gea": When(2)}), r"names 'gea', not a node of ppo; .* you mean 'gae'"),
        (lambda: ppo(exact).edit(when={"gae": 2}), r"has an int for steps\. .*when=\{'update_actor': When"),
        (lambda: ppo(exact).edit(when=When(2)), r"edit\(when=When\(.*\)\) is not a mapping\. .*when="),
        (
            lambda: ppo(exact).edit(when={"gae": When(2)}, replace={"gae": GAE()}),
            r"edit replaces 'gae', and .*on the replacement: Operator\(\.\.\.\)\.when\(every=2\)",
        ),
        (lambda: UpdateActor().when(0), r"every=0: expected a number greater than or equal to 1"),
        (lambda: UpdateActor().when(start=-1), r"start=-1: expected a number greater than or equal to 0"),
        (lambda: When(every=Linear(1, 2, steps=3)), r"every=Linear\(.*changes over steps"),
    ],
)
def test_an_invalid_when_is_refused(edit: Callable[[], Any], message: str) -> None:
    with pytest.raises(FlowrlError, match=message):
        edit()


@pytest.mark.parametrize(
    ("when", "message"),
    [
        (3, r"update_actor has an int under 'when'"),
        ({"every": 0}, r"update_actor\.when: .*every=0"),
        ({"ever": 2}, r"update_actor\.when has the unknown key .ever.; .* did you mean 'every'"),
        ({"start": "x"}, r"update_actor\.when: "),
    ],
)
def test_an_invalid_when_in_a_file_is_refused(when: Any, message: str) -> None:
    data = ppo("tests.support.kernel:exact").to_dict()
    data["nodes"]["update_actor"]["when"] = when
    with pytest.raises(GraphError, match=message):
        Graph.from_dict(data)


def test_a_step_in_which_nothing_runs_is_refused_before_a_run() -> None:
    idle = ppo(exact).edit(when={"generate": When(start=3)})
    with raises("graph.idle-step", step=1):
        idle.refuse_idle()
    turns = grpo(exact).edit(drop=["mismatch"], when={"update_actor": When(2)})
    with raises("graph.idle-step", step=2):
        turns.refuse_idle()
    for graph in (WARM, ppo(exact), grpo(exact).edit(when={"update_actor": When(2)})):
        graph.refuse_idle()


def test_a_sync_that_skips_steps_of_its_update_is_found() -> None:
    assert WARM.check() == []
    seldom = WARM.edit(when={"sync": When(every=2)})
    [finding] = seldom.check()
    assert (finding.rule, finding.node) == ("FR002", "update_actor")
    assert "sync does not sync its weights to 'rollout'" in finding.message
    assert "edit(when={'sync': When()})" in finding.message
    assert seldom.edit(when={"sync": When()}).check() == []
    assert ppo(exact).edit(when={"generate": When(every=2)}).check() == []  # all of it waits


def test_a_validation_ignores_step_conditions() -> None:
    seldom = ppo(exact).edit(when={"reward": When(every=5)})
    graph = Validation(PromptData("x.jsonl")).graph(seldom)
    assert graph.whens("reward") == () and seldom["reward"].when == When(every=5)


def test_default_step_conditions_equal_none() -> None:
    assert str(When()) == "" and str(When(2)) == "when(every=2)" and str(When(2, 3)) == "when(every=2, start=3)"
    assert GAE().when() == GAE() and GAE().when(every=2) == GAE()  # it is of the node, as a name is
    with raises("parameter.invalid", parameter="every", given="'often'"):
        GAE().when("often")  # type: ignore[arg-type]
