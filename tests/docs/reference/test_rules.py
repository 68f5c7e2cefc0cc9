"""The page of rules has each rule with an example that breaks it, the message of the check, and a fix that passes."""

from __future__ import annotations

import runpy

import pytest

from flowrl.rules.check import RULES
from tests import ROOT

GENERATOR = runpy.run_path(str(ROOT / "docs" / "rules.py"))
IDS = [rule.id for rule in RULES]


def test_the_committed_page_equals_the_generated_one() -> None:
    assert (ROOT / "docs/reference/rules.md").read_text(encoding="utf-8") == GENERATOR["page"](), "run `make tables`"


def test_every_rule_has_an_example_and_no_other_has() -> None:
    assert sorted(GENERATOR["examples"]()) == sorted(IDS)


@pytest.mark.parametrize("id", IDS)
def test_each_example_breaks_its_rule_and_each_fix_breaks_none(id: str) -> None:
    found = {finding.rule for finding in GENERATOR["findings"](id, "example")}
    assert id in found and found <= {id, "FR002"}  # a second update may also lack its sync
    assert GENERATOR["findings"](id, "example", "fix") == []
