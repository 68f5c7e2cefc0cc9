"""Reading a graph file runs none of the code that it names, except with imports."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import flowrl
from flowrl import Costs
from flowrl.core.graphs.after import After
from flowrl.demo.verifier import compute_score
from flowrl.errors import GraphError
from flowrl.files.graph_io import not_imported, save
from flowrl.files.values import NotImported, decode
from flowrl.graph import Graph, load
from flowrl.graphs import ppo
from flowrl.operators import Reward
from flowrl.references import resolve, source_hash
from tests.support.command_line import Command
from tests.support.errors import raises
from tests.support.jobs import job_of
from tests.support.kernel import BINDINGS, exact
from tests.support.runs import train

OPERATOR = """
from flowrl.columns import TokenLevelScores
from flowrl.core.operators.operator import Operator


class Halved(Operator):
    def __call__(self, token_level_scores: TokenLevelScores) -> TokenLevelScores:
        return token_level_scores / 2
"""

REWARD = """
def score(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0
"""

TRAP = """
from pathlib import Path

Path("ran").touch()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory, with a file of a reward and a file of an operator in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    Path("mine.py").write_text(REWARD)
    Path("ours.py").write_text(OPERATOR)


def spring(file: str) -> None:
    """Make every import of the file leave a trace."""
    Path(file).write_text(TRAP + Path(file).read_text())


def by_function() -> Graph:
    return ppo(resolve("mine.py:score"))


def by_name() -> Graph:
    return ppo("mine.py:score")


@pytest.mark.parametrize("make", [by_function, by_name])
def test_a_reward_is_shown_and_compared_by_its_name(make: Any) -> None:
    graph: Graph = make()
    save(graph, "g.yaml")
    spring("mine.py")
    read = load("g.yaml", imports=False)
    assert not_imported(read) == ["mine.py:score"]
    shown = "Reward(fn=mine.py:score, timeout=10.0, on_error='raise', workers=None, log='reward')"
    assert repr(read["reward"].operator) == shown
    assert read.mermaid() == graph.mermaid()
    assert read.check(prompts=8) == []
    assert read.to_dict() == load("g.yaml", imports=False).to_dict()
    assert not Path("ran").exists()
    edited = read.edit(set={"repeat.n": 4})
    assert str(read.diff(edited)).splitlines()[1:] == ["~ repeat.n: 1 -> 4"]
    with raises("file.not-imported", path="mine.py:score"):
        read.bind(**BINDINGS)
    with raises("file.not-imported", path="mine.py:score"):
        read["reward"].operator.fn()  # type: ignore[attr-defined]


@pytest.mark.parametrize("make", [by_function, by_name])
def test_a_graph_loaded_without_imports_has_the_same_fingerprint(make: Any) -> None:
    graph: Graph = make()
    save(graph, "g.yaml")
    read = load("g.yaml", imports=False)
    assert read.fingerprint() == graph.fingerprint() == load("g.yaml", imports=True).fingerprint()
    assert read.to_dict() == graph.to_dict()
    assert not graph.diff(read) and not read.diff(graph)
    Path("mine.py").write_text(REWARD.replace("1.0", "0.0"))
    changed = make() if make is by_name else ppo(resolve("mine.py:score"))
    assert str(changed.diff(read)).splitlines()[1:] == [
        "~ reward.fn: mine.py:score -> mine.py:score (with another source)"
    ]


@pytest.mark.parametrize(
    "fn", ["mine.py:score", "mine:score", "pack.mine:score", "gone.py:score", "no.such.module:score"]
)
def test_a_function_reference_edited_by_hand_is_not_imported(fn: str) -> None:
    """To find ``pack.mine`` Python would import ``pack``."""
    Path("pack").mkdir()
    Path("pack/__init__.py").write_text(TRAP)
    spring("mine.py")
    data = ppo(exact).to_dict()
    data["nodes"]["reward"]["operator"]["fn"] = fn
    read = Graph.from_dict(data, imports=False)
    assert read["reward"].operator.fn == NotImported(fn, None, "$named")  # type: ignore[attr-defined]
    assert read.fingerprint() and read.check() == []
    assert not Path("ran").exists()


def test_a_user_class_is_refused_without_imports_and_named() -> None:
    halved: Any = resolve("ours.py:Halved")
    save(ppo(exact).edit(insert={"halved": After("reward", halved())}), "g.json")
    spring("ours.py")
    with raises("file.not-imported", where="halved", path="ours.py:Halved"):
        load("g.json", imports=False)
    assert not Path("ran").exists()
    assert "halved" in load("g.json", imports=True)
    assert Path("ran").exists()


# ---- the default


def unimported(module: str) -> None:
    """Forget what was imported from a file, as in another program."""
    for name in [name for name in sys.modules if name == module or name.startswith(f"{module}_")]:
        del sys.modules[name]


def advised(error: GraphError) -> Any:
    """The result of the call that a message advises, executed as it is."""
    (call,) = re.findall(r"call ([\w.]+\(.*imports=True\))", error.message)
    return eval(call, {"flowrl": flowrl, "Graph": Graph, "Costs": Costs})


@pytest.mark.parametrize("text", [False, True], ids=["tagged", "plain text"])
@pytest.mark.parametrize("make", [by_function, by_name])
def test_by_default_load_imports_nothing_and_names_the_references(make: Any, text: bool) -> None:
    """Also where a reference is written by hand as plain text, and in data; the advised call loads the graph."""
    halved: Any = resolve("ours.py:Halved")
    graph = make().edit(insert={"halved": After("reward", halved())})
    save(graph, "g.yaml")
    if text:
        data = yaml.safe_load(Path("g.yaml").read_text())
        data["nodes"]["reward"]["operator"]["fn"] = "mine.py:score"
        Path("g.yaml").write_text(yaml.safe_dump(data))
    spring("ours.py")
    for module in ("mine", "ours"):
        unimported(module)
    with raises("file.not-imported", references=("mine.py:score", "ours.py:Halved")) as caught:
        load("g.yaml")
    with raises("file.not-imported", references=("mine.py:score", "ours.py:Halved")):
        Graph.from_dict(yaml.safe_load(Path("g.yaml").read_text()))
    assert not Path("ran").exists()
    assert set(advised(caught.value).nodes) == set(graph.nodes)
    assert Path("ran").exists()


@pytest.mark.parametrize("how", ["by file", "by name"])
def test_references_to_imported_modules_resolve_without_imports(how: str) -> None:
    """By the reference that the file has, also if the program imported the module by its name."""
    halved: Any = resolve("ours.py:Halved")
    graph = ppo(resolve("mine.py:score")).edit(insert={"halved": After("reward", halved())})
    save(graph, "g.yaml")
    if how == "by name":
        for module in ("mine", "ours"):
            unimported(module)
            importlib.import_module(module)
        halved = sys.modules["ours"].Halved
    before = set(sys.modules)
    read = load("g.yaml")
    assert type(read["halved"].operator) is halved and set(sys.modules) == before
    assert read["reward"].operator.fn.__code__.co_filename == str(Path("mine.py").absolute())  # type: ignore[attr-defined]
    for module in ("mine", "ours"):
        unimported(module)


@pytest.mark.parametrize("path", ["os:system", "subprocess:call", "mine:system", "mine:os.system", "builtins:eval"])
def test_references_to_the_standard_library_are_refused(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor by way of a module that imports it."""
    Path("mine.py").write_text("import os\nfrom os import system\n")
    monkeypatch.setitem(sys.modules, "mine", importlib.import_module("mine"))
    data = ppo(exact).to_dict()
    for fn in (path, {"$function": path, "source": source_hash(resolve(path))}):
        data["nodes"]["reward"]["operator"]["fn"] = fn
        with raises("file.not-imported", references=(path,)):
            Graph.from_dict(data)


PLACE = """
from flowrl.distributed.place import Colocate


class Mine(Colocate):
    pass
"""


@pytest.mark.runs
def test_costs_import_the_place_of_a_run_only_if_allowed(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    """A training predicts for its own place, so it imports nothing."""
    train(job_of("grpo", tiny), prompts_file, tmp_path / "run", steps=2)
    Path("place.py").write_text(TRAP + PLACE)
    described = json.loads(Path("run/run.json").read_text())
    Path("run/run.json").write_text(json.dumps({**described, "place": {"$type": "place.py:Mine", "gpus": 2}}))
    with raises("file.not-imported", references=("place.py:Mine",)) as caught:
        Costs.of("run")
    train(job_of("grpo", tiny), prompts_file, tmp_path / "predicted", steps=1, costs="run")
    assert not Path("ran").exists()
    costs = advised(caught.value)
    assert Path("ran").exists() and costs.place.gpus == 2
    Path("ran").unlink()
    assert Costs.of("run").place == costs.place and not Path("ran").exists()  # by now it is imported


# ---- imports=False


@pytest.mark.parametrize(
    "path", ["ours:Halved", "ours.py:Halved", "flowrl/../ours.py:Halved", "flowrl.py:Halved", "flowrlish.ours:Halved"]
)
@pytest.mark.parametrize("form", ["$type", "$class"])
def test_a_module_that_imitates_flowrl_is_not_imported(form: str, path: str) -> None:
    spring("ours.py")
    Path("flowrl.py").write_text(TRAP)
    with raises("file.not-imported", where="x", path=path):
        decode({form: path}, "x", imports=False)
    assert not Path("ran").exists()


@pytest.mark.parametrize("fn", [compute_score, "flowrl.demo.verifier:compute_score"])
def test_a_reward_of_flowrl_is_the_same_with_and_without_imports(fn: Any) -> None:
    graph = ppo(fn)
    save(graph, "g.yaml")
    for imports in (False, True):
        read = load("g.yaml", imports=imports)
        assert read.fingerprint() == graph.fingerprint()
        assert not graph.diff(read)


def test_built_in_operators_and_rewards_are_imported_and_their_source_is_checked() -> None:
    for data in ({"$type": "Repeat"}, {"$type": "flowrl.operators.engines.engines:Repeat"}):
        assert decode(data, "x", imports=False) == decode(data, "x", imports=True)
    by_flowrl = Reward("flowrl.demo.verifier:compute_score").fn
    data = {"$named": by_flowrl, "source": "0"}
    with raises("file.source-changed", where="x", path="flowrl.demo.verifier:compute_score"):
        decode(data, "x", imports=False)


def test_the_command_line_imports_only_with_the_import_option(command: Command) -> None:
    save(by_function(), "g.yaml")
    spring("mine.py")
    for call in (
        ["show", "g.yaml"],
        ["plan", "g.yaml"],
        ["diff", "g.yaml", "g.yaml"],
        ["show", "g.yaml", "--to", "g.svg"],
    ):
        assert command(*call)[0] == 0
    assert command("check", "g.yaml") == (
        0,
        "ppo: 14 nodes, all connections match and no rule is violated.\n"
        "Not imported, so not checked: mine.py:score. Pass --import to check.\n",
        "",
    )
    assert not Path("ran").exists()
    assert command("check", "g.yaml", "--import") == (
        0,
        "ppo: 14 nodes, all connections match and no rule is violated.\n",
        "",
    )
    assert Path("ran").exists()


def test_the_command_line_names_the_class_that_it_would_import(command: Command) -> None:
    halved: Any = resolve("ours.py:Halved")
    save(ppo(exact).edit(insert={"halved": After("reward", halved())}), "g.yaml")
    spring("ours.py")
    for call in (["show", "g.yaml"], ["check", "g.yaml"], ["plan", "g.yaml"], ["diff", "g.yaml", "g.yaml"]):
        code, _, error = command(*call)
        assert code == 2 and "halved is of the class ours.py:Halved" in error and "--import" in error
        assert not Path("ran").exists()
    assert command("show", "g.yaml", "--import")[0] == 0
