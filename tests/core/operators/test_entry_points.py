"""Operators by name: the entry points of installed packages."""

from __future__ import annotations

import shutil
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import flowrl.operators
from flowrl.core.operators import entry_points as installed
from flowrl.core.operators.operator import Operator
from flowrl.graph import Graph
from flowrl.graphs import ppo
from tests.support.errors import raises


def plant(monkeypatch: pytest.MonkeyPatch, *points: tuple[str, str]) -> None:
    found = tuple(EntryPoint(name, value, installed.GROUP) for name, value in points)
    monkeypatch.setattr(installed, "_points", lambda modified: found)


def test_every_standard_operator_is_installed_under_its_name() -> None:
    standard = {
        name
        for name in flowrl.operators.__all__
        if isinstance(cls := getattr(flowrl.operators, name), type) and issubclass(cls, Operator)
    }
    assert standard <= set(installed.names())
    assert all(installed.load(name) is getattr(flowrl.operators, name) for name in standard)


def test_a_graph_file_may_name_operators_without_their_module() -> None:
    graph = ppo("flowrl.demo.verifier:compute_score")
    written = graph.to_dict()
    for node in written["nodes"].values():
        node["operator"]["$type"] = (
            node["operator"]["$type"].rpartition(":")[2].replace("Input", "flowrl.core.graphs.graph:Input")
        )
    assert Graph.from_dict(written).fingerprint() == graph.fingerprint()


def test_an_unknown_name_lists_the_known(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, ("GAE", "flowrl.operators:GAE"))
    with raises("operator.unknown-name", operator="GEA", known=("GAE",)):
        installed.load("GEA")


def test_two_packages_with_different_operators_of_one_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, ("GAE", "flowrl.operators:GAE"), ("GAE", "other:GAE"))
    with raises("operator.entry-point", operator="GAE", found=("flowrl.operators:GAE", "other:GAE")):
        installed.names()


def test_an_entry_point_must_name_an_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, ("Column", "flowrl.columns:Column"))
    with raises("operator.entry-point", operator="Column", found="flowrl.columns:Column"):
        installed.load("Column")


def test_a_package_that_is_installed_or_removed_later_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    before = installed.names()
    package = tmp_path / "late-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Name: late\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(f"[{installed.GROUP}]\nLate = flowrl.operators:GAE\n")
    assert installed.names().keys() - before.keys() == {"Late"}
    shutil.rmtree(package)
    assert installed.names() == before
