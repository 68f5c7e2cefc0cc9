"""On Ray, the error of an operator that writes into a column names it as in one process, though readers have copies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flowrl import Operator
from flowrl import columns as c
from flowrl.core.graphs.after import After
from flowrl.distributed.place import Colocate
from flowrl.errors import InPlaceError, NodeError
from flowrl.graphs import grpo
from tests.on_ray.process_leaks import leaves_nothing, process_ids
from tests.on_ray.toys import toy_job
from tests.support.jobs import prompt_batch, proto
from tests.support.rewards import digits

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]


class WritesScores(Operator):
    """Writes into the scores, which come from the object store."""

    def __call__(self, token_level_scores: c.TokenLevelScores) -> c.TokenLevelScores:
        token_level_scores.mul_(2)
        return token_level_scores + 1


class WritesObjects(Operator):
    """Writes into an array of objects."""

    def __call__(self, uid: c.Uid, token_level_scores: c.TokenLevelScores) -> c.TokenLevelScores:
        uid[0] = "another"
        return token_level_scores


@pytest.mark.parametrize(
    ("operator", "text", "cause"),
    [
        (WritesScores(), "token_level_scores", InPlaceError),
        (WritesObjects(), "assignment destination is read-only", ValueError),
    ],
)
def test_an_error_names_the_operator_and_column_of_an_in_place_write(
    operator: Operator, text: str, cause: type, tiny: str, tmp_path: Path
) -> None:
    graph: Any = grpo(digits, n=2, max_new_tokens=4).edit(insert={"writer": After("reward", operator.named("writer"))})
    with leaves_nothing() as processes, toy_job(graph, tmp_path, tiny, place=Colocate(1)).open(seed=3) as executor:
        processes += process_ids(executor).values()
        executor.sync()
        with pytest.raises(NodeError, match=rf"writer failed in step \d on .*: {cause.__name__}: .*{text}") as caught:
            executor.step(proto(prompt_batch([[11, 12], [13]])), 0)
        assert caught.value.facts["node"] == "writer"
        assert isinstance(caught.value.__cause__, cause)
