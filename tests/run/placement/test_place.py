"""Places: the slots of ranks, and refusals before a model loads."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.backends import Backend, TorchRollout, TorchScorer, TorchTrainer
from flowrl.backends.sglang.engine import SGLang
from flowrl.backends.vllm.engine import VLLM
from flowrl.distributed.place import Colocate, Split
from flowrl.errors import ParameterError
from flowrl.graph import Graph
from flowrl.graphs import grpo, ppo
from flowrl.protocols import protocols
from flowrl.protocols.mesh import Mesh
from flowrl.run.placement.place import Place, ProcessSpec, lay_out
from tests.support.errors import raises
from tests.support.kernel import CriticEngine, RolloutEngine, TrainerEngine, exact


class Trainer(Backend):
    """Backends that declare ranks and slots, and must not be built."""

    serves = (protocols.Trainer, protocols.Checkpointed)

    ranks: int = 1
    slots_per_rank: int = 1
    memory: float | None = None
    shares: str | None = None

    def build(self, context: Any) -> TrainerEngine:
        raise AssertionError("built")


class Meshed(Trainer):
    """A trainer on a mesh of any axes."""

    mesh: Mesh = Mesh()

    @property
    def geometry(self) -> Mesh:
        return self.mesh


class Critic(Trainer):
    serves = (protocols.Critic, protocols.Checkpointed)

    def build(self, context: Any) -> CriticEngine:
        raise AssertionError("built")


class Rollout(Trainer):
    serves = (protocols.Rollout,)

    def build(self, context: Any) -> RolloutEngine:
        raise AssertionError("built")


class Undeclared(Backend):
    """Declares no ranks, memory or sharing."""

    serves = (protocols.Rollout,)

    def build(self, context: Any) -> RolloutEngine:
        raise AssertionError("built")


def bound(**backends: Any) -> Graph:
    return (
        ppo(exact)
        .bind(**{"actor": Trainer(), "ref": Trainer(), "critic": Critic(), "rollout": Rollout(), **backends})
        .graph
    )


def slots(hosts: list[ProcessSpec]) -> dict[str, int]:
    """The slots of processes with one slot each."""
    assert all(len(host.slots) == 1 for host in hosts)
    return {host.name: host.slots[0] for host in hosts}


def spans(hosts: list[ProcessSpec]) -> dict[str, tuple[int, ...]]:
    return {host.name: host.slots for host in hosts}


class TestSpecs:
    def test_sizes_are_positional(self) -> None:
        assert Colocate(2) == Colocate(gpus=2)
        assert Split(1, 3) == Split(train=1, rollout=3)
        assert (Colocate(2).slots, Split(1, 3).slots) == (2, 4)

    def test_common_parameters_are_keyword_only(self) -> None:
        place = Colocate(2, address="ray://head:10001", memory=80, deadline=60, restart="role")
        assert (place.address, place.memory, place.deadline, place.restart) == ("ray://head:10001", 80.0, 60.0, "role")
        for cls, sizes in ((Colocate, (1,)), (Split, (1, 1))):
            with pytest.raises(ParameterError, match="one argument too many"):
                cls(*sizes, "ray://head:10001")

    @pytest.mark.parametrize(
        "given",
        [
            {"gpus": 0},
            {"gpus": -1},
            {"gpus": 10**9},
            {"memory": 0},
            {"deadline": 0},
            {"per_machine": 0},
            {"restart": "always"},
            {"gpu": 1},
            {"gpus": 1.5},
        ],
    )
    def test_invalid_colocate_values_are_refused(self, given: dict[str, Any]) -> None:
        with pytest.raises(ParameterError, match=next(iter(given))):
            Colocate(**given)

    @pytest.mark.parametrize("given", [{"train": 0}, {"rollout": 0}, {"rollout": 10**9}, {"gpus": 2}])
    def test_invalid_split_values_are_refused(self, given: dict[str, Any]) -> None:
        with pytest.raises(ParameterError, match=next(iter(given))):
            Split(**given)


class TestColocate:
    def test_one_slot_has_all_roles(self) -> None:
        hosts = lay_out(bound(), Colocate())
        assert slots(hosts) == {"actor[0]": 0, "ref[0]": 0, "critic[0]": 0, "rollout[0]": 0}

    def test_single_rank_roles_spread_over_slots(self) -> None:
        assert sorted(slots(lay_out(bound(), Colocate(4))).values()) == [0, 1, 2, 3]
        assert Counter(slots(lay_out(bound(), Colocate(2))).values()) == {0: 2, 1: 2}

    def test_each_rank_of_a_role_has_its_own_slot(self) -> None:
        hosts = lay_out(bound(actor=Trainer(ranks=2), rollout=Rollout(ranks=2)), Colocate(2))
        assert slots(hosts) == {
            "actor[0]": 0, "actor[1]": 1, "ref[0]": 0, "critic[0]": 1, "rollout[0]": 0, "rollout[1]": 1,
        }  # fmt: skip
        assert [(h.rank, h.mesh.ranks) for h in hosts if "actor" in h.roles] == [(0, 2), (1, 2)]

    def test_the_least_loaded_slots_are_filled_first(self) -> None:
        hosts = lay_out(bound(ref=Trainer(ranks=2), critic=Critic(ranks=2)), Colocate(3))
        assert slots(hosts) == {
            "actor[0]": 0, "ref[0]": 1, "ref[1]": 2, "critic[0]": 0, "critic[1]": 1, "rollout[0]": 2,
        }  # fmt: skip

    def test_only_roles_of_the_graph_are_placed(self) -> None:
        graph = grpo(exact).bind(actor=Trainer(), ref=Trainer(), rollout=Undeclared()).graph
        assert [host.roles for host in lay_out(graph, Colocate(2))] == [("actor",), ("ref",), ("rollout",)]

    def test_more_ranks_than_slots_are_refused(self) -> None:
        with raises("place.too-few-slots", role="critic", place="Colocate(gpus=2)", ranks=3, found=2):
            lay_out(bound(critic=Critic(ranks=3)), Colocate(2))

    @given(st.lists(st.integers(1, 4), min_size=4, max_size=4), st.integers(4, 6))
    def test_slot_loads_differ_by_at_most_one(self, ranks: list[int], gpus: int) -> None:
        a, b, c, d = ranks
        hosts = lay_out(
            bound(actor=Trainer(ranks=a), ref=Trainer(ranks=b), critic=Critic(ranks=c), rollout=Rollout(ranks=d)),
            Colocate(gpus),
        )
        assert len(hosts) == len(set(hosts)) == sum(ranks)
        for roles in {host.roles for host in hosts}:
            hosts_of_role = [host for host in hosts if host.roles == roles]
            assert [host.rank for host in hosts_of_role] == list(range(hosts_of_role[0].mesh.ranks))
            assert len({host.slots for host in hosts_of_role}) == len(hosts_of_role)
        load = Counter({slot: 0 for slot in range(gpus)})
        load.update(slot for host in hosts for slot in host.slots)
        assert max(load.values()) - min(load.values()) <= 1


class TestSplit:
    def test_generation_has_its_own_slots(self) -> None:
        hosts = lay_out(bound(), Split(1, 1))
        assert slots(hosts) == {"actor[0]": 0, "ref[0]": 0, "critic[0]": 0, "rollout[0]": 1}

    def test_several_ranks_on_each_side(self) -> None:
        hosts = lay_out(bound(actor=Trainer(ranks=2), rollout=Rollout(ranks=2)), Split(train=2, rollout=2))
        assert slots(hosts) == {
            "actor[0]": 0, "actor[1]": 1, "ref[0]": 0, "critic[0]": 1, "rollout[0]": 2, "rollout[1]": 3,
        }  # fmt: skip

    def test_each_side_has_its_own_slots(self) -> None:
        with raises("place.too-few-slots", role="actor", place="Split(rollout=4)", ranks=2, found=1):
            lay_out(bound(actor=Trainer(ranks=2)), Split(1, 4))
        with raises("place.too-few-slots", role="rollout", place="Split(train=4)", ranks=2, found=1):
            lay_out(bound(rollout=Rollout(ranks=2)), Split(4, 1))


class TestSharing:
    def test_roles_that_share_weights_have_one_process(self) -> None:
        hosts = lay_out(bound(rollout=Rollout(shares="actor")), Colocate(2))
        assert slots(hosts) == {"actor+rollout[0]": 0, "ref[0]": 1, "critic[0]": 0}

    def test_the_owner_comes_first_and_has_the_ranks(self) -> None:
        graph = bound(ref=Trainer(shares="critic"), critic=Critic(ranks=2))
        assert graph.bindings.keys() == {"actor", "ref", "critic", "rollout"}
        hosts = [host for host in lay_out(graph, Colocate(2)) if "ref" in host.roles]
        assert [host.name for host in hosts] == ["critic+ref[0]", "critic+ref[1]"]

    def test_sharing_is_transitive(self) -> None:
        hosts = lay_out(bound(ref=Trainer(shares="actor"), rollout=Rollout(shares="ref")), Colocate())
        assert [host.roles for host in hosts] == [("actor", "ref", "rollout"), ("critic",)]

    def test_a_rollout_that_shares_the_trainers_weights_uses_the_training_slots(self) -> None:
        hosts = lay_out(bound(rollout=Rollout(shares="actor")), Split(1, 1))
        assert {host.slots for host in hosts} == {(0,)}

    @pytest.mark.parametrize(
        ("rollout", "code", "facts"),
        [
            (Rollout(shares="policy"), "job.shared-weights", {"role": "rollout", "owner": "policy"}),
            (Rollout(shares="rollout"), "job.shared-weights", {"cycle": ("rollout", "rollout")}),
            (
                Rollout(shares="actor", ranks=3),
                "place.ranks",
                {"role": "rollout", "owner": "actor", "found": 3, "expected": 1},
            ),
        ],
    )
    def test_invalid_sharing_is_refused(self, rollout: Rollout, code: str, facts: dict[str, Any]) -> None:
        with raises(code, **facts):
            lay_out(bound(rollout=rollout), Colocate(4))

    def test_a_sharing_cycle_is_refused(self) -> None:
        graph = bound(actor=Trainer(shares="ref"), ref=Trainer(shares="actor"))
        with raises("job.shared-weights", cycle=("actor", "ref", "actor")):
            lay_out(graph, Colocate())


class TestSeveralSlotsPerRank:
    """As for tensor-parallel engines."""

    def test_layout_of_four_trainer_ranks_and_a_two_slot_engine(self) -> None:
        graph = grpo(exact).bind(actor=Trainer(ranks=4), ref=Trainer(), rollout=Rollout(slots_per_rank=2)).graph
        assert spans(lay_out(graph, Colocate(4))) == {
            "actor[0]": (0,), "actor[1]": (1,), "actor[2]": (2,), "actor[3]": (3,),
            "ref[0]": (0,), "rollout[0]": (2, 3),
        }  # fmt: skip

    def test_ranks_with_several_slots(self) -> None:
        hosts = lay_out(bound(rollout=Rollout(ranks=2, slots_per_rank=2)), Split(3, 5))
        assert [host.slots for host in hosts if "rollout" in host.roles] == [(3, 4), (5, 6)]
        assert [(host.rank, host.mesh.ranks) for host in hosts if "rollout" in host.roles] == [(0, 2), (1, 2)]

    def test_a_shared_process_has_the_slots_of_the_widest_role(self) -> None:
        hosts = lay_out(bound(rollout=Rollout(shares="actor", slots_per_rank=2)), Colocate(2))
        assert spans(hosts)["actor+rollout[0]"] == (0, 1)

    @pytest.mark.parametrize(("ranks", "each", "gpus"), [(1, 2, 1), (2, 2, 3), (1, 3, 2)])
    def test_more_slots_than_available_are_refused(self, ranks: int, each: int, gpus: int) -> None:
        with raises("place.too-few-slots", role="rollout", ranks=ranks, slots_per_rank=each, found=gpus):
            lay_out(bound(rollout=Rollout(ranks=ranks, slots_per_rank=each)), Colocate(gpus))

    @given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(9, 11))
    def test_ranks_of_a_role_do_not_share_slots(self, ranks: int, each: int, others: int, gpus: int) -> None:
        hosts = lay_out(
            bound(actor=Trainer(ranks=others), rollout=Rollout(ranks=ranks, slots_per_rank=each)), Colocate(gpus)
        )
        hosts_of_role = [host for host in hosts if host.roles == ("rollout",)]
        slots_of_role = [slot for host in hosts_of_role for slot in host.slots]
        assert len(slots_of_role) == len(set(slots_of_role)) == ranks * each
        assert set(slots_of_role) <= set(range(gpus))
        assert all(host.slots == tuple(range(host.slots[0], host.slots[0] + each)) for host in hosts_of_role)

    def test_meets_is_true_for_processes_on_a_common_slot(self) -> None:
        hosts = {host.name: host for host in lay_out(bound(rollout=Rollout(slots_per_rank=2)), Colocate(3))}
        assert spans(list(hosts.values())) == {
            "actor[0]": (0,), "ref[0]": (1,), "critic[0]": (2,), "rollout[0]": (0, 1),
        }  # fmt: skip
        rollout = hosts["rollout[0]"]
        assert [name for name, host in hosts.items() if host.shares_slots_with(rollout)] == ["actor[0]", "ref[0]"]
        assert [name for name, host in hosts.items() if rollout.shares_slots_with(host)] == ["actor[0]", "ref[0]"]

    def test_memory_is_counted_per_slot(self) -> None:
        graph = bound(rollout=Rollout(slots_per_rank=2, memory=40))
        lay_out(graph, Colocate(2, memory=40))
        with raises("place.too-large", slot=0, process="rollout[0]", expected=30, found=40):
            lay_out(graph, Colocate(2, memory=30))

    def test_ranks_that_compute_a_layer_together_have_adjacent_slots(self) -> None:
        graph = bound(actor=Meshed(mesh=Mesh(fsdp=3)), ref=Meshed(mesh=Mesh(tensor=2)))
        assert slots([host for host in lay_out(graph, Colocate(4)) if host.roles == ("ref",)]) == {
            "ref[0]": 2,
            "ref[1]": 3,
        }

    def test_the_plan_shows_the_slots_of_each_process(self) -> None:
        job = ppo(exact).bind(
            actor=Trainer(), ref=Trainer(), critic=Critic(), rollout=Rollout(slots_per_rank=2), place=Split(1, 3)
        )
        lines = job.plan().splitlines()
        assert lines[lines.index("processes of Split; those of one slot take turns:") + 1 :] == [
            "  slot 0: actor[0], ref[0], critic[0]",
            "  slot 1: rollout[0]",
            "  slot 2: rollout[0]",
            "  slot 3: free",
            "  rollout[0] is one process over the slots 1, 2",
            "  no slot: general",
        ]


class TestMemory:
    graph = bound(actor=Trainer(memory=60), ref=Trainer(memory=20), rollout=Rollout(memory=40))

    def test_processes_that_take_turns_need_not_fit_in_memory_together(self) -> None:
        assert len(lay_out(self.graph, Colocate(memory=60))) == 4

    def test_a_process_larger_than_its_slot_is_refused(self) -> None:
        with raises("place.too-large", slot=0, process="actor[0]", expected=50, found=60) as raised:
            lay_out(self.graph, Colocate(memory=50))
        assert "actor[0] 60, ref[0] 20, rollout[0] 40 GiB" in raised.value.message
        assert "critic" not in raised.value.message  # declares no size

    def test_roles_that_share_weights_are_loaded_together(self) -> None:
        graph = bound(actor=Trainer(memory=60), rollout=Rollout(memory=30, shares="actor"))
        lay_out(graph, Colocate(memory=90))
        with raises("place.too-large", process="actor+rollout[0]", found=90):
            lay_out(graph, Colocate(memory=80))

    def test_the_overfull_slot_is_named(self) -> None:
        with raises("place.too-large", slot=1, process="rollout[0]", found=40):
            lay_out(bound(rollout=Rollout(memory=40)), Split(1, 1, memory=30))

    def test_memory_is_unchecked_without_a_limit(self) -> None:
        place: Place = Colocate()
        assert len(lay_out(bound(actor=Trainer(memory=1e6)), place)) == 4


def test_the_memory_that_torch_backends_declare_must_fit_the_place() -> None:
    graph = grpo("flowrl.demo.verifier:compute_score").bound(
        {
            "actor": TorchTrainer("model", memory=30.0),
            "ref": TorchScorer("model", memory=10.0),
            "rollout": TorchRollout("model", memory=20.0),
        }
    )
    lay_out(graph, Colocate(1, memory=40.0))
    with raises("place.too-large", slot=0, expected=24):
        lay_out(graph, Colocate(1, memory=24.0))


class TestEngines:
    """The slots that rollout backends declare."""

    @pytest.mark.parametrize("engine", [VLLM, SGLang])
    def test_each_rank_has_its_own_devices(self, engine: Any) -> None:
        rollout = engine("model", tensor_parallel=2, ranks=2)
        trainer = TorchTrainer("model", ranks=4)
        job = grpo(exact).bind(actor=trainer, ref=TorchScorer("model"), rollout=rollout, place=Colocate(4))
        job.refuse_unready()
        hosts = [host for host in lay_out(job.graph, Colocate(4)) if host.roles == ("rollout",)]
        assert [(host.name, host.slots) for host in hosts] == [("rollout[0]", (0, 1)), ("rollout[1]", (2, 3))]

    @pytest.mark.parametrize("engine", [VLLM, SGLang])
    def test_one_rank_needs_no_place(self, engine: Any) -> None:
        job = grpo(exact).bind(
            actor=TorchTrainer("model"), ref=TorchScorer("model"), rollout=engine("model", tensor_parallel=2)
        )
        job.refuse_unready()
        with raises("job.no-place", role="rollout", ranks=2):
            job.edit(bind={"rollout": engine("model", tensor_parallel=3, ranks=2)}).refuse_unready()

    def test_only_the_sharded_trainer_needs_a_process_group(self) -> None:
        """vLLM and SGLang start their own groups, with which a default group would conflict."""
        for backend in (VLLM("model", ranks=2), SGLang("model", ranks=2), TorchRollout("model", ranks=2)):
            assert not backend.collective
        assert TorchTrainer("model", ranks=2).collective


@pytest.mark.parametrize(
    "wrong",
    [
        {"gpus": True},
        {"gpus": 0},
        {"gpus": -1},
        {"gpus": 1.0},
        {"gpus": math.nan},
        {"gpus": "2"},
        {"memory": math.nan},
        {"memory": math.inf},
        {"memory": True},
        {"memory": -1.0},
        {"deadline": math.nan},
        {"deadline": math.inf},
        {"deadline": True},
        {"deadline": 0},
        {"deadline": "10"},
        {"restart": True},
    ],
)
def test_non_integer_place_sizes_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ParameterError, match=next(iter(wrong))):
        Colocate(**wrong)
    with pytest.raises(ParameterError):
        Split(**{"train" if name == "gpus" else name: value for name, value in wrong.items()})


@pytest.mark.parametrize("wrong", ["gpu", 2, False, Colocate])
def test_objects_that_are_not_places_are_refused(wrong: Any) -> None:
    with raises("job.no-place", found=wrong if isinstance(wrong, str | int) else str(wrong)):
        grpo(exact).bind(place=wrong)
