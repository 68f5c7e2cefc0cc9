"""The head of a frozen model in another process: identified by its folder and read from there.

Only the head is read, once, in float32; it must equal the model's own head bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from flowrl.backends.torch.probes import AfterHead
from flowrl.backends.torch.score.chunks import log_softmax
from flowrl.errors import DataError
from flowrl.sync.digest import weights_digest


@dataclass(frozen=True)
class FolderHead:
    """A head by its folder; a `flowrl.protocols.heads.Head`.

    Args:
        digest: of its weight and bias in float32, as in the model.
        after: the function that the model applies to its output.
    """

    folder: str
    digest: str
    after: AfterHead
    dtype: torch.dtype

    def log_probs(self, states: Tensor, temperature: Tensor) -> Tensor:
        """As `Head.log_probs`; reads the folder every time."""
        return self.load(states.device).log_probs(states, temperature)

    def load(self, device: torch.device) -> LoadedHead:
        """Read its weights."""
        from flowrl.backends.torch.train.shards import read_head  # here, since transformers takes seconds to import

        weights = read_head(self.folder)
        if (found := weights_digest(weights.items())) != self.digest:
            raise DataError(
                f"The head in {self.folder!r} has the digest {found[:12]}…, but the model that computed the hidden "
                f"states has {self.digest[:12]}…: the folder has changed, or differs between machines. Restore it, and "
                f"start the job again.",
                code="model.head-changed",
                path=self.folder,
                found=found,
                expected=self.digest,
            )
        return LoadedHead(self, weights["weight"], weights.get("bias")).to(device)


class LoadedHead(nn.Module):
    """A `flowrl.protocols.heads.Head` with its weights: float32 ``[vocabulary hidden]`` and ``[vocabulary]``."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, of: FolderHead, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self._after, self._dtype = of.after, of.dtype
        # As autocast casts them for each product, but once.
        self.register_buffer("weight", weight.to(of.dtype))
        self.register_buffer("bias", None if bias is None else bias.to(of.dtype))

    def forward(self, states: Tensor) -> Tensor:
        """Logits ``[tokens vocabulary]``, in the dtype of the model, in any autocast region."""
        with torch.autocast(states.device.type, enabled=False):
            return self._after(functional.linear(states.to(self._dtype), self.weight, self.bias))

    @torch.no_grad()
    def log_probs(self, states: Tensor, temperature: Tensor) -> Tensor:
        """As `Head.log_probs`."""
        return log_softmax(self, states, temperature)

    def load(self, device: torch.device) -> LoadedHead:
        """Itself, on `device`."""
        return self.to(device)
