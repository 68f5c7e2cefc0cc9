"""Two rounds of incident triage with a tool: the policy may request metrics once, then must answer in JSON.

flowrl show examples/triage.py:graph       show the graph
flowrl run examples/triage.py:training     train, as `python examples/triage.py` does

ENGINE=vllm (or sglang) samples on that engine; run it where the engine is installed, such as in `.venv-engines`.
"""

import json
import os
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for the module in this folder
from triage_environment import build, write_data

from flowrl import PromptData, Terminal, Training, Validation
from flowrl.backends import VLLM, AdamW, SGLang, TorchRollout, TorchScorer, TorchTrainer
from flowrl.episodes import Answer, Environment, Reply, Row
from flowrl.graphs import grpo
from flowrl.operators import Interact

MODEL = Path(os.environ.get("MODEL", "runs/triage/model"))
DATA = Path("runs/triage/data")
STEPS = int(os.environ.get("STEPS", "60"))
SEED = int(os.environ.get("SEED", "0"))
CONTEXT = 200  # tokens per episode; vLLM and SGLang reserve as many per row
ENGINES = {
    "torch": TorchRollout(),
    "vllm": VLLM(MODEL, dtype="float32", max_model_len=CONTEXT),
    "sglang": SGLang(MODEL, dtype="float32", max_model_len=CONTEXT),
}

CALL = re.compile(r'\{"tool": "get_metrics", "service": "([a-z]+)"\}')


class Triage(Environment):
    """Replies to a tool call with metrics, to anything else with a request for the answer."""

    async def reset(self, row: Row) -> Reply:
        self.metrics = row.extra_info["metrics"]
        return Reply(row.messages)

    async def step(self, answer: Answer) -> Reply:
        if answer.turn == 1:
            return Reply(done=True)
        if called := CALL.fullmatch(answer.text):
            return Reply([{"role": "tool", "content": self.metrics.get(called[1], "unknown service")}])
        return Reply("Answer with JSON.")


def right(data_source: str, solution_str: str, ground_truth: dict[str, str], extra_info: object = None) -> float:
    """1 if the last answer is the expected JSON."""
    try:
        return float(json.loads(solution_str) == ground_truth)
    except ValueError:
        return 0.0


# GRPO on episodes: one edit.
graph = grpo(right, n=8, mini_batch=128).edit(
    replace={"generate": Interact(Triage, max_turns=2, context=CONTEXT, timeout=10.0, max_new_tokens=16)}, name="triage"
)


def training() -> Training:
    """The graph with its backends, data and number of steps."""
    if not MODEL.exists():
        build(MODEL, SEED)
    train, heldout = write_data(DATA)
    job = graph.bind(
        actor=TorchTrainer(MODEL, AdamW(lr=3e-4, betas=(0.9, 0.95), weight_decay=0.0)),
        ref=TorchScorer(MODEL),
        rollout=ENGINES[os.environ.get("ENGINE", "torch")],
    )
    answers = Validation(PromptData(heldout), every=10, changes={"repeat.n": 1}, batch=400)
    return Training(job, PromptData(train), steps=STEPS, prompts=32, seed=SEED, validation=answers)


if __name__ == "__main__":
    training().run([Terminal()])
