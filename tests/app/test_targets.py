"""Tests of `targets.py` and `graphs/variants.py`: names of algorithms as command-line targets.

`tests/app/test_cli.py` tests the other targets.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from flowrl import Graph, graphs, load
from flowrl.app.algorithms import graph, names, your_reward
from flowrl.app.cli import main
from flowrl.core.graphs.algorithm import Algorithm
from flowrl.errors import GraphError
from flowrl.graphs import grpo, gspo, remax, rloo
from flowrl.graphs.variants import DistillSettings, GRPOSettings, PPOSettings, parent_of, settings_of
from tests.support.command_line import Command, is_paragraph, write
from tests.support.errors import raises


def test_an_algorithm_is_a_target_by_its_name(command: Command) -> None:
    assert command("show", "grpo") == (0, f"{grpo(your_reward).mermaid()}\n", "")
    changes = str(grpo(your_reward).diff(graphs.gspo(your_reward)))
    assert command("diff", "grpo", "gspo") == (0, f"{changes}\n", "")
    assert command("plan", "ppo").out.startswith("ppo: 13 nodes in 8 waves")
    assert command("check", "ppo", "--prompts", "4").out == (
        "ppo: 14 nodes, all connections match and no rule is violated.\n"
    )


@pytest.mark.parametrize(("name", "near"), [("grop", "grpo"), ("gsp", "gspo"), ("dr_gpro", "dr_grpo")])
def test_an_unknown_algorithm_name_is_refused_with_the_closest_name(command: Command, name: str, near: str) -> None:
    result = command("show", name)
    assert result.code == 2 and is_paragraph(result)
    assert f"{name!r} is neither an algorithm nor a file" in result.err and f"did you mean {near!r}?" in result.err


def test_an_algorithm_can_be_written_to_a_file_but_not_run(command: Command) -> None:
    assert command("show", "rloo", "--to", "rloo.yaml").code == 0
    assert load("rloo.yaml").fingerprint() == graph("rloo").fingerprint()
    result = command("run", "rloo")
    assert result.code == 2 and "rloo is a Graph, which has neither data" in result.err
    with raises("cli.no-reward"):
        your_reward("", "", "")


def test_list_prints_source_and_changes_of_every_algorithm(command: Command) -> None:
    result = command("list")
    assert result.code == 0 and not result.err and "…" not in result.out
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in result.out.splitlines() if line[0] == "│"]
    assert [row[0] for row in rows] == list(graphs.__all__) == list(names())
    assert all(re.search(r"\d{4}", row[1]) and "arXiv:" in row[1] for row in rows)
    listed = {name: (parent, changes) for name, _, parent, changes in rows}
    assert listed["ppo"] == ("", "")
    assert listed["rloo"] == (
        "ppo",
        "+rloo_advantage -gae -whiten -update_critic -value ~repeat.n ~kl_shape.coef ~update_actor.aggregation",
    )
    assert listed["pass_at_k"] == ("grpo", "+pass_at_k_advantage -group_advantage")
    plain = {"distill", "distill_full", "dpo", "grpo_sft", "kto", "ppo", "reward_model", "sft"}
    edits = {name: row for name, row in listed.items() if name not in plain}
    assert all(parent in listed and changes for parent, changes in edits.values())
    assert all(row == ("", "") for name, row in listed.items() if name not in edits)


@pytest.mark.parametrize("name", [name for name in names() if not isinstance(getattr(graphs, name), Algorithm)])
def test_every_variant_names_its_parent_algorithm_and_calls_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parent = parent_of(name)
    assert parent is not None, f"write @edit_of(...) above {name}"
    function, called = getattr(graphs, parent), []

    def record(*args: Any, **settings: Any) -> Graph:
        called.append(parent)
        graph: Graph = function(*args, **settings)
        return graph

    monkeypatch.setitem(inspect.unwrap(getattr(graphs, name)).__globals__, parent, record)
    graph(name)
    assert called == [parent]


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (
            grpo,
            {"no_such": 1},
            r"grpo\(...\) cannot be called like this: got an unexpected keyword argument 'no_such'; it takes rew",
        ),
        (grpo, {"max_tokens": 1}, "mini_batch; did you mean 'max_new_tokens'"),
        (rloo, {"temprature": 1}, "did you mean 'temperature'"),
        (remax, {"clp": 1}, r"remax\(...\) cannot be called like this: .* gamma, .* did you mean 'clip'"),
    ],
)
def test_an_unknown_or_missing_setting_is_refused_with_the_valid_ones(
    make: object, settings: dict[str, object], message: str
) -> None:
    with pytest.raises(GraphError, match=message):
        make(your_reward, **settings)  # type: ignore[operator]
    with pytest.raises(GraphError, match="missing a required argument: 'reward_fn'; it takes reward_fn"):
        make()  # type: ignore[operator]


def test_a_variant_accepts_the_settings_of_its_parent_that_still_apply() -> None:
    own = inspect.signature(rloo).parameters
    assert {"n", "kl_coef", "clip", "temperature", "mini_batch"} <= own.keys()
    assert own["n"].default == 4 and {"gamma", "lam", "settings"}.isdisjoint(own)
    assert "lam" not in inspect.signature(remax).parameters and "gamma" in inspect.signature(remax).parameters


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [("ppo", PPOSettings), ("grpo", GRPOSettings), ("distill_full", DistillSettings)],
)
def test_typed_settings_equal_the_parameters_of_the_algorithm(algorithm: str, settings: type) -> None:
    function = getattr(graphs, algorithm)
    hints = get_type_hints(inspect.unwrap(function.function if isinstance(function, Algorithm) else function))
    by_name = (p.name for p in settings_of(function).parameters.values() if p.kind is p.KEYWORD_ONLY)
    assert get_type_hints(settings) == {name: hints[name] for name in by_name}


@pytest.mark.parametrize("name", [name for name in names() if not isinstance(getattr(graphs, name), Algorithm)])
def test_all_settings_of_a_variant_are_typed(name: str) -> None:
    function = getattr(graphs, name)
    own = inspect.signature(inspect.unwrap(function)).parameters
    hints = get_type_hints(inspect.unwrap(function))
    known = get_type_hints(get_args(hints["settings"])[0]) if "settings" in own else {}
    assert settings_of(function).parameters.keys() <= {*own, *known}


def test_defaults_of_a_variant_override_those_of_its_parent() -> None:
    shown = {
        name: inspect.signature(function).parameters["kl_coef"].default
        for name, function in (("gspo", gspo), ("grpo", grpo))
    }
    assert shown == {"gspo": 0.0, "grpo": 0.001}
    assert "ref_log_prob" not in gspo(your_reward) and "ref_log_prob" in gspo(your_reward, kl_coef=0.1)


def test_debug_raises_the_error_of_an_unknown_name() -> None:
    with raises("cli.unknown-target", target="nothing"):
        main(["show", "nothing", "--debug"])


def test_errors_of_flowrl_in_a_users_function_name_its_line(command: Command) -> None:
    source = "from flowrl.graphs import sft\n\n\ndef graph():\n    return sft().bind(ref=None)\n"
    answer = command("show", write(Path("file.py"), source).name + ":graph")
    assert answer.code == 2 and is_paragraph(answer)
    assert "sft has no role 'ref' to bind" in answer.err and answer.err.endswith("file.py:5.\n")
