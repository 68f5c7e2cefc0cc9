"""mini-swe-agent repairs a tiny repository: its loop and its shell, with a policy that learns which commands work.

python examples/agents/mini_swe.py      trains; pip install mini-swe-agent 'flowrl[endpoint]'
"""

import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # litellm would fetch prices when it is imported
os.environ["MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT"] = "1"  # the endpoint refuses for good
os.environ["MSWEA_SILENT_STARTUP"] = "1"
sys.path.insert(0, str(Path(__file__).parent))  # for the modules in this folder
sys.path.insert(1, str(Path(__file__).parents[1]))  # and in the one above
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel
from rows import write_rows
from warm_start import Conversation, call, imitate

from flowrl import PromptData, Terminal, Training
from flowrl.backends import AdamW, TorchRollout, TorchTrainer
from flowrl.episodes import Endpoint, Row
from flowrl.graphs import grpo
from flowrl.operators import Interact

FOLDER = Path("runs/mini_swe")
STEPS = int(os.environ.get("STEPS", "30"))
SEED = int(os.environ.get("SEED", "0"))
TURNS = 4

FUNCTIONS = ("min", "max", "sum", "len")
SYSTEM = "Repair shop.py."
ERROR = "Call bash."
READ = "cat shop.py"
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
SOURCE = "def price(offers):\n    return {}(offers)\n"
WORDS = (
    *FUNCTIONS,
    *(SYSTEM, ERROR, READ, SUBMIT, *SOURCE.split("{}")),
    *("The price should be the ", " of all offers.", "sed -i s/", "/ shop.py", "/", "0\n"),
    '<tool_call>\n{"name": "bash", "arguments": {"command": "',
)


def repair(url: str, key: str, row: Row) -> float:
    """Play an episode in a repository of its own; returns 1 if its test passes at the end."""
    wrong, right = row.extra_info["wrong"], row.ground_truth
    model = LitellmModel(
        model_name="openai/policy",
        model_kwargs={"api_base": url, "api_key": key},
        cost_tracking="ignore_errors",
        observation_template="{{ output.returncode }}\n{{ output.output }}",
        format_error_template=ERROR,
    )
    with tempfile.TemporaryDirectory() as repository:
        Path(repository, "shop.py").write_text(SOURCE.format(wrong))
        Path(repository, "test.py").write_text(f"from shop import price\nassert price([3, 1, 3]) == {right}([3, 1, 3])")
        system, task = (message["content"] for message in row.messages)
        agent = DefaultAgent(
            model,
            LocalEnvironment(cwd=repository),
            system_template=system,
            instance_template="{{ task }}",
            step_limit=TURNS,
        )
        agent.run(task)
        test = [sys.executable, "-B", "-S", "test.py"]
        return float(subprocess.run(test, cwd=repository, stderr=subprocess.DEVNULL).returncode == 0)


def task(numbers: random.Random) -> dict[str, Any]:
    """A row: the issue, and the function that the repository uses instead of the right one."""
    wrong, right = numbers.sample(FUNCTIONS, 2)
    issue = f"The price should be the {right} of all offers."
    return {
        "prompt": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": issue}],
        "data_source": "shop",
        "reward_model": {"ground_truth": right},
        "extra_info": {"wrong": wrong},
    }


def demonstration(numbers: random.Random) -> Conversation:
    """A weak programmer: reads the file half of the time, and otherwise guesses what it says."""
    row = task(numbers)
    wrong, right = row["extra_info"]["wrong"], row["reward_model"]["ground_truth"]
    messages, found = list(row["prompt"]), wrong
    if numbers.random() < 0.5:
        messages += [call("bash", command=READ), {"role": "tool", "content": "0\n" + SOURCE.format(wrong)}]
    else:
        found = numbers.choice([name for name in FUNCTIONS if name != right])
    edit = call("bash", command=f"sed -i s/{found}/{right}/ shop.py")
    return [*messages, edit, {"role": "tool", "content": "0\n"}, call("bash", command=SUBMIT)]


# It drops answers without a call from its history, so what follows such an answer is a segment.
episodes = Interact(Endpoint(repair), rewrites="segment", max_turns=TURNS, context=200, max_new_tokens=24)

# GRPO on episodes that mini-swe-agent plays: one edit.
graph = grpo(None, n=8, kl_coef=0.0, mini_batch=64).edit(
    replace={"generate": episodes}, drop=["reward"], name="mini_swe"
)


def training() -> Training:
    """The graph with its backends, data and number of steps."""
    model = FOLDER / "sft/actor"
    if not model.exists():
        model = imitate(FOLDER, WORDS, ["bash"], demonstration, SEED, epochs=8)
    train, _ = write_rows(FOLDER, task)
    job = graph.bind(
        actor=TorchTrainer(model, AdamW(lr=3e-4, betas=(0.9, 0.95), weight_decay=0.0)), rollout=TorchRollout()
    )
    return Training(job, PromptData(train), steps=STEPS, prompts=8, seed=SEED)


if __name__ == "__main__":
    training().run([Terminal()])
