"""`search.py` and `candidates.py`: what is enumerated, pruned and ranked, and that it has the predicted numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from flowrl import Colocate, Split
from flowrl.backends import VLLM, MegatronTrainer, Mesh, TorchScorer, TorchTrainer
from flowrl.errors import BindError
from flowrl.graphs import grpo
from flowrl.run.prediction.fitting import with_changes
from flowrl.run.prediction.hardware import Hardware, hardware_of
from flowrl.run.prediction.memory import Memory, RowLimits, memory_of
from flowrl.run.prediction.search import Candidate, Ranking, search
from flowrl.run.prediction.stages import Times, times_of
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


def predictors(hardware: Hardware) -> tuple[Callable[[Any], Times], Callable[[Any], Memory]]:
    return (
        lambda job: times_of(job, hardware, LIMITS, 200, 64),
        lambda job: memory_of(job, hardware, LIMITS, 64),
    )


def ranking(job: Any, gpus: int, hardware: Hardware = H100) -> Ranking:
    return search(job, [gpus], *predictors(hardware))


def test_what_is_ranked_is_accepted_fits_and_has_the_predicted_numbers(folder: str) -> None:
    job = job_of(folder, Colocate(gpus=1))
    found = ranking(job, 4)
    assert found.candidates and [one.seconds for one in found.candidates] == sorted(s.seconds for s in found.candidates)
    times, memory = predictors(H100)
    best = found.candidates[0]
    changed = with_changes(job, best.settings)
    changed.refuse_unready(64)
    assert changed == best.job and changed.place.slots == 4
    assert (times(changed), memory(changed)) == (best.times, best.memory) and memory(changed).fits
    places = {type(one.job.place) for one in found.candidates}
    assert places == {Colocate, Split}


def test_meshes_and_engines_take_all_slots_and_those_that_do_not_divide_are_refused(folder: str) -> None:
    found = ranking(job_of(folder, Colocate(gpus=1)), 8)
    for one in found.candidates:
        if one.settings == {}:
            continue  # the unchanged job, on one slot
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
    found = search(job_of(folder, Colocate(gpus=1)), [2], lambda job: Times((), job.place.slots, {}, 0), None)
    assert {one.job.graph.bindings["actor"].geometry for one in found.candidates} == {Mesh(fsdp=2), Mesh()}
    assert {one.memory for one in found.candidates} == {None}


def test_settings_of_one_role_change_together(folder: str) -> None:
    job = job_of(folder, Colocate(gpus=4)).edit(bind={"actor": TorchTrainer(folder, ranks=4)})
    changed = with_changes(job, {"actor.mesh": Mesh(fsdp=2, tensor=2), "actor.ranks": 1})
    assert changed.graph.bindings["actor"] == TorchTrainer(folder, mesh=Mesh(fsdp=2, tensor=2))
    assert dataclasses.replace(changed, graph=job.graph) == job


class TestUnchangedJob:
    def test_it_has_a_rank_on_other_slots_than_the_candidates(self, folder: str) -> None:
        job = job_of(folder, Split(train=1, rollout=2)).edit(bind={"rollout": VLLM(folder, ranks=2)})
        found = ranking(job, 2)
        own = found.own
        assert isinstance(own, Candidate) and own.job == job and own.settings == {}
        assert found.rank is not None and found.candidates[found.rank - 1] == own
        assert own.seconds == times_of(job, H100, LIMITS, 200, 64).seconds
        assert {one.job.place.slots for one in found.candidates if one.settings} == {2}

    def test_it_is_ranked_once_if_its_place_is_a_candidate(self, folder: str) -> None:
        found = ranking(job_of(folder, Colocate(gpus=1)), 1)
        assert [one.settings for one in found.candidates].count({}) == 1

    def test_its_memory_and_seconds_are_known_if_it_does_not_fit(self, folder: str) -> None:
        found = ranking(job_of(folder, Colocate(gpus=1)), 1, Hardware(6, flops=989, bandwidth=3350))
        assert isinstance(found.own, Candidate) and not found.own.fits and found.rank is None
        assert found.own.seconds > 0 and found.candidates and all(one.settings for one in found.candidates)

    def test_why_it_is_refused_is_said_and_others_are_ranked(self, folder: str) -> None:
        job = job_of(folder, Colocate(gpus=1)).edit(bind={"actor": TorchTrainer(folder, dtype="bfloat16", ranks=2)})
        found = ranking(job, 2)
        assert isinstance(found.own, BindError) and found.own.code == "place.too-few-slots"
        assert found.rank is None and found.candidates

    def test_its_mesh_and_the_widths_of_its_engines_are_tried_with_others(self, folder: str) -> None:
        mesh = Mesh(replicate=2, fsdp=2)  # of one machine, so not enumerated
        actor = TorchTrainer(folder, dtype="bfloat16", mesh=mesh)
        job = job_of(folder, Colocate(gpus=4)).edit(bind={"actor": actor, "rollout": VLLM(folder, ranks=4)})
        found = ranking(job, 4).candidates
        widths = {
            one.job.graph.bindings["rollout"].tensor_parallel
            for one in found
            if one.job.graph.bindings["actor"].geometry == mesh
        }
        assert widths == {1, 2, 4}


class TestUnpredicted:
    def test_a_candidate_without_a_stage_is_after_those_whose_stages_are_known(self, folder: str) -> None:
        """It looks the fastest, since an unknown stage counts as 0."""

        def times(job: Any) -> Times:
            if isinstance(job.place, Split):
                return Times((), 1.0, {"sync": "no folder", "reward": "its own code"}, 0)
            return Times((), 10.0 / job.place.slots, {"reward": "its own code"}, 0)

        found = search(job_of(folder, Colocate(gpus=1)), [4], times, None)
        order = [(type(one.job.place), one.missing) for one in found.candidates]
        assert order[0] == (Colocate, ()) and order[-1] == (Split, ("sync",))
        assert order == sorted(order, key=lambda one: len(one[1]))
        assert found.unknown == {"reward": "its own code"}

    def test_a_stage_that_all_lack_leaves_the_order_to_the_others(self, folder: str) -> None:
        """Where layers are split, `old_log_prob` is a node of its own, without a time; elsewhere the update has it."""
        hardware = Hardware(80, flops=989, bandwidth=3350)  # and no speed in float32
        job = job_of(folder, Colocate(gpus=1)).edit(bind={"actor": TorchTrainer(folder, max_tokens=1024)})
        found = search(job, [2], *predictors(hardware))
        assert "flops_float32" in found.unknown["update_actor"]
        order = [(one.missing, one.seconds) for one in found.candidates]
        assert order == sorted(order) and {missing for missing, _ in order} == {(), ("old_log_prob",)}
        for one in found.candidates:
            assert bool(one.missing) == (one.job.graph.bindings["actor"].geometry.tensor > 1)


def test_a_backend_with_pipelines_has_stages_and_copies(folder: str) -> None:
    actor = MegatronTrainer(folder, dtype="bfloat16", mesh=Mesh(tensor=2))
    found = ranking(job_of(folder, Colocate(gpus=2)).edit(bind={"actor": actor, "rollout": VLLM(folder, ranks=2)}), 2)
    meshes = {
        one.job.graph.bindings["actor"].geometry for one in found.candidates if isinstance(one.job.place, Colocate)
    }
    assert meshes == {Mesh(tensor=2), Mesh(pipeline=2), Mesh(replicate=2)}


def test_roles_beside_one_with_stages_have_shards(folder: str) -> None:
    """Of scorers, which have no stages, and of trainers whose place alone is chosen."""
    staged = {"actor": MegatronTrainer(folder, dtype="bfloat16", mesh=Mesh(pipeline=2)), "rollout": VLLM(folder)}
    scored = grpo(digits, n=4, max_new_tokens=192).bind(
        **staged, ref=TorchScorer(folder, dtype="bfloat16", ranks=2), place=Colocate(gpus=2)
    )
    meshes = {
        tuple(one.job.graph.bindings[role].geometry for role in ("actor", "ref"))
        for one in ranking(scored, 2).candidates
        if isinstance(one.job.place, Colocate)
    }
    assert {(Mesh(pipeline=2), Mesh(fsdp=2)), (Mesh(replicate=2), Mesh(fsdp=2))} <= meshes
