"""Write ``data`` in the form of HotpotQA, and ``model``, which searches, to a folder: ``python data.py tiny``."""

import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the module in the folder of the recipes
from recipe import ASK
from tiny import write_data, write_model

NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Fay")
PLACES = ("Rome", "Oslo", "Lima", "Cairo")
BEGIN, BETWEEN, END = ASK.partition("{question}")[0] + "Where does ", ": It lives in ", " live?"
MARKS = ("<search>", "</search>", "<information>", "</information>", "<answer>", "</answer>")
WORDS = (BEGIN, BETWEEN, END, *MARKS, *NAMES, *PLACES)


def question(numbers: random.Random) -> dict[str, Any]:
    """A question, with three paragraphs of which one has the answer."""
    names = numbers.sample(NAMES, 3)
    places = [numbers.choice(PLACES) for _ in names]
    asked = numbers.randrange(3)
    return {
        "id": str(numbers.random()),
        "question": f"Where does {names[asked]} live?",
        "answer": places[asked],
        "type": "bridge",
        "level": "easy",
        "supporting_facts": {"title": [names[asked]], "sent_id": [0]},
        "context": {"title": names, "sentences": [[f"It lives in {place}"] for place in places]},
    }


def demonstration(numbers: random.Random) -> list[dict[str, str]]:
    """A question, a search, what it finds, and the answer."""
    row = question(numbers)
    [name] = row["supporting_facts"]["title"]
    return [
        {"role": "user", "content": ASK.format(question=row["question"])},
        {"role": "assistant", "content": f"<search>{name}</search>"},
        {"role": "user", "content": f"<information>{name}{BETWEEN}{row['answer']}</information>"},
        {"role": "assistant", "content": f"<answer>{row['answer']}</answer>"},
    ]


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    write_data(folder / "data", question, {"train": 64, "validation": 16}, name="distractor")
    write_model(folder / "model", demonstration, WORDS)
