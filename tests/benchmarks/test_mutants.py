"""`benchmarks/mutants.toml` fits the code: each mutant replaces text that occurs once, by code that compiles."""

from __future__ import annotations

import importlib

import pytest

from tests import ROOT


def test_every_mutant_replaces_one_place_and_its_tests_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    for mutant in importlib.import_module("mutants").mutants():
        source = (ROOT / mutant.file).read_text(encoding="utf-8")
        assert source.count(mutant.old) == 1, mutant.name
        compile(source.replace(mutant.old, mutant.new), mutant.name, "exec")
        assert all((ROOT / test).exists() for test in mutant.tests), mutant.name
