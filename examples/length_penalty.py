"""A custom operator: every sampled token of an answer costs a little.

python examples/length_penalty.py
"""

import torch

from flowrl import After, Operator
from flowrl.columns import ResponseMask, TokenLevelScores
from flowrl.demo import compute_score
from flowrl.graphs import ppo


class LengthPenalty(Operator):
    """Scores, minus `coef` for every token that the policy sampled."""

    coef: float

    def __call__(self, token_level_scores: TokenLevelScores, response_mask: ResponseMask) -> TokenLevelScores:
        return torch.where(response_mask, token_level_scores - self.coef, token_level_scores)


plain = ppo(compute_score, max_new_tokens=28)
# Operators that read the scores of `reward` now read those of `length_penalty`; the mask is wired by its type.
graph = plain.edit(insert={"length_penalty": After("reward", LengthPenalty(0.01))})

if __name__ == "__main__":
    print(plain.diff(graph), end="\n\n")
    print(graph.mermaid())
