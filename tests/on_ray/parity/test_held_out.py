"""On Ray: validations with a separate engine, frozen engines, and two updates of a role, as in one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flowrl import PromptData, Validation
from flowrl.backends import TorchRollout
from flowrl.distributed.place import Colocate, Split
from flowrl.graph import Graph
from flowrl.graphs import grpo
from tests.support.jobs import bind_tiny
from tests.support.other_policies import judged, twice
from tests.support.rewards import digits
from tests.support.runs import lines, train, without_times

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]


def bound(graph: Graph, folder: str, place: Any) -> Any:
    """A job whose rollout engine is in another process than the trainer."""
    rollout, judge = TorchRollout(folder, device="cpu"), TorchRollout(folder, device="cpu", frozen=True)
    return replace(bind_tiny(graph, folder, rollout=rollout, judge=judge), place=place)


def close(local: list[dict[str, Any]], remote: list[dict[str, Any]]) -> bool:
    """The same numbers up to rounding, without the transport of weights."""
    compared = [{k: v for k, v in line.items() if not k.startswith("sync/by/")} for line in local]
    return len(compared) == len(remote) and all(
        one[key] == pytest.approx(other[key], rel=1e-4, abs=1e-5)
        for one, other in zip(compared, remote, strict=True)
        for key in one
    )


def test_a_validation_with_its_own_engine_has_the_numbers_of_one_process(
    tiny: str, prompts_file: str, tmp_path: Path
) -> None:
    own = TorchRollout(tiny, device="cpu", max_rows=5)
    validation = Validation(PromptData(prompts_file), every=2, name="own", bind={"rollout": own})
    settings = {"steps": 2, "validation": validation}
    graph = grpo(digits, n=2, max_new_tokens=6)
    local = train(bound(graph, tiny, None), prompts_file, tmp_path / "local", **settings)
    remote = train(bound(graph, tiny, Split(train=1, rollout=2)), prompts_file, tmp_path / "remote", **settings)
    assert close(without_times(list(local.metrics)), without_times(list(remote.metrics)))
    assert close(list(local.validations), list(remote.validations))
    first, second = (lines(tmp_path / run / "predictions.jsonl") for run in ("local", "remote"))
    assert [record["response"] for record in first] == [record["response"] for record in second]


@pytest.mark.parametrize("graph", [judged(), twice()], ids=["judged", "twice"])
def test_a_judge_and_two_updates_have_the_numbers_of_one_process(
    graph: Graph, tiny: str, prompts_file: str, tmp_path: Path
) -> None:
    local = train(bound(graph, tiny, None), prompts_file, tmp_path / "local", steps=2)
    remote = train(bound(graph, tiny, Colocate(gpus=1)), prompts_file, tmp_path / "remote", steps=2)
    assert close(without_times(list(local.metrics)), without_times(list(remote.metrics)))
