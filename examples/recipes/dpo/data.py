"""Write ``data`` in the form of ultrafeedback_binarized, and ``model``, to a folder: ``python data.py tiny``."""

import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the module in the folder of the recipes
from tiny import write_data, write_model

BEGIN, ANSWERS = "Greet ", ("Hello, ", "Go away, ")
NAMES = ("Ada", "Ben", "Cleo", "Dan")
WORDS = (BEGIN, *ANSWERS, *NAMES)


def pair(numbers: random.Random) -> dict[str, Any]:
    """A prompt with a polite and a rude response."""
    name = numbers.choice(NAMES)
    prompt = f"{BEGIN}{name}{'!' * numbers.randint(1, 4)}"
    chosen, rejected = (
        [{"role": "user", "content": prompt}, {"role": "assistant", "content": f"{text}{name}."}] for text in ANSWERS
    )
    scores = {"score_chosen": 8.0, "score_rejected": 2.0}
    row = {"prompt": prompt, "prompt_id": str(numbers.random()), "chosen": chosen, "rejected": rejected}
    return {**row, "messages": chosen, **scores}


def demonstration(numbers: random.Random) -> list[dict[str, str]]:
    """A response of either kind."""
    row = pair(numbers)
    conversation: list[dict[str, str]] = row[numbers.choice(("chosen", "rejected"))]
    return conversation


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    write_data(folder / "data", pair, {"train_prefs": 64, "test_prefs": 16})
    write_model(folder / "model", demonstration, WORDS)
