"""The environment of `judged.py`: customers who say a part of what they want, a small model that sells, and one that
judges.

Who asks for what is missing gets the order right; who takes what most people want is right now and then.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

from imitation import Conversation, imitate
from rows import write_rows

from flowrl.operators import conversation

# Of sizes and colours, what most people want comes first.
SIZES = (" medium", " small", " large", " huge")
COLOURS = (" black", " white", " red", " blue", " green")
ITEMS = (" coat", " shirt", " scarf", " dress", " jacket", " hat")
ASK_SIZE, ASK_COLOUR, NOT_HEARD = "Which size?", "Which colour?", "Sorry?"
WORDS = (
    *SIZES,
    *COLOURS,
    *ITEMS,
    *("I would like a", "It is", "Order:", ASK_SIZE, ASK_COLOUR, NOT_HEARD),
    *("user: ", "assistant: ", "\n\n", "Grade: "),
)
TURNS = 3


class Wish(NamedTuple):
    """What a customer wants, and how it is told at first."""

    size: str
    colour: str
    item: str
    told: str

    def reply(self, said: str) -> str:
        """What the customer says to the seller."""
        return f"It is{self.size}." if said == ASK_SIZE else f"It is{self.colour}." if said == ASK_COLOUR else NOT_HEARD

    @property
    def order(self) -> str:
        """The order that is right."""
        return f"Order:{self.size}{self.colour}{self.item}."


def wish(numbers: random.Random) -> Wish:
    """One of the things that there are, of which size and colour are each told in two of five cases."""
    size, colour, item = numbers.choice(SIZES), numbers.choice(COLOURS), numbers.choice(ITEMS)
    told = "".join(fact for fact in (size, colour) if numbers.random() < 0.4)
    return Wish(size, colour, item, f"I would like a{told}{item}.")


def write_data(folder: Path) -> tuple[Path, Path]:
    """Wishes to train on, and others: the paths of two JSONL files."""
    return write_rows(folder, _row)


def _row(numbers: random.Random) -> dict[str, Any]:
    one = wish(numbers)
    return {
        "prompt": [{"role": "user", "content": one.told}],
        "data_source": "judged",
        "reward_model": {"ground_truth": one.order},
        "extra_info": {"wish": one},
    }


def _sold(numbers: random.Random) -> Conversation:
    """How somebody sold who asks for what is missing in one of three cases and else takes what most people want, now
    and then asks for what was said, and in one of ten cases writes down something else."""
    one = wish(numbers)
    said = [{"role": "user", "content": one.told}]
    order = []
    for fact, facts, question in ((one.size, SIZES, ASK_SIZE), (one.colour, COLOURS, ASK_COLOUR)):
        known = fact in one.told
        if numbers.random() < (0.1 if known else 0.35):
            said += [{"role": "assistant", "content": question}, {"role": "user", "content": one.reply(question)}]
            known = True
        slip = numbers.random() < 0.1
        order.append(numbers.choice(facts) if slip else fact if known else facts[0])
    said.append({"role": "assistant", "content": f"Order:{''.join(order)}{one.item}."})
    return said


def grade(said: Conversation) -> int:
    """How many of the three facts in the order the customer has said."""
    heard = " ".join(message["content"] for message in said if message["role"] == "user")
    ordered = said[-1]["content"].removeprefix("Order:").removesuffix(".").split()
    return sum(f" {fact}" in heard for fact in ordered)


def _graded(numbers: random.Random) -> Conversation:
    """How somebody graded what was said, with a slip in one of twenty cases."""
    said = _sold(numbers)
    given = numbers.randint(0, 3) if numbers.random() < 0.05 else grade(said)
    return [{"role": "user", "content": conversation(said)}, {"role": "assistant", "content": f"Grade: {given}"}]


def build(folder: Path, seed: int = 0, steps: int = 200, rows: int = 64) -> Path:
    """A model that sells as it was done before, as a Hugging Face folder."""
    return imitate(folder, WORDS, _sold, seed, steps, rows)


def build_judge(folder: Path, seed: int = 0, steps: int = 600, rows: int = 64) -> Path:
    """A model that grades as it was done before, as a Hugging Face folder."""
    return imitate(folder, WORDS, _graded, seed, steps, rows)
