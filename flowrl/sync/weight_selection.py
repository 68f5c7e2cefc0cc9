"""`WeightSelection`: which of a trainer's tensors an engine needs, and the dtypes in which they are sent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from flowrl.sync.probe import Probe

FLOAT32_PARTS = frozenset(
    {"A_log", "conv1d", "q_conv1d", "k_conv1d", "v_conv1d"}  # state-space mixers, and linear attention (Kimi, Ling)
    | {"gate", "router", "e_score_correction_bias"}  # routers of tokens to experts; Ernie's biases are a matrix
    | {"indexer", "ape", "position_bias"}  # sparse attention of DeepSeek
    | {"fn", "attn_hc", "ffn_hc", "hc_head", "hc_fn", "hc_attn_fn", "hc_ffn_fn", "hc_head_fn"}  # hyper-connections
)
"""Parts of names of matrices that engines store in float32 in any compute dtype. They are small; an unnecessary entry
costs only bytes."""


class Since(NamedTuple):
    """That only the changes since an engine's last sync are sent; see `flowrl.sync.shadow.Shadow`.

    Args:
        engine: the role of the engine.
        base: the last sync of all senders and receivers; None sends all weights.
        sync: a new name for this one.
    """

    engine: str
    base: str | None
    sync: str


@dataclass(frozen=True)
class WeightSelection:
    """What an engine requests from a trainer in another process.

    Args:
        part: the trainer's method that returns the tensors.
        rounds_to: the engine's compute dtype; None leaves matrices unchanged.
        probe: what the trainer scores before it sends them; None without a probe.
        since: None sends all of them.
    """

    part: Literal["weights", "adapter_weights"] = "weights"
    rounds_to: torch.dtype | None = None
    probe: Probe | None = None
    since: Since | None = None

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype in which matrices are sent; None is unchanged."""
        return self.rounds_to if self.part == "weights" else None


def rounds(name: str, tensor: Tensor, dtype: torch.dtype | None) -> bool:
    """Whether a weight is sent in `dtype` to an engine that stores matrices in it: float32 matrices are, which halves
    their bytes, except `FLOAT32_PARTS`."""
    matrix = dtype is not None and tensor.dtype == torch.float32 and tensor.ndim > 1
    return matrix and FLOAT32_PARTS.isdisjoint(name.split("."))


Weights = Iterator[tuple[str, Tensor]]
"""Names and tensors."""


class GatheredWeights(Weights):
    """Weights that ranks gather as they are read, so that shards can be rounded before; a collective.

    Args:
        gather: yields the weights, `rounded` to a dtype.
        deal: yields the share of them that this rank sends, in `outgoing` rounds, `rounded` to a dtype. Only this rank
            gathers them.
    """

    def __init__(
        self,
        gather: Callable[[torch.dtype | None], Weights],
        deal: Callable[[torch.dtype | None], Iterator[Weights]],
    ) -> None:
        self._gather, self._deal = gather, deal
        self._weights = gather(None)

    def round_to(self, dtype: torch.dtype | None) -> None:
        """Round the weights, of which none has been read."""
        self._weights = self._gather(dtype)

    def rounds(self, dtype: torch.dtype | None) -> Iterator[Weights]:
        """The share of this rank, in place of all weights, of which none has been read."""
        rounds = self._deal(dtype)
        self._weights = chain.from_iterable(rounds)
        return rounds

    def __next__(self) -> tuple[str, Tensor]:
        return next(self._weights)


def rounded(weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    """Weights for an engine that stores matrices in `dtype`: those that `rounds` names are rounded before they are
    sent, shards before they are gathered, and the others are unchanged."""
    if isinstance(weights, GatheredWeights):
        weights.round_to(dtype)
    return ((name, tensor.detach().to(dtype) if rounds(name, tensor, dtype) else tensor) for name, tensor in weights)


def outgoing(weights: Weights, dtype: torch.dtype | None, share: int | None) -> Iterator[Weights]:
    """What one of several ranks sends, `rounded`, in rounds: a collective gathers what all of them send in a round, so
    a rank that sends nothing then has a round, too.

    Weights that are not `GatheredWeights` are all of share 0.

    Args:
        weights: those of a trainer, of which none has been read.
        share: of the rank; see `flowrl.protocols.mesh.Position`. None sends all weights, in one round.
    """
    if share is None:
        return iter([rounded(weights, dtype)])
    if isinstance(weights, GatheredWeights):
        return (rounded(part, dtype) for part in weights.rounds(dtype))
    return iter([(one for one in rounded(weights, dtype) if share == 0)])


def sent_bytes(shapes: Mapping[str, Sequence[int]], dtype: torch.dtype | None) -> int:
    """The bytes of float32 weights of these shapes, `rounded` for an engine."""
    weights = ((name, torch.empty(*shape, device="meta")) for name, shape in shapes.items())
    return sum(tensor.nbytes for _, tensor in rounded(weights, dtype))


def dtype_mismatch(sent: torch.dtype, held: torch.dtype) -> str | None:
    """Why a tensor of one dtype does not fit an engine of another; None if it does."""
    if sent == held or (sent.is_floating_point and held.is_floating_point and sent.itemsize >= held.itemsize):
        return None
    names = [str(dtype).removeprefix("torch.") for dtype in (sent, held)]
    if sent.is_floating_point and held.is_floating_point:
        return f"was rounded to {names[0]} before it came, and the engine holds {names[1]}"
    return f"is {names[0]}, and the engine holds {names[1]}"
