"""Guess a number in six turns. Each is paid for how much of the number it finds out, and the one that names it 1 more.

flowrl show examples/guess.py:graph       look at the graph
flowrl run examples/guess.py:training     train, as `python examples/guess.py` does
CREDIT=episode python examples/guess.py   the same rewards, added up: the credit of all turns alike
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for the file beside this one
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
WARM_UP = 40  # optimizer steps, of which a step has 8
CREDIT = os.environ.get("CREDIT", "turn")


class Guess(Environment):
    """Says what the number may still be; what is no number finds out nothing."""

    async def reset(self, row: Row) -> Reply:
        self.number, self.candidates = int(row.ground_truth), Candidates()
        return Reply(row.messages)

    async def step(self, answer: Answer) -> Reply:
        guess = int(answer.text) if answer.text.isdecimal() else None
        found_out = 0.0 if guess is None else self.candidates.told(guess, self.number)
        done = guess == self.number
        return Reply(f"It is not that{self.candidates}", reward=found_out + done, done=done)


# GRPO whose answers are episodes, which scores an episode by the sum of its rewards: one edit.
by_episode = grpo(None, n=8, kl_coef=0.0, ppo_epochs=2, mini_batch=32).edit(
    replace={"generate": Interact(Guess, max_turns=TURNS, context=96, timeout=10.0, max_new_tokens=3)},
    drop=["reward"],
    name="guess",
)

# Each turn by what was found out from it on: another.
by_turn = by_episode.edit(replace={"group_advantage": TurnGroupAdvantage()})

graph = {"turn": by_turn, "episode": by_episode}[CREDIT]


def training() -> Training:
    """The graph with engines for its roles, the numbers, and the number of steps."""
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
