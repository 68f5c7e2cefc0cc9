"""A user's training, in a file of its own folder with a neighboring module."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.command_line import write

TRAINING = """
    from dataclasses import replace

    import neighbor
    from flowrl import After, Operator, PromptData, Training
    from flowrl.backends import SGD, TorchRollout, TorchScorer, TorchTrainer
    from flowrl.columns import TokenLevelScores
    from flowrl.graphs import grpo

    class Interrupt(Operator):
        def __call__(self, token_level_scores: TokenLevelScores) -> TokenLevelScores:
            raise KeyboardInterrupt

    graph = grpo(neighbor.digits, n=2, max_new_tokens=3)
    model = {model!r}
    job = graph.bind(actor=TorchTrainer(model, SGD(lr=0.1)), ref=TorchScorer(model), rollout=TorchRollout())
    training = Training(job, PromptData({data!r}), steps=3, prompts=2, seed=5, folder="own", save_model=False)
    interrupted = Training(
        job.edit(insert={{"interrupt": After("reward", Interrupt())}}), PromptData({data!r}), steps=1, prompts=2
    )
    saved = replace(interrupted, checkpoint_every=1)
    unbound = Training(graph.bind(rollout=TorchRollout()), PromptData({data!r}), steps=1, prompts=1)

    def short():
        return Training(job, PromptData({data!r}), steps=1, prompts=1, save_model=False)
"""

NEIGHBOR = """
    def digits(data_source, solution_str, ground_truth, extra_info=None):
        return sum(character.isdigit() for character in solution_str)
"""


@pytest.fixture
def training(tmp_path: Path, tiny: str, prompts_file: str) -> Path:
    """A user's file in its own folder, with a neighboring module."""
    write(tmp_path / "mine" / "neighbor.py", NEIGHBOR)
    return write(tmp_path / "mine" / "training.py", TRAINING.format(model=tiny, data=prompts_file))
