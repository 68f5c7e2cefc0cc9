"""A proposer and a solver that learn together: one writes a sum of a given value, the other computes it.

Both are policies of their own. The proposer plays the episode and asks the solver; `Sampled` makes rows of what the
solver sampled, on which the solver trains.

flowrl show examples/propose.py:graph       show the graph
flowrl run examples/propose.py:training     train, as `python examples/propose.py` does
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for the module in this folder
from propose_environment import build, build_solver, question, value_of, write_data

from flowrl import PromptBatch, PromptData, Role, Terminal, Training, Validation, algorithm
from flowrl.backends import AdamW, TorchRollout, TorchTrainer
from flowrl.episodes import Chat, Row
from flowrl.operators import GroupAdvantage, Interact, OldLogProb, Repeat, Sampled, Sync, UpdateActor

MODEL = Path(os.environ.get("MODEL", "runs/propose/model"))
SOLVER = Path(os.environ.get("SOLVER", "runs/propose/solver"))
DATA = Path("runs/propose/data")
STEPS = int(os.environ.get("STEPS", "30"))
SEED = int(os.environ.get("SEED", "0"))


async def propose(chat: Chat, row: Row) -> float:
    """Rewards the proposer for the right value, and the solver for the right solution of a valid problem."""
    problem = (await chat.answer()).text
    if (value := value_of(problem)) is None:
        return 0.0
    solution = await chat.ask("solver", question(problem))
    chat.others["solver"].reward(float(solution.text == str(value)))
    return float(str(value) == row.ground_truth)


LEARN = {"ppo_epochs": 2, "mini_batch": 32}


@algorithm
def learn_together(batch: PromptBatch):
    """GRPO for both policies, on the same episodes."""
    prompts = Repeat(8)(batch)
    rows = Interact(propose, others={"solver": Role("solver")}, max_turns=1, context=32, max_new_tokens=4)(prompts)
    advantages = GroupAdvantage()(rows.token_level_scores, rows.response_mask, prompts.uid)
    updated = UpdateActor(**LEARN)(rows, old_log_probs=OldLogProb()(rows), advantages=advantages)

    solved, trainer = Sampled("solver", Role("solver"))(rows.asked), Role("solver_actor")
    old = OldLogProb(actor=trainer).named("solver_old_log_prob")(solved)
    own = GroupAdvantage().named("solver_advantage")(solved.token_level_scores, solved.response_mask, prompts.uid)
    learned = UpdateActor(**LEARN, actor=trainer).named("update_solver")(solved, old_log_probs=old, advantages=own)
    return Sync()(updated), Sync(actor=trainer, rollout=Role("solver")).named("sync_solver")(learned)


graph = learn_together()


def training() -> Training:
    """The graph with its backends, data and number of steps."""
    if not MODEL.exists():
        build(MODEL, SEED)
    if not SOLVER.exists():
        build_solver(SOLVER, SEED)
    train, heldout = write_data(DATA)
    optimizer = AdamW(lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    job = graph.bind(
        actor=TorchTrainer(MODEL, optimizer),
        rollout=TorchRollout(),
        solver_actor=TorchTrainer(SOLVER, optimizer),
        solver=TorchRollout(SOLVER),
    )
    both = Validation(PromptData(heldout), every=10, changes={"repeat.n": 1}, until="interact", batch=400)
    return Training(job, PromptData(train), steps=STEPS, prompts=16, seed=SEED, validation=both)


if __name__ == "__main__":
    training().run([Terminal()])
