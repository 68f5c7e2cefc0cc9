"""The log-prob of each token, and the entropy of what it was drawn from, in one pass over logits of which but a tile
exists: those of some tokens, for a part of the vocabulary.

A tile gives the distribution within its part, and how likely the part is. Of these the rest is made: ``log p(v) =
log p(part) + log p(v | part)``, and ``H = H(part) + sum p(part) H(v | part)``, the chain rule of entropy (Cover &
Thomas 2006, theorem 2.2.1). The backward pass makes each tile again, turns it into its gradient in place,

    d log p(y) / d z_v = [v = y] - p_v        d H / d z_v = -p_v (log p_v + H),

and multiplies that into the gradients of states and head at once. So no distribution is ever written out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from flowrl.backends.torch.probes import AfterHead

Entropy = Literal["none", "value", "gradient"]
"""Whether the entropy is wanted, and whether its gradient is."""

_PART = 4096
"""Of the vocabulary in a tile, at most, where a head makes it: so its weights are read once for many tokens."""


class LMHead(NamedTuple):
    """What makes logits of the states of some tokens.

    Args:
        layer: the linear layer; None where the states are the logits.
        after: what follows it.
    """

    layer: nn.Linear | None = None
    after: AfterHead = AfterHead()

    def __call__(self, states: Tensor) -> Tensor:
        """Logits ``[tokens vocabulary]``."""
        return states if self.layer is None else self.after(self.layer(states))


def score_tokens(
    entropy: Entropy, head: LMHead, chunk: int, states: Tensor, targets: Tensor, temperature: Tensor
) -> tuple[Tensor, ...]:
    """Log-probs of tokens at their temperatures; and the entropy of what each was drawn from, if that is wanted.

    Log-probs are the same bit for bit with entropy and without, and with a gradient and without.

    Args:
        entropy: ``"none"``, its ``"value"`` alone, or its value with the ``"gradient"``.
        head: makes logits, in the dtype of its weights or that of the autocast region around.
        chunk: tokens whose logits exist at a time, at most.
        states: ``[tokens hidden]``, or the logits.
        targets: the tokens, int64 ``[tokens]``.
        temperature: ``[tokens]``; it gets no gradient.

    Returns:
        float32 ``[tokens]`` each.
    """
    device, layer = states.device.type, head.layer
    weight, bias = (None, None) if layer is None else (layer.weight, layer.bias)
    size, dtype = (states.shape[1], states.dtype) if weight is None else (len(weight), weight.dtype)
    if weight is not None and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    part = size if weight is None else -(-size // -(-size // _PART))
    cut = _Cut(dtype, head.after, part, max(1, min(chunk, _numbers(device, weight is not None) // part)))
    other = None if bool((temperature == 1).all()) else temperature.float()
    with torch.autocast(device, enabled=False):
        scored = _Scores.apply(entropy, cut, states, weight, bias, targets, other)  # type: ignore[no-untyped-call]
    return cast("tuple[Tensor, ...]", scored)


def _numbers(device: str, products: bool) -> int:
    """How many are in a tile.

    Logits that are there are read in what stays in a CPU's cache, 2 MB. `products` want more at a time, 8 MB, since
    each goes over a part of the head and of its gradient; and a GPU wants 16 MB.
    """
    if device != "cpu":
        return 1 << 22
    return 1 << 21 if products else 1 << 19


class _Cut(NamedTuple):
    """How logits are made, and cut into tiles.

    Args:
        dtype: of the head's product.
        after: what follows the head.
        part: how much of the vocabulary is in a tile.
        tokens: how many are in a tile.
    """

    dtype: torch.dtype
    after: AfterHead
    part: int
    tokens: int


class _Tile(NamedTuple):
    """Logits of some tokens for a part of the vocabulary.

    Args:
        number, part: which part.
        run: which tokens.
        states, weight: what the logits are the product of, in its dtype; None where the states are the logits.
        logits: over the temperature: float32 ``[tokens part]``. To be read only: they may be the states themselves.
        columns: where the targets stand, int64 ``[tokens 1]``; 0 of those that are not in this part.
        inside: whether they are in this part.
    """

    number: int
    part: slice
    run: slice
    states: Tensor
    weight: Tensor | None
    logits: Tensor
    columns: Tensor
    inside: Tensor


class _Tiles(NamedTuple):
    """All tiles; the fields are those of `_Cut`, and what is given to `score_tokens`.

    Args:
        temperature: None where it is 1 for all tokens.
    """

    cut: _Cut
    states: Tensor
    weight: Tensor | None
    bias: Tensor | None
    targets: Tensor
    temperature: Tensor | None

    @property
    def size(self) -> int:
        """Of the vocabulary."""
        return self.states.shape[1] if self.weight is None else len(self.weight)

    @property
    def parts(self) -> int:
        """Of the vocabulary, how many."""
        return -(-self.size // self.cut.part)

    def buffer(self) -> Tensor:
        """Memory for a tile."""
        return torch.empty(self.cut.tokens, self.cut.part, device=self.states.device)

    def each(self) -> Iterator[_Tile]:
        """Part by part; the logits of one are gone when the next is made."""
        cut, buffer, count = self.cut, self.buffer(), len(self.states)
        for index in range(self.parts):
            part = slice(index * cut.part, min((index + 1) * cut.part, self.size))
            weight, bias = (None if x is None else x[part].to(cut.dtype) for x in (self.weight, self.bias))
            # Of no tokens there is one tile, of none, so that gradients are 0.
            for start in range(0, max(count, 1), cut.tokens):
                run = slice(start, min(start + cut.tokens, count))
                states, inside = self.states[run].to(cut.dtype), self.targets[run] // cut.part == index
                columns = (self.targets[run] - part.start).where(inside, 0)[:, None]
                logits = self._logits(states, weight, bias, buffer)
                if self.temperature is not None:
                    logits = torch.div(logits, self.temperature[run, None], out=_like(logits, buffer))
                yield _Tile(index, part, run, states, weight, logits, columns, inside)

    def _logits(self, states: Tensor, weight: Tensor | None, bias: Tensor | None, buffer: Tensor) -> Tensor:
        """In `buffer`, if it can be."""
        if weight is None:
            return states if states.dtype == torch.float32 else _like(states, buffer).copy_(states)
        if self.cut.dtype != torch.float32:
            return self.cut.after(linear(states, weight, bias)).float()
        made = torch.mm(states, weight.T, out=buffer.view(-1)[: len(states) * len(weight)].view(-1, len(weight)))
        return self.cut.after(made if bias is None else made.add_(bias))

    def steepness(self, tile: _Tile) -> Tensor | float:
        """The slope of a tile's logits in what the head gives."""
        over = tile.logits if self.temperature is None else tile.logits * self.temperature[tile.run, None]
        return self.cut.after.slope(over)


