"""What segments cost: tokens that the trainer and the engine compute per sampled token, by turns.

An answer has 64 tokens, of which a policy that thinks keeps the last 16 for later turns; a reply has about 16. *Grows*
keeps everything in one sequence. *Drops* reads each turn without the earlier thoughts, as Qwen 3 in a conversation, so
each turn is a segment. *Compresses* starts again from a summary of 64 tokens in every eighth turn.

    python benchmarks/segments.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from harness import table

from flowrl import Key, Metrics, PromptBatch
from flowrl.backends import TorchRollout
from flowrl.data.text.tokenizer import ChatTokenizer
from flowrl.episodes import Chat, Row
from flowrl.operators import Interact
from tests.support.models import tiny_folder

ANSWER, KEPT, REPLY, SUMMARY, EVERY, ROWS = 64, 16, "and what is next?"[:16], "s" * 64, 8, 4


async def grows(chat: Chat, row: Row) -> None:
    """One sequence."""
    await chat.answer()
    for _ in range(1, chat.limits.turns):
        await chat.answer(REPLY)


async def drops(chat: Chat, row: Row) -> None:
    """Each turn without the thoughts of earlier ones."""
    said: list[Any] = [*row.messages]
    for _ in range(chat.limits.turns):
        chat.rewrite(said)
        answer = await chat.answer()
        kept = answer.text[-KEPT:]
        said = [*said, {"role": "assistant", "content": kept}, {"role": "user", "content": REPLY}]


async def compresses(chat: Chat, row: Row) -> None:
    """A summary in every eighth turn."""
    for turn in range(chat.limits.turns):
        if turn and turn % EVERY == 0:
            chat.rewrite([*row.messages[:-1], {"role": "user", "content": SUMMARY}])
        await chat.answer(REPLY if turn % EVERY else None)


def prompts_of(tokenizer: ChatTokenizer) -> PromptBatch:
    """Prompts of about 32 tokens."""
    messages = [[{"role": "user", "content": f"{i} " * 15}] for i in range(ROWS)]
    ids, mask = tokenizer.pad_left([tokenizer.prompt_ids(each) for each in messages])

    def column(values: list[Any]) -> Any:
        found = np.empty(ROWS, dtype=object)
        found[:] = values
        return found

    names = column([str(i) for i in range(ROWS)])
    return PromptBatch(ids, mask, names, names, names, names, column([{}] * ROWS), column(messages))


def main() -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_folder(Path(folder), "llama", max_position_embeddings=8192)
        context: Any = SimpleNamespace(seed=0, rank=0, world_size=1)
        engine = TorchRollout(model, frozen=True, device="cpu").build(context)
        rows = []
        for agent in (grows, drops, compresses):
            for turns in (2, 8, 32):
                metrics = Metrics()
                settings: dict[str, Any] = {"max_new_tokens": ANSWER, "context": 8000, "ignore_eos": True}
                interact = Interact(agent, rewrites="segment", max_turns=turns, rollout=engine, **settings)
                interact(prompts_of(engine.tokenizer), key=Key.of(0), metrics=metrics)
                found = metrics.compute()
                computed = found["throughput/context_tokens"] * (1 - found["throughput/cached_share"])
                rows.append(
                    (
                        agent.__name__,
                        str(turns),
                        f"{found['episodes/segments']:g}",
                        f"{found['episodes/context_per_token']:.2f}",
                        f"{computed / found['response_length/total']:.2f}",
                    )
                )
    heads = ["context", "turns", "segments", "context tokens", "prefilled"]
    table("Tokens per sampled token", heads, rows)


if __name__ == "__main__":
    main()
