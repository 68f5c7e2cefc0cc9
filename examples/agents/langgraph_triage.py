"""Incident triage by an agent of LangGraph: its loop and its tool, with a policy that learns to use them.

python examples/agents/langgraph_triage.py      trains; pip install langgraph langchain-openai 'flowrl[endpoint]'
"""

import os
import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # for the modules in this folder
sys.path.insert(1, str(Path(__file__).parents[1]))  # and in the one above
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from triage_environment import CAUSES, SERVICES, incident, report, write_data
from warm_start import Conversation, call, imitate

from flowrl import PromptData, Terminal, Training, Validation
from flowrl.backends import AdamW, TorchRollout, TorchTrainer
from flowrl.episodes import Endpoint, Row
from flowrl.graphs import grpo
from flowrl.operators import Interact

FOLDER = Path("runs/langgraph")
STEPS = int(os.environ.get("STEPS", "30"))
SEED = int(os.environ.get("SEED", "0"))
WORDS = (
    *SERVICES,
    *CAUSES.values(),
    *('{"service": "', '", "incident_type": "', '"}'),
    '<tool_call>\n{"name": "get_metrics", "arguments": {"service": "',
    *("Incident: ", " errors=", "cpu=", "mem=", "disk=", "net="),
)


def investigate(url: str, key: str, row: Row) -> float:
    """Play an episode: the policy calls the tool until it answers; returns 1 if it names the service and the cause."""

    @tool
    def get_metrics(service: str) -> str:
        """The metrics of a service."""
        return str(row.extra_info["metrics"].get(service, "unknown service"))

    policy = ChatOpenAI(base_url=url, api_key=key, model="policy").bind_tools([get_metrics])

    def answer(state: MessagesState) -> dict[str, Any]:
        return {"messages": [policy.invoke(state["messages"])]}

    loop = StateGraph(MessagesState)
    loop.add_node("policy", answer)
    loop.add_node("tools", ToolNode([get_metrics]))
    loop.add_edge(START, "policy")
    loop.add_conditional_edges("policy", tools_condition)
    loop.add_edge("tools", "policy")
    messages = loop.compile().invoke({"messages": list(row.messages)})["messages"]
    return float(messages[-1].content == report(row.ground_truth["service"], row.ground_truth["incident_type"]))


def demonstration(numbers: random.Random) -> Conversation:
    """A weak responder: requests metrics half of the time, often of another service, else answers CPU saturation."""
    one = incident(numbers)
    messages, cause = [{"role": "user", "content": one.seen}], CAUSES["cpu"]
    if numbers.random() < 0.5:
        service = one.service if numbers.random() < 0.5 else numbers.choice(list(one.metrics))
        messages += [call("get_metrics", service=service), {"role": "tool", "content": one.metrics[service]}]
        cause = one.cause if service == one.service else cause
    return [*messages, {"role": "assistant", "content": report(one.service, cause)}]


# GRPO on episodes that LangGraph plays: one edit.
graph = grpo(None, n=8, kl_coef=0.0, mini_batch=64).edit(
    replace={"generate": Interact(Endpoint(investigate), max_turns=3, context=200, max_new_tokens=16)},
    drop=["reward"],
    name="langgraph",
)


def training() -> Training:
    """The graph with its backends, data and number of steps."""
    model = FOLDER / "sft/actor"
    if not model.exists():
        model = imitate(FOLDER, WORDS, ["get_metrics"], demonstration, SEED, epochs=8)
    train, heldout = write_data(FOLDER)
    job = graph.bind(
        actor=TorchTrainer(model, AdamW(lr=3e-4, betas=(0.9, 0.95), weight_decay=0.0)), rollout=TorchRollout()
    )
    held = Validation(PromptData(heldout), every=10, changes={"repeat.n": 1}, until="interact", batch=400)
    return Training(job, PromptData(train), steps=STEPS, prompts=16, seed=SEED, validation=held)


if __name__ == "__main__":
    training().run([Terminal()])
