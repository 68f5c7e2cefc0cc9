"""Each key is taken, pointless here, or refused; the tables are those of the pinned versions."""

from __future__ import annotations

import pytest

from flowrl.importers.settings import Setting, Settings, Table, groups_of


def _settings(**given: object) -> Settings:
    return Settings({key: Setting(key, value, 3) for key, value in given.items()}, _TABLE)


_TABLE = Table(
    "peer",
    "1.0",
    {"lr": 0.1, "warmup": 0, "workers": 8, "other": "${lr}"},
    [{"status": "0", "here": "derived", "keys": ["work*"]}, {"status": "N", "here": "none", "keys": ["warmup"]}],
)


def test_what_is_read_is_taken_and_the_rest_is_refused_unless_it_changes_nothing() -> None:
    settings = _settings(lr=0.2, warmup=5, workers=4, other=0.2, unknown=1)
    assert (settings.get("lr"), settings.get("workers")) == (0.2, 4)
    report = settings.report(["unk*"])
    names = {
        name: [remark.key for remark in getattr(report, name)] for name in ("taken", "pointless", "refused", "allowed")
    }
    assert names == {"taken": ["lr", "workers"], "pointless": ["other"], "refused": ["warmup"], "allowed": ["unknown"]}
    assert _settings(warmup=0).report(()).pointless  # the default


def test_references_and_unknown_values() -> None:
    assert _settings(lr=0.3).get("other") == 0.3
    settings = Settings({"lr": Setting("lr", "", 7, ("line 7: `$(date)` was not run",))}, _TABLE)
    assert settings.get("lr") == 0.1
    assert "line 7" in settings.report(()).refused[0].text


@pytest.mark.parametrize("framework", ["openrlhf", "trl", "verl"])
def test_tables_are_of_pinned_versions(framework: str) -> None:
    assert Table.version_of(framework) == {"openrlhf": "0.11.2", "trl": "1.16.0", "verl": "0.9.1"}[framework]
    assert {group["status"] for group in groups_of(framework)} == {"Y", "P", "N", "0"}
