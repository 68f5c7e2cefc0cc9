"""`benchmarks/placement.py` and `benchmarks/edited.py`: what is fixed before predictions are scored."""

from __future__ import annotations

from types import ModuleType

import pytest

from tests import ROOT


@pytest.fixture
def placement(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import placement

    return placement


@pytest.fixture
def edited(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import edited

    return edited


def test_twelve_jobs_count_and_reserves_follow(placement: ModuleType) -> None:
    names = list(placement.CASES)
    assert placement.COUNTED == 12 == sum(not name.startswith("reserve: ") for name in names)
    assert all(name.startswith("reserve: ") for name in names[12:])
    assert len(placement.PLACES) == 4


def test_jobs_whose_places_do_not_differ_are_replaced(placement: ModuleType) -> None:
    assert placement.apart({"here": (1.0, 0.9, 1.1), "there": (1.4, 1.3, 1.5)})
    assert not placement.apart({"here": (1.0, 0.9, 1.2), "there": (1.4, 1.3, 1.5)})


def test_every_job_runs_at_every_place(placement: ModuleType) -> None:
    for case in (placement.CASES["GRPO, small"], placement.CASES["PPO"]):
        for where, (place, ranks, lag) in placement.PLACES.items():
            job = case.job("model", where)
            assert (job.place, job.graph.lag.versions) == (place, lag)
            assert job.graph.bindings["actor"].ranks == ranks
            assert not job.graph.check(prompts=case.prompts)


def test_twenty_edits_are_held_out_and_share_no_base_with_the_others(edited: ModuleType) -> None:
    assert sum(len(edits) for _, edits in edited.HELD_OUT.values()) == 20
    tuned = [base for base, _ in edited.TUNED.values()]
    assert not any(base in tuned for base, _ in edited.HELD_OUT.values())
    assert all(case not in (base, *tuned) for base, edits in edited.HELD_OUT.values() for case in edits.values())
