"""Reporters by name, and packages that are not installed."""

from __future__ import annotations

import sys
from importlib import metadata

import pytest

from flowrl.report import names
from flowrl.report.names import BUILT_IN, reporter
from tests import ROOT
from tests.support.errors import raises

PACKAGE = {"mlflow": "mlflow", "tensorboard": "torch.utils.tensorboard", "trackio": "trackio", "wandb": "wandb"}


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_tracker_without_its_package_names_the_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, PACKAGE[name], None)
    with raises("package.not-installed", package=name) as caught:
        reporter(name, "--report")
    assert f"pip install 'flowrl[{name}]'" in str(caught.value)
    assert f"\n{name} = [" in (ROOT / "pyproject.toml").read_text()


def test_an_unknown_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with raises("cli.bad-option", option="--to", found="wandbb") as caught:
        reporter("wandbb", "--to")
    assert "did you mean 'wandb'?" in str(caught.value)


def test_a_package_adds_a_reporter(monkeypatch: pytest.MonkeyPatch) -> None:
    point = metadata.EntryPoint("mine", "tests.support.runs:Recorder", names.GROUP)
    monkeypatch.setattr(metadata, "entry_points", lambda group: [point] if group == names.GROUP else [])
    assert type(reporter("mine", "--report")).__name__ == "Recorder"
