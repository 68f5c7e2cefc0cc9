"""A sales assistant graded by a model: a second, frozen role reads each conversation and scores it.

Only the validation knows whether the order is right; the judge and the policy do not.

flowrl show examples/judged.py:graph       show the graph
flowrl run examples/judged.py:training     train, as `python examples/judged.py` does
"""

import os
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for the module in this folder
from judged_environment import TURNS, Wish, build, build_judge, write_data

from flowrl import INJECTED, After, Metrics, PromptData, Terminal, Training, Validation, operator
from flowrl.backends import AdamW, TorchRollout, TorchTrainer
from flowrl.columns import TokenLevelScores
from flowrl.episodes import Answer, Environment, Reply, Row
from flowrl.graphs import grpo
from flowrl.operators import Interact, Judge, Reward

MODEL = Path(os.environ.get("MODEL", "runs/judged/model"))
JUDGE = Path(os.environ.get("JUDGE", "runs/judged/judge"))
DATA = Path("runs/judged/data")
STEPS = int(os.environ.get("STEPS", "30"))
SEED = int(os.environ.get("SEED", "0"))


class Customer(Environment):
    """Answers questions until the policy writes an order."""

    async def reset(self, row: Row) -> Reply:
        self.wish = Wish(*row.extra_info["wish"])
        return Reply(row.messages)

    async def step(self, answer: Answer) -> Reply:
        return Reply(self.wish.reply(answer.text), done=answer.text.startswith("Order:"))


def right(data_source: str, solution_str: str, ground_truth: str, extra_info: object = None) -> float:
    """1 if the last answer is the order that the customer meant."""
    return float(solution_str == ground_truth)


def points(text: str) -> float | None:
    """The grade from 0 to 1; None if there is none."""
    found = re.fullmatch(r"Grade: ([0-3])", text)
    return int(found[1]) / 3 if found else None


@operator
def fooled(judged: TokenLevelScores, truth: TokenLevelScores, metrics: Metrics = INJECTED) -> TokenLevelScores:
    """Log the fraction of orders with the best grade that are wrong."""
    best = judged.sum(-1) == 1
    metrics.mean("judge/fooled", (best & (truth.sum(-1) == 0)).sum(), best.sum())
    return judged


# GRPO on episodes, rewarded by a judge that reads them: one edit.
graph = grpo(right, n=8, kl_coef=0.0, mini_batch=64).edit(
    replace={
        "generate": Interact(Customer, max_turns=TURNS, context=100, timeout=10.0, max_new_tokens=8),
        "reward": Judge(template="{conversation}", parse=points, unparsed=0.0, max_new_tokens=4).named("reward"),
    },
    wire={"reward.conversation": "interact.conversation"},
    name="judged",
)


def training() -> Training:
    """The graph with its backends, data and number of steps."""
    if not MODEL.exists():
        build(MODEL, SEED)
    if not JUDGE.exists():
        build_judge(JUDGE)  # the same judge for every seed
    train, heldout = write_data(DATA)
    job = graph.bind(
        actor=TorchTrainer(MODEL, AdamW(lr=3e-4, betas=(0.9, 0.95), weight_decay=0.0)),
        rollout=TorchRollout(),
        judge=TorchRollout(JUDGE, frozen=True),
    )
    sold = Validation(
        PromptData(heldout),
        every=10,
        changes={"repeat.n": 1},
        insert={"truth": After("interact", Reward(right, log="truth")), "fooled": After("reward", fooled)},
        wire={"fooled.judged": "reward.token_level_scores", "fooled.truth": "truth.token_level_scores"},
        batch=400,
    )
    return Training(job, PromptData(train), steps=STEPS, prompts=32, seed=SEED, validation=sold)


if __name__ == "__main__":
    training().run([Terminal()])
