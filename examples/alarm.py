"""Incident prediction: the policy sees metrics window by window, and waits or raises the alarm after each.

Early alarms score higher than late ones; false alarms and missed incidents cost.

flowrl show examples/alarm.py:graph       show the graph
flowrl run examples/alarm.py:training     train, as `python examples/alarm.py` does
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for the module in this folder
from alarm_environment import FALSE_ALARM, HORIZON, WINDOWS, build, worth, write_data

from flowrl import INJECTED, After, Metrics, PromptData, Terminal, Training, Validation, operator
from flowrl.backends import AdamW, TorchRollout, TorchTrainer
from flowrl.columns import GroundTruth, TokenLevelScores
from flowrl.episodes import Answer, Environment, Reply, Row
from flowrl.graphs import grpo
from flowrl.operators import Interact

MODEL = Path(os.environ.get("MODEL", "runs/alarm/model"))
DATA = Path("runs/alarm/data")
STEPS = int(os.environ.get("STEPS", "30"))
SEED = int(os.environ.get("SEED", "0"))


class Watch(Environment):
    """Replies with the next window until the policy raises the alarm, an incident strikes, or the stream ends."""

    async def reset(self, row: Row) -> Reply:
        self.windows, self.incident = row.extra_info["windows"], row.ground_truth["incident"]
        return Reply(row.messages)

    async def step(self, answer: Answer) -> Reply:
        window = answer.turn + 1
        if answer.text == "alarm":
            return Reply(reward=worth(self.incident, window), done=True)
        if window == len(self.windows):
            return Reply(reward=worth(self.incident, None), done=True)
        return Reply(self.windows[window])


@operator
def alarms(
    token_level_scores: TokenLevelScores, ground_truth: GroundTruth, metrics: Metrics = INJECTED
) -> TokenLevelScores:
    """Log how many incidents were predicted, how early, and how many alarms were false; scores pass unchanged."""
    for score, truth in zip(token_level_scores.sum(-1).tolist(), ground_truth, strict=True):
        if truth["incident"] is not None:
            metrics.mean("alarms/in_time", score > 0)
        if score > 0:
            metrics.mean("alarms/lead", score * HORIZON)
        metrics.mean("alarms/false", score == FALSE_ALARM)
    return token_level_scores


# GRPO on episodes that the environment rewards: one edit.
graph = grpo(None, n=8, kl_coef=0.0, mini_batch=64).edit(
    replace={"generate": Interact(Watch, max_turns=WINDOWS, context=100, timeout=10.0, max_new_tokens=4)},
    drop=["reward"],
    name="alarm",
)


def training() -> Training:
    """The graph with its backends, data and number of steps."""
    if not MODEL.exists():
        build(MODEL, SEED)
    train, heldout = write_data(DATA)
    job = graph.bind(
        actor=TorchTrainer(MODEL, AdamW(lr=6e-4, betas=(0.9, 0.95), weight_decay=0.0)),
        rollout=TorchRollout(),
    )
    streams = Validation(
        PromptData(heldout),
        every=10,
        changes={"repeat.n": 1},
        until="interact",
        insert={"alarms": After("interact", alarms)},
        batch=400,
    )
    return Training(job, PromptData(train), steps=STEPS, prompts=32, seed=SEED, validation=streams)


if __name__ == "__main__":
    training().run([Terminal()])
