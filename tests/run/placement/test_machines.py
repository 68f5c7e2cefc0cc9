"""Tests of `flowrl/run/placement/place.py` and `flowrl/distributed/cluster/slots.py`: which slots share a machine."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.distributed.cluster.slots import by_machine, refuse_split_processes
from flowrl.distributed.place import Colocate, Split
from flowrl.graphs import ppo
from flowrl.protocols.mesh import Mesh
from flowrl.run.placement.place import Place, ProcessSpec, lay_out
from tests.run.placement.test_place import Critic, Meshed, Rollout, Trainer, bound, slots, spans
from tests.support.errors import raises
from tests.support.kernel import exact


class TestPerMachine:
    """Places that know how many slots a machine has."""

    def test_machines_have_consecutive_slots(self) -> None:
        place = Split(train=40, rollout=24, per_machine=8)
        assert place.machines == [range(first, first + 8) for first in range(0, 64, 8)]
        assert Colocate(5, per_machine=2).machines == [range(2), range(2, 4), range(4, 5)]
        assert Colocate(5).machines == [range(5)]

    def test_engines_lie_on_one_machine_each_and_spread_over_all(self) -> None:
        graph = bound(actor=Meshed(mesh=Mesh(fsdp=5, tensor=2)), rollout=Rollout(ranks=4, slots_per_rank=2))
        found = spans(lay_out(graph, Split(train=10, rollout=9, per_machine=4)))
        assert [found[f"actor[{rank}]"] for rank in range(10)] == [(slot,) for slot in range(10)]
        # Machine 2 has the slots 8 to 11, of which 10 and 11 are the rollout's.
        assert [found[f"rollout[{rank}]"] for rank in range(4)] == [(10, 11), (12, 13), (14, 15), (16, 17)]

    def test_ranks_that_share_experts_share_a_machine_if_they_fit(self) -> None:
        odd = Split(train=6, rollout=1, per_machine=3)
        fits = bound(actor=Meshed(mesh=Mesh(fsdp=4, expert=2)))
        assert slots([host for host in lay_out(fits, odd) if host.roles == ("actor",)]) == {
            "actor[0]": 0, "actor[1]": 1, "actor[2]": 3, "actor[3]": 4,
        }  # fmt: skip
        wide = bound(actor=Meshed(mesh=Mesh(fsdp=4, expert=4)))
        assert sorted(slots([host for host in lay_out(wide, odd) if host.roles == ("actor",)]).values()) == [0, 1, 2, 3]

    @pytest.mark.parametrize(
        ("axes", "engine", "place", "facts", "fix"),
        [
            ({"tensor": 4}, 1, Split(4, 2, per_machine=2), ("actor", 4, 1, 0), {"tensor": 2, "fsdp": 2}),
            ({"fsdp": 4, "context": 4}, 1, Split(4, 2, per_machine=3), ("actor", 4, 1, 0), {"fsdp": 4}),
            ({"fsdp": 2, "tensor": 2}, 1, Split(4, 2, per_machine=3), ("actor", 2, 2, 1), {"fsdp": 4}),
            ({}, 4, Split(1, 6, per_machine=4), ("rollout", 4, 1, 0), {}),
        ],
    )
    def test_a_geometry_that_spans_machines_is_refused(
        self, axes: Any, engine: int, place: Place, facts: Any, fix: Any
    ) -> None:
        graph = bound(actor=Meshed(mesh=Mesh(**axes)), rollout=Rollout(ranks=1, slots_per_rank=engine))
        role, width, expected, found = facts
        with raises("place.several-machines", role=role, slots=width, expected=expected, found=found):
            lay_out(graph, place)
        lay_out(bound(actor=Meshed(mesh=Mesh(**fix)), rollout=Rollout(ranks=1)), place)  # a smaller axis
        lay_out(graph, Split(expected * width, expected * width, per_machine=width))  # a multiple of these slots

    @given(
        st.integers(1, 8),
        st.integers(1, 24),
        st.sampled_from([1, 2, 3]),
        st.sampled_from([1, 2, 4]),
        st.sampled_from([1, 2]),
        st.integers(1, 3),
    )
    def test_groups_share_a_machine_whatever_the_sizes(
        self, per_machine: int, gpus: int, replicate: int, tensor: int, context: int, each: int
    ) -> None:
        """A layout keeps every group on one machine and every rank on slots of its own; what is refused has no room."""
        mesh, place = (
            Mesh(replicate=replicate, fsdp=context, tensor=tensor, context=context),
            Colocate(gpus, per_machine=per_machine),
        )
        width = tensor * context * each
        room = sum(len(machine) // width for machine in place.machines)
        graph = bound(actor=Meshed(mesh=mesh, slots_per_rank=each))
        if room < replicate:
            code = "place.too-few-slots" if mesh.ranks * each > gpus else "place.several-machines"
            with raises(code, role="actor"):
                lay_out(graph, place)
            return
        own = [host for host in lay_out(graph, place) if host.roles == ("actor",)]
        taken = [slot for host in own for slot in host.slots]
        assert taken == sorted(set(taken)) and len(taken) == mesh.ranks * each
        for axis in ("tensor", "context"):
            for group in mesh.together(axis):
                assert len({slot // per_machine for rank in group for slot in own[rank].slots}) == 1

    def test_the_plan_shows_the_machines(self) -> None:
        job = ppo(exact).bind(
            actor=Trainer(ranks=2), ref=Trainer(), critic=Critic(), rollout=Rollout(), place=Split(2, 1, per_machine=2)
        )
        lines = job.plan().splitlines()
        assert lines[lines.index("processes of Split; those of one slot take turns:") + 1 :][:3] == [
            "  machine 0, slot 0: actor[0], ref[0]",
            "  machine 0, slot 1: actor[1], critic[0]",
            "  machine 1, slot 2: rollout[0]",
        ]


class TestMachines:
    """The bundles of a placement group that the slots use."""

    def test_slots_are_ordered_by_machine(self) -> None:
        assert by_machine(["a", "a", "a"]) == [0, 1, 2]
        assert by_machine(["b", "a", "b", "a", "c", "b"]) == [0, 2, 5, 1, 3, 4]

    def test_a_process_over_several_machines_is_refused(self) -> None:
        hosts = lay_out(bound(rollout=Rollout(ranks=2, slots_per_rank=2)), Colocate(4))
        refuse_split_processes(hosts, ["a", "a", "b", "b"], Colocate(4), "c")
        with raises("cluster.several-machines", process="rollout[1]", slots=(2, 3), machines=2):
            refuse_split_processes(hosts, ["a", "a", "a", "b"], Colocate(4), "a")

    def test_processes_that_share_layers_or_rows_are_on_one_machine(self) -> None:
        for axis, mesh in (("tensor", Mesh(fsdp=2, tensor=2)), ("context", Mesh(fsdp=4, context=2))):
            hosts = [ProcessSpec(("actor",), rank, mesh, (rank,)) for rank in range(4)]
            refuse_split_processes(hosts, ["a", "a", "b", "b"], Colocate(4), "a")
            with raises("mesh.several-machines", axis=axis, role="actor", ranks=(2, 3), slots=(2, 3), machines=2):
                refuse_split_processes(hosts, ["a", "a", "a", "b"], Colocate(4), "a")

    def test_restart_role_over_several_machines_is_refused(self) -> None:
        place = Colocate(2, restart="role")
        hosts = lay_out(bound(), place)
        refuse_split_processes(hosts, ["a", "a"], place, "a")
        refuse_split_processes(hosts, ["a", "b"], Colocate(2), "a")
        for machines, here in ((["a", "b"], "a"), (["a", "a"], "b")):
            with raises("cluster.several-machines", slots=2, machines=2):
                refuse_split_processes(hosts, machines, place, here)
