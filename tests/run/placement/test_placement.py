"""Engines that a node asks: which processes stay awake together, and which are refused."""

from __future__ import annotations

from typing import Any

from flowrl import PromptBatch, Role, algorithm
from flowrl.core.graphs.plan import Plan
from flowrl.distributed.place import Colocate
from flowrl.operators import Interact
from flowrl.protocols import protocols
from flowrl.run.placement.place import lay_out
from flowrl.run.placement.placement import refuse_unplaceable
from tests.run.placement.test_place import Rollout
from tests.support.errors import raises


class Together(Rollout):
    """Ranks that compute each response together."""

    serves = (protocols.Rollout, protocols.StreamingRollout, protocols.Checkpointed)

    frozen: bool = True


class Apart(Together):
    @property
    def collective(self) -> bool:
        return False


async def asks(chat: Any, row: Any) -> float:
    return float(len((await chat.ask("user", (await chat.answer()).text)).text))


@algorithm
def asking(batch: PromptBatch) -> Any:
    return Interact(asks, others={"user": Role("user")})(batch)


class TestEnginesThatAreAsked:
    def test_engines_of_one_slot_stay_awake_together_as_the_plan_says(self) -> None:
        job = asking().bind(rollout=Apart(memory=30.0), user=Apart(memory=20.0), place=Colocate(memory=50.0))
        assert "  interact keeps rollout[0] and user[0] awake together on slot 0" in job.plan().splitlines()
        apart = asking().bind(rollout=Apart(), user=Apart(), place=Colocate(2))
        assert "awake together" not in apart.plan()

    def test_engines_that_do_not_fit_together_are_refused(self) -> None:
        job = asking().bind(rollout=Apart(memory=30.0), user=Apart(memory=20.0), place=Colocate(memory=40.0))
        with raises("place.too-large-together", node="interact", slot=0, expected=40, found=50):
            job.refuse_unready()

    def test_ranks_that_compute_together_are_not_asked(self) -> None:
        graph = asking().bind(rollout=Apart(), user=Together(ranks=2)).graph
        with raises("place.ranks", node="interact", role="user", ranks=2):
            refuse_unplaceable(Plan(graph), lay_out(graph, Colocate(3)))
        several = asking().bind(rollout=Apart(ranks=2), user=Apart(ranks=2)).graph
        refuse_unplaceable(Plan(several), lay_out(several, Colocate(2)))
