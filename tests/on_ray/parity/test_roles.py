"""Reward models, judges and teachers on Ray: several ranks give the numbers of one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flowrl import After
from flowrl.backends import TorchRewardModel, TorchRollout, TorchScorer
from flowrl.distributed.place import Colocate
from flowrl.graph import Graph
from flowrl.graphs import distill_full, distill_top, grpo
from flowrl.operators import Judge, ModelReward, TextModelReward, WeighRewards
from tests.backends.torch.score.test_reward_model import reward_folder
from tests.on_ray.parity.test_held_out import close
from tests.support.jobs import bind_tiny
from tests.support.models import tiny_folder
from tests.support.rewards import digits
from tests.support.runs import train, without_times

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600), pytest.mark.usefixtures("cluster")]


def length(text: str) -> float:
    """The length of the judge's response."""
    return float(len(text))


JUDGE = Judge(template="{prompt}: {response}", parse=length, max_new_tokens=4, log="reward/judge")


def with_reward_models() -> Graph:
    """The same responses scored by tokens, by text and by a judge, with one node each."""
    others = {"by_text": TextModelReward(log="reward/text"), "judge": JUDGE}
    return grpo(digits, n=2, max_new_tokens=6, kl_coef=0.0).edit(
        replace={"reward": ModelReward(log="reward/tokens").named("by_tokens")},
        insert={name: After("generate", operator) for name, operator in others.items()}
        | {"weigh": After("reward", WeighRewards({"tokens": 1.0, "text": 0.5, "judge": 0.1}))},
        wire={
            "weigh.tokens": "by_tokens.token_level_scores",
            "weigh.text": "by_text.token_level_scores",
            "weigh.judge": "judge.token_level_scores",
        },
    )


DISTILLED: dict[str, Any] = {"beta": 0.5, "n": 2, "max_new_tokens": 6, "mini_batch": 4}
GRAPHS = {
    "rewards": with_reward_models(),
    "distill_full": distill_full(**DISTILLED),
    "distill_top": distill_top(k=8, **DISTILLED),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_two_ranks_have_the_numbers_of_one_process(name: str, tiny: str, prompts_file: str, tmp_path: Path) -> None:
    graph: Graph = GRAPHS[name]
    reward_model, teacher = reward_folder(tmp_path), tiny_folder(tmp_path, seed=9)

    def bound(ranks: int, place: Any) -> Any:
        job = bind_tiny(
            graph,
            tiny,
            trainer={"ranks": ranks, "logprob_chunk": 5},
            rollout=TorchRollout(tiny, device="cpu"),
            reward_model=TorchRewardModel(model=reward_model, device="cpu", ranks=ranks),
            teacher=TorchScorer(teacher, device="cpu", ranks=ranks),
            judge=TorchRollout(teacher, device="cpu", ranks=ranks, frozen=True),
        )
        return replace(job, place=place)

    local = train(bound(1, None), prompts_file, tmp_path / "local", steps=2, prompts=4)
    remote = train(bound(2, Colocate(gpus=2)), prompts_file, tmp_path / "remote", steps=2, prompts=4)
    assert close(without_times(list(local.metrics)), without_times(list(remote.metrics)))
