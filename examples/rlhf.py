"""The three stages of InstructGPT: supervised fine-tuning, a reward model, and PPO on its scores.

Each stage starts from the folder that an earlier one wrote. A reply should be in the register that the prompt asks for;
the writers of the demonstrations get 60 % of the words right, and raters prefer the reply with more right words. PPO
reads neither: only the reward model has seen the preferences.

flowrl show examples/rlhf.py:rewarded     show the graph of the last stage
python examples/rlhf.py                   train all three, in a minute
"""

import json
import os
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for the module in this folder
from imitation import make_tokenizer

from flowrl import After, DemoData, PreferenceData, PromptData, Training, Validation
from flowrl.backends import (
    AdamW,
    TorchCritic,
    TorchRewardModel,
    TorchRewardTrainer,
    TorchRollout,
    TorchScorer,
    TorchTrainer,
)
from flowrl.demo import make_model
from flowrl.graphs import ppo, reward_model, sft
from flowrl.operators import ModelReward, PassAtK, PreferenceAccuracy, Reward

FOLDER = Path(os.environ.get("FOLDER", "runs/rlhf"))
STEPS = int(os.environ.get("STEPS", "40"))  # of PPO
SEED = int(os.environ.get("SEED", "0"))

WORDS = {
    "formal": (" dear", " sir", " kindly", " regards", " sincerely", " esteemed"),
    "casual": (" hey", " dude", " cool", " cheers", " yep", " awesome"),
}


def right(data_source: str, solution_str: str, ground_truth: str, extra_info: object = None) -> float:
    """The share of the words that are in the register of the ground truth; a reply should have four."""
    words = solution_str.split()
    return sum(f" {word}" in WORDS[ground_truth] for word in words) / max(4, len(words))


# PPO with the reward model in place of a function: one edit.
rewarded = ppo(right, n=4, kl_coef=0.02, max_new_tokens=6, mini_batch=64).edit(
    replace={"reward": ModelReward().named("reward")}, name="rlhf"
)


def reply(numbers: random.Random, register: str, good: int) -> str:
    """Four words, `good` of them in the register."""
    other = next(name for name in WORDS if name != register)
    words = numbers.choices(WORDS[register], k=good) + numbers.choices(WORDS[other], k=4 - good)
    numbers.shuffle(words)
    return "".join(words)


def rows(count: int, seed: str) -> list[dict[str, object]]:
    """Rows with all that a stage reads: a prompt, a demonstration, a pair, and the register."""
    numbers, found = random.Random(f"{seed} {SEED}"), []
    for _ in range(count):
        register = numbers.choice(list(WORDS))
        worse, better = sorted(numbers.sample(range(5), 2))
        found.append(
            {
                "prompt": [{"role": "user", "content": f"{register}{numbers.randrange(10**6)}"}],
                "response": reply(numbers, register, sum(numbers.random() < 0.6 for _ in range(4))),
                "chosen": reply(numbers, register, better),
                "rejected": reply(numbers, register, worse),
                "data_source": "register",
                "reward_model": {"ground_truth": register},
            }
        )
    return found


def write(name: str, count: int, *keys: str) -> Path:
    """Write these keys of rows to a file."""
    path = FOLDER / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({key: row[key] for key in keys}) + "\n" for row in rows(count, name)))
    return path


def supervised() -> Training:
    """Stage 1: imitate the demonstrations; from random weights, where you would have a pretrained model."""
    base = FOLDER / "base"
    tokenizer = make_tokenizer([*WORDS, *(word for words in WORDS.values() for word in words)])
    make_model(tokenizer, SEED).save_pretrained(base)
    tokenizer.save_pretrained(base)
    job = sft(mini_batch=64).bind(actor=TorchTrainer(base, AdamW(lr=4e-3)))
    demos = DemoData(write("demos", 4096, "prompt", "response"))
    return Training(job, demos, epochs=1, prompts=64, seed=SEED, folder=str(FOLDER / "sft"))


def preferred(sft_model: Path) -> Training:
    """Stage 2: train a reward model on pairs, from the policy of stage 1; validate it on held-out pairs."""
    job = reward_model().bind(reward_model=TorchRewardTrainer(sft_model, AdamW(lr=2e-3)))
    keys = ("prompt", "chosen", "rejected")
    accuracy = Validation(
        PreferenceData(write("heldout_pairs", 400, *keys)),
        every=20,
        changes={},
        until="pairs",
        insert={"accuracy": After("pairs", PreferenceAccuracy())},
    )
    pairs = PreferenceData(write("pairs", 2048, *keys))
    return Training(job, pairs, epochs=1, prompts=32, seed=SEED, validation=accuracy, folder=str(FOLDER / "rm"))


def reinforced(sft_model: Path, rm: Path) -> Training:
    """Stage 3: PPO on the scores of the reward model, from the policy of stage 1 and a critic from stage 2."""
    job = rewarded.bind(
        actor=TorchTrainer(sft_model, AdamW(lr=6e-4, betas=(0.9, 0.95), weight_decay=0.0)),
        critic=TorchCritic(rm, AdamW(lr=2e-3)),
        ref=TorchScorer(sft_model),
        reward_model=TorchRewardModel(rm),
        rollout=TorchRollout(),
    )
    keys = ("prompt", "data_source", "reward_model")
    truth = Validation(
        PromptData(write("heldout_prompts", 200, *keys)),
        every=10,
        changes={"repeat.n": 1},
        insert={"truth": After("generate", Reward(right, log="truth")), "all": After("reward", PassAtK(passed=0.99))},
        wire={"all.token_level_scores": "truth.token_level_scores"},
    )
    prompts = PromptData(write("prompts", 1024, *keys))
    return Training(job, prompts, steps=STEPS, prompts=32, seed=SEED, validation=truth, folder=str(FOLDER / "ppo"))


if __name__ == "__main__":
    first = supervised().run()
    second = preferred(first.folder / "actor").run()
    third = reinforced(first.folder / "actor", second.folder / "reward_model").run()
    print("accuracy of the reward model on held-out pairs:", second.validations[-1]["val/reward_model/accuracy"])
    for name in ("reward/mean", "truth/mean"):
        print(f"{name} of held-out prompts:", *(line[f"val/{name}"] for line in third.validations))
