"""`search.py`: what is enumerated, pruned and ranked, and that what is ranked runs and has the predicted numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from flowrl import Colocate, Split
from flowrl.backends import VLLM, Mesh, TorchTrainer
from flowrl.graphs import grpo
from flowrl.run.prediction.fitting import with_changes
from flowrl.run.prediction.hardware import Hardware, hardware_of
from flowrl.run.prediction.memory import Memory, RowLimits, memory_of
from flowrl.run.prediction.search import Ranking, search
from flowrl.run.prediction.stages import times_of
from tests.backends.torch.sizing.counting import folder_of
from tests.support.rewards import digits

LIMITS = RowLimits(64, 192)
H100 = hardware_of("H100")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return folder_of(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> str:
    return folder_of(tmp_path_factory.mktemp("experts"), "moe")


def job_of(folder: str, place: Any) -> Any:
    graph = grpo(digits, n=4, kl_coef=0.0, max_new_tokens=192)
    actor = TorchTrainer(folder, dtype="bfloat16", max_tokens=1024)
    return graph.bind(actor=actor, rollout=VLLM(folder), place=place)


def predictors(hardware: Hardware) -> tuple[Callable[[Any], float], Callable[[Any], Memory]]:
    return (
        lambda job: times_of(job, hardware, LIMITS, 200, 64).seconds,
        lambda job: memory_of(job, hardware, LIMITS, 64),
    )


def ranking(job: Any, gpus: int, hardware: Hardware = H100) -> Ranking:
    return search(job, [gpus], *predictors(hardware))


def test_what_is_ranked_is_accepted_fits_and_has_the_predicted_numbers(folder: str) -> None:
    job = job_of(folder, Colocate(gpus=1))
    found = ranking(job, 4)
    assert found.candidates and [one.seconds for one in found.candidates] == sorted(s.seconds for s in found.candidates)
    seconds, memory = predictors(H100)
    best = found.candidates[0]
    changed = with_changes(job, best.settings)
    changed.refuse_unready(64)
    assert changed == best.job and changed.place.slots == 4
    assert (seconds(changed), memory(changed)) == (best.seconds, best.memory) and memory(changed).fits
    places = {type(one.job.place) for one in found.candidates}
    assert places == {Colocate, Split}


def test_meshes_and_engines_take_all_slots_and_those_that_do_not_divide_are_refused(folder: str) -> None:
    found = ranking(job_of(folder, Colocate(gpus=1)), 8)
    for one in found.candidates:
        place, mesh = one.job.place, one.job.graph.bindings["actor"].geometry
        trained, rolled = (8, 8) if isinstance(place, Colocate) else (place.train, place.rollout)
        engine = one.job.graph.bindings["rollout"]
        assert mesh.ranks == trained and engine.ranks * engine.tensor_parallel == rolled
        assert 2 % mesh.tensor == 0 and 4 % engine.tensor_parallel == 0  # of 2 KV heads and 4 heads
    assert {one.job.graph.bindings["actor"].geometry.tensor for one in found.candidates} == {1, 2}
    assert sum(n for why, n in found.refused.items() if why.startswith("mesh.does-not-divide")) > 0


def test_experts_are_cut_only_in_a_mixture(folder: str, experts: str) -> None:
    def axes(path: str) -> set[int]:
        found = ranking(job_of(path, Colocate(gpus=1)), 2).candidates
        return {one.job.graph.bindings["actor"].geometry.expert for one in found}

    assert axes(folder) == {1} and axes(experts) == {1, 2}


def test_a_lag_that_rules_refuse_is_counted_with_the_rule(folder: str) -> None:
    refused = ranking(job_of(folder, Colocate(gpus=1)), 2).refused
    assert [why for why in refused if why.startswith("rule.violated") and "lag" in why]


def test_an_engine_that_takes_turns_gets_the_largest_share_that_fits(folder: str) -> None:
    job = job_of(folder, Colocate(gpus=1))
    found = ranking(job, 1, Hardware(6, flops=989, bandwidth=3350))
    assert [one.settings for one in found.candidates if "rollout.memory_fraction" in one.settings]
    for one in found.candidates:
        assert one.memory is not None and one.memory.fits
        if share := one.settings.get("rollout.memory_fraction"):
            larger = with_changes(one.job, {"rollout.memory_fraction": min(share + 0.2, 0.9)})
            assert not memory_of(larger, one.memory.hardware, LIMITS, 64).fits


def test_what_does_not_fit_is_counted_with_what_takes_the_most(folder: str) -> None:
    found = ranking(job_of(folder, Colocate(gpus=1)), 1, Hardware(0.5, flops=989, bandwidth=3350))
    assert not found.candidates and sum(found.unfit.values()) == 1
    assert "most of it" in next(iter(found.unfit))


def test_without_memory_only_places_and_ranks_are_ranked(folder: str) -> None:
    found = search(job_of(folder, Colocate(gpus=1)), [2], lambda job: float(job.place.slots), None)
    assert {one.job.graph.bindings["actor"].geometry for one in found.candidates} == {Mesh(fsdp=2), Mesh()}
    assert {one.memory for one in found.candidates} == {None}


def test_settings_of_one_role_change_together(folder: str) -> None:
    job = job_of(folder, Colocate(gpus=4)).edit(bind={"actor": TorchTrainer(folder, ranks=4)})
    changed = with_changes(job, {"actor.mesh": Mesh(fsdp=2, tensor=2), "actor.ranks": 1})
    assert changed.graph.bindings["actor"] == TorchTrainer(folder, mesh=Mesh(fsdp=2, tensor=2))
    assert dataclasses.replace(changed, graph=job.graph) == job
