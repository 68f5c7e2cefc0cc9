"""`Turns`: processes that share a slot take turns on it; others are always awake."""

from __future__ import annotations

from flowrl.protocols.mesh import Mesh
from flowrl.run.placement.place import ProcessSpec
from flowrl.run.placement.turns import Turns

ACTOR = ProcessSpec(("actor",), 0, Mesh(), (0,))
WIDE = ProcessSpec(("rollout",), 0, Mesh(), (0, 1))
REF = ProcessSpec(("ref",), 0, Mesh(), (1,))
ALONE = ProcessSpec(("critic",), 0, Mesh(), (2,))


def test_a_process_without_neighbors_never_sleeps() -> None:
    turns = Turns([ACTOR, WIDE, REF, ALONE])
    assert not turns.shared([ALONE])
    assert turns.shared([ALONE, REF])
    assert turns.needed([ALONE]) == ([], [])


def test_awake_processes_on_the_same_slots_sleep_first() -> None:
    turns = Turns([ACTOR, WIDE, REF, ALONE])
    assert turns.needed([ACTOR]) == ([], [ACTOR])
    turns.awake.update([ACTOR, REF])
    assert turns.needed([WIDE]) == ([ACTOR, REF], [WIDE])
    assert turns.needed([WIDE], keep_awake=[ACTOR]) == ([REF], [WIDE])
    assert turns.needed([ACTOR]) == ([], [])  # already awake
    assert turns.awake_on([REF]) == []  # a process does not conflict with itself
