"""The memory of the head of a causal LM and its tiles of logits; see `flowrl.backends.torch.score.tiles`."""

from __future__ import annotations

from typing import NamedTuple

from flowrl.backends.torch.score.tiles import tile_of

FLOAT = 4
"""Bytes of a float32."""


class Head(NamedTuple):
    """A linear head, and how it computes.

    Args:
        tokens: whose states it reads in a micro-batch.
        chunk: the most tokens of a tile.
        device: ``"cuda"`` or ``"cpu"``.
        bfloat16: its product is in bfloat16.
        trained: it has a gradient.
        whole: of a loss of full distributions, which has those of a chunk of tokens, not of a tile.
    """

    vocabulary: int
    hidden: int
    tokens: int
    chunk: int
    device: str
    bfloat16: bool
    trained: bool
    whole: bool = False

    @property
    def forward(self) -> int:
        """The most bytes in the forward pass, besides its states.

        Three buffers of a tile, and of each token and part of the vocabulary its highest logit, sum, entropy and
        probability. In bfloat16 also the casts of both factors, and each product with its float32 copy, while that of
        the tile before is alive.
        """
        part, run = self._tile
        sizes = 3 * run * part * FLOAT + self.tokens * FLOAT * (4 * self._parts + 3)
        if not self.bfloat16:
            return sizes
        first = min(run, self.tokens)
        later = first if self._parts > 1 else min(run, self.tokens - first)
        products = first * part * FLOAT + later * part * (2 + FLOAT) if later else first * part * (2 + FLOAT)
        return sizes + products + 2 * self.hidden * (part * min(self._parts, 2) + first)

    @property
    def backward(self) -> int:
        """The most bytes in its backward pass: as in the forward one, with the gradients of its states and weights."""
        return self.forward + self.tokens * self.hidden * FLOAT + self.gradient

    @property
    def gradient(self) -> int:
        """Bytes of the gradient of its weights."""
        return self.vocabulary * self.hidden * FLOAT if self.trained else 0

    @property
    def _tile(self) -> tuple[int, int]:
        if self.whole:
            return self.vocabulary, min(self.chunk, self.tokens)
        return tile_of(self.vocabulary, self.chunk, self.device)

    @property
    def _parts(self) -> int:
        return -(-self.vocabulary // self._tile[0])
