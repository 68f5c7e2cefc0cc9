"""The log-prob of each token, and the entropy of its distribution, in one pass over tiles of logits: those of some
tokens, for a part of the vocabulary.

A tile gives the distribution within its part, and the probability of the part: ``log p(v) = log p(part) +
log p(v | part)``, and ``H = H(part) + sum p(part) H(v | part)``, the chain rule of entropy (Cover & Thomas 2006,
theorem 2.2.1). The backward pass recomputes each tile, turns it into its gradient in place,

    d log p(y) / d z_v = [v = y] - p_v        d H / d z_v = -p_v (log p_v + H),

and adds its products to the gradients of states and head. So no full distribution is ever in memory.

If the processes of a mesh share the vocabulary, each computes the tiles of its part; they exchange the log-sum of the
part for each token, and add up log-probs and entropies. The gradients of the states add up over them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.nn.functional import linear

from flowrl.backends.torch.probes import AfterHead

Entropy = Literal["none", "value", "gradient"]
"""Whether to compute the entropy, and its gradient."""

_PART = 4096
"""The most of the vocabulary in a tile of a head, so that its weights are read once for many tokens."""


class VocabularyPart(NamedTuple):
    """The tokens from `start` to before `end`, whose logits this process computes, one of the `parts` of `group`.

    Args:
        number: of the part.
    """

    start: int
    end: int
    number: int
    parts: int
    group: ProcessGroup

    def own(self, targets: Tensor) -> Tensor:
        """The numbers of tokens in the part; -1 for those outside."""
        return (targets - self.start).where((targets >= self.start) & (targets < self.end), -1)

    def mass(self, log_sums: Tensor) -> Tensor:
        """The log-prob of the part, from the log of the sum of its exponentials: ``[tokens]``."""
        every = log_sums.new_empty(self.parts, len(log_sums))
        dist.all_gather(list(every.unbind()), log_sums.contiguous(), group=self.group)
        return every.log_softmax(0)[self.number]

    def total(self, x: Tensor) -> Tensor:
        """The sum over all parts, in place."""
        dist.all_reduce(x, group=self.group)
        return x


class LMHead(NamedTuple):
    """The map from states to logits: a linear `layer` (None if the states are the logits), then `after`; `part` is that
    of a layer whose vocabulary is shared."""

    layer: nn.Linear | None = None
    after: AfterHead = AfterHead()
    part: VocabularyPart | None = None

    def __call__(self, states: Tensor) -> Tensor:
        """Logits ``[tokens vocabulary]``.

        Without the layer's hooks, which gather its weights: its caller has gathered them, and ranks call this as often
        as they have chunks of tokens.
        """
        return states if self.layer is None else self.after(self.layer.forward(states))


def score_tokens(
    entropy: Entropy, head: LMHead, chunk: int, states: Tensor, targets: Tensor, temperature: Tensor
) -> tuple[Tensor, ...]:
    """Log-probs of tokens at their temperatures, and the entropy of their distributions unless it is ``"none"``.

    Log-probs are the same bit for bit with entropy and without, and with a gradient and without.

    Args:
        entropy: ``"none"``, only its ``"value"``, or its value with the ``"gradient"``.
        chunk: the most tokens whose logits exist at a time.
        states: ``[tokens hidden]``, or the logits.
        targets: the tokens, int64 ``[tokens]``.
        temperature: ``[tokens]``, without a gradient.

    Both are float32 ``[tokens]``.
    """
    device, layer = states.device.type, head.layer
    weight, bias = (None, None) if layer is None else (_own(layer.weight), _own(layer.bias))
    if head.part is not None:
        states, targets = sum_gradient(states, head.part.group), head.part.own(targets)
    size, dtype = (states.shape[1], states.dtype) if weight is None else (len(weight), weight.dtype)
    if weight is not None and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    cut = _Cut(dtype, head.after, *tile_of(size, chunk, device, weight is not None))
    other = None if bool((temperature == 1).all()) else temperature.float()
    with torch.autocast(device, enabled=False):
        scored = _Scores.apply(entropy, cut, head.part, states, weight, bias, targets, other)  # type: ignore[no-untyped-call]
    return cast("tuple[Tensor, ...]", scored)


def tile_of(size: int, chunk: int, device: str, products: bool = True) -> tuple[int, int]:
    """How much of a vocabulary of `size`, and how many tokens, a tile has; `products` are those of a head."""
    part = -(-size // -(-size // _PART)) if products else size
    return part, max(1, min(chunk, _numbers(device, products) // part))


def _numbers(device: str, products: bool) -> int:
    """The numbers in a tile: on a CPU 2 MB of given logits, which stay in its cache, or 8 MB of `products`, since each
    reads a part of the head and its gradient; on a GPU 16 MB."""
    if device != "cpu":
        return 1 << 22
    return 1 << 21 if products else 1 << 19


def sum_gradient(x: Tensor, group: ProcessGroup) -> Tensor:
    """`x`; in the backward pass, the sum of the gradients of all processes of `group`."""
    return cast(Tensor, _SumGradient.apply(x, group))  # type: ignore[no-untyped-call]


def summed(x: Tensor, group: ProcessGroup) -> Tensor:
    """The sum of `x` over all processes of `group`; all compute the same from it, so each gets its gradient."""
    return cast(Tensor, _Summed.apply(x, group))  # type: ignore[no-untyped-call]


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        found = x.clone()
        dist.all_reduce(found, group=group)
        return found

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        return slope, None


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        found = slope.clone()
        dist.all_reduce(found, group=ctx.group)
        return found, None


class _Cut(NamedTuple):
    """The computation of logits, in the `dtype` of the head's product, and their tiling by tokens of the vocabulary and
    rows."""

    dtype: torch.dtype
    after: AfterHead
    part: int
    tokens: int


class _Tile(NamedTuple):
    """Logits of some tokens for a part of the vocabulary.

    Args:
        states, weight: the factors of the logits, in their dtype; None if the states are the logits.
        logits: over the temperature: float32 ``[tokens part]``. Read-only: they may be the states themselves.
        columns: of the targets, int64 ``[tokens 1]``; 0 for those outside this part.
        inside: whether the targets are in this part.
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
    """All tiles; the fields are the arguments of `score_tokens`; the temperature is None if it is 1 for all tokens."""

    cut: _Cut
    states: Tensor
    weight: Tensor | None
    bias: Tensor | None
    targets: Tensor
    temperature: Tensor | None

    @property
    def size(self) -> int:
        """The size of the vocabulary."""
        return self.states.shape[1] if self.weight is None else len(self.weight)

    @property
    def parts(self) -> int:
        """The number of parts of the vocabulary."""
        return -(-self.size // self.cut.part)

    def buffer(self) -> Tensor:
        """Memory for a tile."""
        return torch.empty(self.cut.tokens, self.cut.part, device=self.states.device)

    def each(self) -> Iterator[_Tile]:
        """Iterate part by part; the next tile overwrites the logits."""
        cut, buffer, count = self.cut, self.buffer(), len(self.states)
        for index in range(self.parts):
            part = slice(index * cut.part, min((index + 1) * cut.part, self.size))
            weight, bias = (None if x is None else x[part].to(cut.dtype) for x in (self.weight, self.bias))
            # Without tokens there is one empty tile, so that gradients are 0.
            for start in range(0, max(count, 1), cut.tokens):
                run = slice(start, min(start + cut.tokens, count))
                states, inside = self.states[run].to(cut.dtype), self.targets[run] // cut.part == index
                columns = (self.targets[run] - part.start).where(inside, 0)[:, None]
                logits = self._logits(states, weight, bias, buffer)
                if self.temperature is not None:
                    logits = torch.div(logits, self.temperature[run, None], out=_like(logits, buffer))
                yield _Tile(index, part, run, states, weight, logits, columns, inside)

    def _logits(self, states: Tensor, weight: Tensor | None, bias: Tensor | None, buffer: Tensor) -> Tensor:
        """The logits, in `buffer` if possible."""
        if weight is None:
            return states if states.dtype == torch.float32 else _like(states, buffer).copy_(states)
        if self.cut.dtype != torch.float32:
            return self.cut.after(linear(states, weight, bias)).float()
        product = torch.mm(states, weight.T, out=buffer.view(-1)[: len(states) * len(weight)].view(-1, len(weight)))
        return self.cut.after(product if bias is None else product.add_(bias))

    def steepness(self, tile: _Tile) -> Tensor | float:
        """The derivative of a tile's logits in the head's output."""
        over = tile.logits if self.temperature is None else tile.logits * self.temperature[tile.run, None]
        return self.cut.after.slope(over)


def _own(parameter: Tensor | None) -> Tensor | None:
    """What this process has of a parameter of the head, with gradients."""
    split: Any = parameter
    return split.to_local() if hasattr(split, "to_local") else parameter


def _like(tile: Tensor, buffer: Tensor) -> Tensor:
    """A view of `buffer` in the shape of a tile."""
    return buffer.view(-1)[: tile.numel()].view(tile.shape)


class _Scores(torch.autograd.Function):
    """The autograd function of `score_tokens`; its tensors are the fields of `_Tiles`."""

    @staticmethod
    def forward(
        ctx: Any, entropy: Entropy, cut: _Cut, shared: VocabularyPart | None, *tensors: Any
    ) -> tuple[Tensor, ...]:
        tiles = _Tiles(cut, *tensors)
        buffers = tiles.buffer(), tiles.buffer()
        found = torch.zeros(len(tiles.states), device=tiles.states.device)
        # Of each part: its highest logit, the log of its sum relative to that, and the entropy in it.
        highest, more, within = found.new_zeros(3, len(found), tiles.parts)
        for tile in tiles.each():
            log_q, spare = (_like(tile.logits, buffer) for buffer in buffers)
            torch.log_softmax(tile.logits, 1, out=log_q)
            if tiles.parts > 1 or shared is not None:
                highest[tile.run, tile.number], more[tile.run, tile.number] = tile.logits.amax(1), -log_q.amax(1)
            found[tile.run] += log_q.gather(1, tile.columns)[:, 0].where(tile.inside, 0.0)
            if entropy != "none":
                within[tile.run, tile.number] = -torch.exp(log_q, out=spare).mul_(log_q).sum(1)
        mass = (highest - highest.amax(1, keepdim=True) + more).log_softmax(1)  # log p of each part
        if shared is not None:
            mass += shared.mass((highest + more).logsumexp(1))[:, None]
        of_target = mass.gather(1, tiles.targets[:, None].clamp(min=0) // cut.part)[:, 0]
        found += of_target if shared is None else of_target.where(tiles.targets >= 0, 0.0)
        of_all = (mass.exp() * (within - mass)).sum(1)
        if shared is not None:
            found, of_all = shared.total(torch.stack([found, of_all]))
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
        gradients = _Gradients(tiles, ctx.needs_input_grad[3:6])
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
        return None, None, None, *gradients.all(), None, None


class _Gradients:
    """The gradients of states, weight and bias, summed in float32; None for those that are not `needed`."""

    def __init__(self, tiles: _Tiles, needed: Sequence[bool]) -> None:
        self._of = tiles.states, tiles.weight, tiles.bias
        dtype = tiles.states.dtype if tiles.weight is None else torch.float32
        self._states, self._weight, self._bias = (
            torch.empty_like(x, dtype=dtype) if x is not None and need else None
            for x, need in zip(self._of, needed, strict=True)
        )

    def room(self, tile: _Tile, buffer: Tensor) -> Tensor:
        """Float32 memory for the gradient of a tile's logits: in its final place if possible."""
        if tile.weight is None and self._states is not None and self._states.dtype == torch.float32:
            return self._states[tile.run]
        return _like(tile.logits, buffer)

    def add(self, tile: _Tile, change: Tensor) -> None:
        """Add the gradient of a tile's logits."""
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
        """The gradients in the dtypes of their tensors."""
        found = zip((self._states, self._weight, self._bias), self._of, strict=True)
        return (None if x is None or of is None else x.to(of.dtype) for x, of in found)


def _add_product(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """Add the product to `total`, or overwrite it with the first one."""
    if a.dtype == total.dtype:
        total.addmm_(a, b, beta=0.0 if first else 1.0)
    elif first:
        total.copy_(a @ b)
    else:
        total.add_(a @ b)
