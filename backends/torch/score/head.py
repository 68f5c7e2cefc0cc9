"""The head of a frozen model in another process: named by its folder, and read from there.

Of the folder only the head is read, once, and in float32; it must be, bit for bit, what the model itself computes with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from flowrl.backends.torch.probes import AfterHead
from flowrl.backends.torch.score.chunks import log_softmax
from flowrl.errors import DataError
from flowrl.sync.digest import weights_digest


@dataclass(frozen=True)
class FolderHead:
    """Where a head is; a `flowrl.protocols.heads.Head`.

    Args:
        folder: of the causal LM.
        digest: of its weight and bias in float32, as the model has them.
        after: what follows.
        dtype: what the model computes in.
    """

    folder: str
    digest: str
    after: AfterHead
    dtype: torch.dtype

    def log_probs(self, states: Tensor, temperature: Tensor) -> Tensor:
        """As `Head.log_probs`; reads the folder every time."""
        return self.opened(states.device).log_probs(states, temperature)

    def opened(self, device: torch.device) -> OpenHead:
        """Read its weights.

        Raises:
            BindError: there is no such folder in this process's machine, or it holds no causal LM.
            DataError: the folder holds another head.
        """
        from flowrl.backends.torch.train.shards import read_head  # here, since transformers takes seconds to import

        weights = read_head(self.folder)
        if (found := weights_digest(weights.items())) != self.digest:
            raise DataError(
                f"the head in {self.folder!r} has the digest {found[:12]}…, and the model that gave the states has "
                f"{self.digest[:12]}…; expected the folder that the model was loaded from, unchanged since, and the "
                f"same on all machines: start the job again once it is."
            )
        return OpenHead(self, weights["weight"], weights.get("bias")).to(device)


class OpenHead(nn.Module):
    """A head with its weights; a `flowrl.protocols.heads.Head`.

    Args:
        of: where it is from.
        weight: float32 ``[vocabulary hidden]``.
        bias: float32 ``[vocabulary]``, or None.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(self, of: FolderHead, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self._after, self._dtype = of.after, of.dtype
        # As autocast casts them for each product, but once.
        self.register_buffer("weight", weight.to(of.dtype))
        self.register_buffer("bias", None if bias is None else bias.to(of.dtype))

    def forward(self, states: Tensor) -> Tensor:
        """Logits ``[tokens vocabulary]``, in the arithmetic of the model that they are of, whatever surrounds this."""
        with torch.autocast(states.device.type, enabled=False):
            return self._after(functional.linear(states.to(self._dtype), self.weight, self.bias))

    @torch.no_grad()
    def log_probs(self, states: Tensor, temperature: Tensor) -> Tensor:
        """As `Head.log_probs`."""
        return log_softmax(self, states, temperature)

    def opened(self, device: torch.device) -> OpenHead:
        """Itself, on `device`."""
        return self.to(device)


def head_digest(lm: nn.Module) -> str | None:
    """The digest by which a head is known, of a causal LM whose weights are whole; None of a head that is no linear
    layer."""
    head = cast("nn.Module", lm.get_output_embeddings())  # type: ignore[operator]
    if not isinstance(head, nn.Linear):
        return None
    # Copies, since FSDP could not free a gathered weight any more once NumPy had seen its memory.
    return weights_digest((name, parameter.detach().clone()) for name, parameter in head.named_parameters())
