"""The environment of `judged.py`: customers who state part of what they want, a small model that sells, and one that
judges.

Asking for the missing facts gives the right order; assuming the most common choice is right only sometimes.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

from imitation import Conversation, imitate
from rows import write_rows

from flowrl.operators import conversation

# The most common size and color come first.
SIZES = (" medium", " small", " large", " huge")
COLORS = (" black", " white", " red", " blue", " green")
ITEMS = (" coat", " shirt", " scarf", " dress", " jacket", " hat")
ASK_SIZE, ASK_COLOR, NOT_HEARD = "Which size?", "Which colour?", "Sorry?"
WORDS = (
    *SIZES,
    *COLORS,
    *ITEMS,
    *("I would like a", "It is", "Order:", ASK_SIZE, ASK_COLOR, NOT_HEARD),
    *("user: ", "assistant: ", "\n\n", "Grade: "),
)
TURNS = 3


class Wish(NamedTuple):
    """What a customer wants, and the first request."""

    size: str
    color: str
    item: str
    request: str

    def reply(self, question: str) -> str:
        """The customer's reply to a question."""
        facts = {ASK_SIZE: self.size, ASK_COLOR: self.color}
        return f"It is{facts[question]}." if question in facts else NOT_HEARD

    @property
    def order(self) -> str:
        """The right order."""
        return f"Order:{self.size}{self.color}{self.item}."


def wish(numbers: random.Random) -> Wish:
    """Sample a wish; the request states size and color with probability 0.4 each."""
    size, color, item = numbers.choice(SIZES), numbers.choice(COLORS), numbers.choice(ITEMS)
    stated = "".join(fact for fact in (size, color) if numbers.random() < 0.4)
    return Wish(size, color, item, f"I would like a{stated}{item}.")


def write_data(folder: Path) -> tuple[Path, Path]:
    """Write training and held-out wishes; return the paths of both JSONL files."""
    return write_rows(folder, _row)


def _row(numbers: random.Random) -> dict[str, Any]:
    one = wish(numbers)
    return {
        "prompt": [{"role": "user", "content": one.request}],
        "data_source": "judged",
        "reward_model": {"ground_truth": one.order},
        "extra_info": {"wish": one},
    }


def _sold(numbers: random.Random) -> Conversation:
    """A weak seller: asks for a missing fact in a third of the cases and else assumes the most common one, asks for a
    known fact in a tenth, and writes a random fact in a tenth."""
    one = wish(numbers)
    messages = [{"role": "user", "content": one.request}]
    order = []
    for fact, facts, question in ((one.size, SIZES, ASK_SIZE), (one.color, COLORS, ASK_COLOR)):
        known = fact in one.request
        if numbers.random() < (0.1 if known else 0.35):
            messages += [{"role": "assistant", "content": question}, {"role": "user", "content": one.reply(question)}]
            known = True
        slip = numbers.random() < 0.1
        order.append(numbers.choice(facts) if slip else fact if known else facts[0])
    messages.append({"role": "assistant", "content": f"Order:{''.join(order)}{one.item}."})
    return messages


def grade(messages: Conversation) -> int:
    """Number of facts in the order, of three, that the customer stated."""
    stated = " ".join(message["content"] for message in messages if message["role"] == "user")
    ordered = messages[-1]["content"].removeprefix("Order:").removesuffix(".").split()
    return sum(f" {fact}" in stated for fact in ordered)


def _graded(numbers: random.Random) -> Conversation:
    """Grade a conversation; one grade in twenty is random."""
    messages = _sold(numbers)
    given = numbers.randint(0, 3) if numbers.random() < 0.05 else grade(messages)
    return [{"role": "user", "content": conversation(messages)}, {"role": "assistant", "content": f"Grade: {given}"}]


def build(folder: Path, seed: int = 0, steps: int = 200, rows: int = 64) -> Path:
    """Train a model to imitate the weak seller; write it as a Hugging Face folder."""
    return imitate(folder, WORDS, _sold, seed, steps, rows)


def build_judge(folder: Path, seed: int = 0, steps: int = 600, rows: int = 64) -> Path:
    """Train a model to imitate the graders; write it as a Hugging Face folder."""
    return imitate(folder, WORDS, _graded, seed, steps, rows)
