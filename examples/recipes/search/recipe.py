"""Search: questions that need documents, which the policy searches in turns; README.md says how to start it.

flowrl run examples/recipes/search/recipe.py:training
"""

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # for the module in this folder
from bm25 import BM25

from flowrl import PromptData, Training, Validation
from flowrl.backends import VLLM, AdamW, TorchScorer, TorchTrainer
from flowrl.episodes import Answer, Environment, Reply, Row
from flowrl.graphs import grpo
from flowrl.operators import Interact
from flowrl.rewards import exact_match

MODEL, DATA = "Qwen/Qwen2.5-1.5B-Instruct", "hotpotqa/hotpot_qa"
ASK = (
    "Answer the question. To search for documents, write <search> query </search>; what is found comes between "
    "<information> and </information>. Search as often as you need. Then write the answer alone in <answer> and "
    "</answer>, for example <answer> Beijing </answer>. Question: {question}"
)
FOUND = 2  # documents per search
_SEARCH = re.compile(r"<search>(.*?)</search>", re.DOTALL)


class Search(Environment):
    """Replies to a search with the best documents; an answer without a search ends the episode."""

    async def reset(self, row: Row) -> Reply:
        self.documents = BM25(row.extra_info["documents"])
        return Reply(row.messages)

    async def step(self, answer: Answer) -> Reply:
        queries = _SEARCH.findall(answer.text)
        if not queries or "<answer>" in answer.text:
            return Reply(done=True)
        found = "\n".join(self.documents.top(queries[-1], FOUND)) or "Nothing was found."
        return Reply(f"<information>{found}</information>")


# The reward is 1 if the last answer in <answer> equals the right one, after SQuAD's normalization.
graph = grpo(exact_match(tag="answer"), n=8).edit(
    replace={
        "generate": Interact(Search, max_turns=4, context=3072, timeout=10.0, max_new_tokens=384, stop=("</search>",))
    },
    name="search",
)


def row(record: dict[str, Any]) -> dict[str, Any]:
    """A row of HotpotQA as a prompt; its paragraphs are the documents."""
    context = record["context"]
    documents = [
        f"{title}: {''.join(text)}" for title, text in zip(context["title"], context["sentences"], strict=True)
    ]
    return {
        "data_source": "hotpotqa",
        "prompt": ASK.format(question=record["question"]),
        "ground_truth": record["answer"],
        "extra_info": {"documents": documents},
    }


def prompts(data: str = DATA, split: str = "validation[:1000]") -> PromptData:
    """The prompts of a split."""
    return PromptData(data, name="distractor", split=split, map=row)


def training(model: str = MODEL, data: str = DATA, test: str = "validation[:1000]") -> Training:
    """The training, on one GPU that trainer and engine share."""
    job = graph.bind(
        actor=TorchTrainer(model, AdamW(lr=1e-6), dtype="bfloat16"),
        ref=TorchScorer(model, dtype="bfloat16"),
        rollout=VLLM(model, memory_fraction=0.4, max_model_len=3072),
    )
    held_out = Validation(prompts(data, test), every=20, changes={"repeat.n": 1, "interact.temperature": 0.0})
    return Training(job, prompts(data, "train"), steps=200, prompts=32, validation=held_out, checkpoint_every=20)
