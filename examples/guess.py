"""Guess a number in six turns. Each turn is rewarded for the information it gains, plus 1 for the right number.

flowrl show examples/guess.py:graph       show the graph
flowrl run examples/guess.py:training     train, as `python examples/guess.py` does
CREDIT=episode python examples/guess.py   the same rewards, summed over the episode
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for the module in this folder
from guess_environment import TURNS, Candidates, build, write_data

from flowrl import PromptData, Terminal, Training, Validation
from flowrl.backends import AdamW, TorchRollout, TorchTrainer
from flowrl.episodes import Answer, Environment, Reply, Row
from flowrl.graphs import grpo
from flowrl.operators import Interact, TurnGroupAdvantage
from flowrl.schedules import Constant

MODEL = Path(os.environ.get("MODEL", "runs/guess/model"))
DATA = Path("runs/guess/data")
STEPS = int(os.environ.get("STEPS", "40"))
SEED = int(os.environ.get("SEED", "0"))
WARM_UP = 40  # optimizer steps; a training step has 8
CREDIT = os.environ.get("CREDIT", "turn")


class Guess(Environment):
    """Replies with the remaining range; an answer that is not a number gains nothing."""

    async def reset(self, row: Row) -> Reply:
        self.number, self.candidates = int(row.ground_truth), Candidates()
        return Reply(row.messages)

    async def step(self, answer: Answer) -> Reply:
        guess = int(answer.text) if answer.text.isdecimal() else None
        gained = 0.0 if guess is None else self.candidates.narrow(guess, self.number)
        done = guess == self.number
        return Reply(f"It is not that{self.candidates}", reward=gained + done, done=done)


# GRPO on episodes, each scored by the sum of its rewards: one edit.
by_episode = grpo(None, n=8, kl_coef=0.0, ppo_epochs=2, mini_batch=32).edit(
    replace={"generate": Interact(Guess, max_turns=TURNS, context=96, timeout=10.0, max_new_tokens=3)},
    drop=["reward"],
    name="guess",
)

# Each turn scored by its own and later rewards: another edit.
by_turn = by_episode.edit(replace={"group_advantage": TurnGroupAdvantage()})

graph = {"turn": by_turn, "episode": by_episode}[CREDIT]


def training() -> Training:
    """The graph with its backends, data and number of steps."""
    if not MODEL.exists():
        build(MODEL, SEED)
    train, heldout = write_data(DATA)
    job = graph.bind(
        actor=TorchTrainer(MODEL, AdamW(lr=2e-3, betas=(0.9, 0.95), weight_decay=0.0), Constant(1.0, warmup=WARM_UP)),
        rollout=TorchRollout(),
    )
    games = Validation(PromptData(heldout), every=10, changes={"repeat.n": 1}, until="interact", batch=400)
    return Training(job, PromptData(train), steps=STEPS, prompts=16, seed=SEED, validation=games)


if __name__ == "__main__":
    training().run([Terminal()])