def _like(tile: Tensor, buffer: Tensor) -> Tensor:
    """As much of `buffer` as a tile takes."""
    return buffer.view(-1)[: tile.numel()].view(tile.shape)


class _Scores(torch.autograd.Function):
    """`score_tokens`: what it takes beside tensors, and the fields of `_Tiles`."""

    @staticmethod
    def forward(ctx: Any, entropy: Entropy, cut: _Cut, *tensors: Any) -> tuple[Tensor, ...]:
        tiles = _Tiles(cut, *tensors)
        buffers = tiles.buffer(), tiles.buffer()
        found = torch.zeros(len(tiles.states), device=tiles.states.device)
        # Of each part: its highest logit, the log of what it sums to beside that, and the entropy in it.
        highest, more, within = found.new_zeros(3, len(found), tiles.parts)
        for tile in tiles.each():
            log_q, spare = (_like(tile.logits, buffer) for buffer in buffers)
            torch.log_softmax(tile.logits, 1, out=log_q)
            if tiles.parts > 1:
                highest[tile.run, tile.number], more[tile.run, tile.number] = tile.logits.amax(1), -log_q.amax(1)
            found[tile.run] += log_q.gather(1, tile.columns)[:, 0].where(tile.inside, 0.0)
            if entropy != "none":
                within[tile.run, tile.number] = -torch.exp(log_q, out=spare).mul_(log_q).sum(1)
        mass = (highest - highest.amax(1, keepdim=True) + more).log_softmax(1)  # log p of each part
        found += mass.gather(1, tiles.targets[:, None] // cut.part)[:, 0]
        of_all = (mass.exp() * (within - mass)).sum(1)
        ctx.entropy, ctx.cut = entropy, cut
        ctx.save_for_backward(*tensors, mass, of_all)
        if entropy == "value":
            ctx.mark_non_differentiable(of_all)
        return (found,) if entropy == "none" else (found, of_all)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, mass, entropy = ctx.saved_tensors
        tiles = _Tiles(ctx.cut, *tensors)
        if tiles.temperature is not None:
            slopes = tuple(slope / tiles.temperature for slope in slopes)
        gradients = _Gradients(tiles, ctx.needs_input_grad[2:5])
        buffers = tiles.buffer(), tiles.buffer()
        for tile in tiles.each():
            change, spare = gradients.room(tile, buffers[0]), _like(tile.logits, buffers[1])
            up, log_part = slopes[0][tile.run, None], mass[tile.run, tile.number, None]
            if ctx.entropy == "gradient":
                pull = slopes[1][tile.run, None] * log_part.exp()
                q = torch.exp(torch.log_softmax(tile.logits, 1, out=change), out=spare)
                change.add_(log_part + entropy[tile.run, None]).mul_(-pull).sub_(up * log_part.exp()).mul_(q)
            else:
                torch.softmax(tile.logits, 1, out=change).mul_(-up * log_part.exp())
            change.scatter_add_(1, tile.columns, up.where(tile.inside[:, None], 0.0))
            if ctx.cut.after != AfterHead():
                change.mul_(tiles.steepness(tile))
            gradients.add(tile, change)
        return None, None, *gradients.all(), None, None


class _Gradients:
    """Those of states, weight and bias: sums of products in float32 until the end; what is not wanted is None.

    Args:
        tiles: that they are made of, in turn.
        wanted: which.
    """

    def __init__(self, tiles: _Tiles, wanted: Sequence[bool]) -> None:
        self._of = tiles.states, tiles.weight, tiles.bias
        dtype = tiles.states.dtype if tiles.weight is None else torch.float32
        self._states, self._weight, self._bias = (
            torch.empty_like(x, dtype=dtype) if x is not None and want else None
            for x, want in zip(self._of, wanted, strict=True)
        )

    def room(self, tile: _Tile, buffer: Tensor) -> Tensor:
        """Float32 memory for the gradient of a tile's logits: where it is to be, if that can be."""
        if tile.weight is None and self._states is not None and self._states.dtype == torch.float32:
            return self._states[tile.run]
        return _like(tile.logits, buffer)

    def add(self, tile: _Tile, change: Tensor) -> None:
        """Take in the gradient of a tile's logits."""
        if tile.weight is None:
            if self._states is not None and self._states.dtype != torch.float32:
                self._states[tile.run] = change
            return
        narrow, first = change.to(tile.weight.dtype), tile.run.start == 0
        if self._states is not None:
            _add_product(self._states[tile.run], narrow, tile.weight, tile.number == 0)
        if self._weight is not None:
            _add_product(self._weight[tile.part], narrow.T, tile.states, first)
        if self._bias is not None:
            summed = change.sum(0)
            self._bias[tile.part] = summed if first else self._bias[tile.part] + summed

    def all(self) -> Iterator[Tensor | None]:
        """In the dtypes of what they are of."""
        found = zip((self._states, self._weight, self._bias), self._of, strict=True)
        return (None if x is None or of is None else x.to(of.dtype) for x, of in found)


def _add_product(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """Add the product to `total`, which holds nothing yet where it is the first."""
    if a.dtype == total.dtype:
        total.addmm_(a, b, beta=0.0 if first else 1.0)
    elif first:
        total.copy_(a @ b)
    else:
        total.add_(a @ b)
