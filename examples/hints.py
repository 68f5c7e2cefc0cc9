"""A guessing game in self-play: one policy hints at a number, and guesses numbers by its own hints.

The episode is played by the side that hints; it asks the same engine, in a conversation of its own, to guess. The
policy trains on both sides.

flowrl show examples/hints.py:graph       show the graph
flowrl run examples/hints.py:training     train, as `python examples/hints.py` does
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for the module in this folder
from hints_environment import build, guess, write_data

from flowrl import PromptBatch, PromptData, Role, Terminal, Training, Validation, algorithm
from flowrl.backends import AdamW, TorchRollout, TorchTrainer
from flowrl.episodes import Chat, Row
from flowrl.operators import GroupAdvantage, Interact, OldLogProb, Repeat, Sampled, Sync, UpdateActor

MODEL = Path(os.environ.get("MODEL", "runs/hints/model"))
DATA = Path("runs/hints/data")
STEPS = int(os.environ.get("STEPS", "30"))
SEED = int(os.environ.get("SEED", "0"))
LEARN = {"ppo_epochs": 2, "mini_batch": 32}


async def hint(chat: Chat, row: Row) -> float:
    """Rewards both sides if the guess is right."""
    given = await chat.answer()
    guessed = await chat.ask("guesser", guess(given.text))
    right = float(guessed.text == row.ground_truth)
    chat.others["guesser"].reward(right)
    return right


@algorithm
def play_itself(batch: PromptBatch):
    """GRPO for the hints, then for the guesses, which the same weights sampled."""
    prompts = Repeat(8)(batch)
    rows = Interact(hint, others={"guesser": Role("rollout")}, max_turns=1, context=32, max_new_tokens=3)(prompts)
    advantages = GroupAdvantage()(rows.token_level_scores, rows.response_mask, prompts.uid)
    hinted = UpdateActor(**LEARN)(rows, old_log_probs=OldLogProb()(rows), advantages=advantages)

    guesses = Sampled("guesser", Role("rollout"))(rows.asked)
    old = OldLogProb().named("guess_old_log_prob")(guesses)
    own = GroupAdvantage().named("guess_advantage")(guesses.token_level_scores, guesses.response_mask, prompts.uid)
    learned = UpdateActor(**LEARN, prior_updates=1).named("update_guess")(guesses, old_log_probs=old, advantages=own)
    return hinted, Sync()(learned)


graph = play_itself()


def training() -> Training:
    """The graph with its backends, data and number of steps."""
    if not MODEL.exists():
        build(MODEL, SEED)
    train, heldout = write_data(DATA)
    job = graph.bind(
        actor=TorchTrainer(MODEL, AdamW(lr=5e-4, betas=(0.9, 0.95), weight_decay=0.0)), rollout=TorchRollout()
    )
    games = Validation(PromptData(heldout), every=10, changes={"repeat.n": 1}, until="interact", batch=400)
    return Training(job, PromptData(train), steps=STEPS, prompts=16, seed=SEED, validation=games)


if __name__ == "__main__":
    training().run([Terminal()])
