"""Write ``data`` in the form of ultrafeedback_binarized, ``model``, and ``reward-model``, to a folder:
``python data.py tiny``."""

import random
import sys
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the module in the folder of the recipes
from tiny import write_data, write_model

BEGIN, ANSWERS = "Greet ", ("Hello, ", "Go away, ")
NAMES = ("Ada", "Ben", "Cleo", "Dan")


def pair(numbers: random.Random) -> dict[str, Any]:
    """A prompt with a polite and a rude response."""
    name = numbers.choice(NAMES)
    prompt = f"{BEGIN}{name}{'!' * numbers.randint(1, 4)}"
    chosen, rejected = (
        [{"role": "user", "content": prompt}, {"role": "assistant", "content": f"{text}{name}."}] for text in ANSWERS
    )
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def demonstration(numbers: random.Random) -> list[dict[str, str]]:
    """A response of either kind."""
    conversation: list[dict[str, str]] = pair(numbers)[numbers.choice(("chosen", "rejected"))]
    return conversation


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    write_data(folder / "data", pair, {"train_prefs": 64, "test_prefs": 16})
    write_model(folder / "model", demonstration, (BEGIN, *ANSWERS, *NAMES))
    config = AutoConfig.from_pretrained(folder / "model", num_labels=1)  # its head is random: it grades nothing
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder / "reward-model")
    AutoTokenizer.from_pretrained(folder / "model").save_pretrained(folder / "reward-model")
