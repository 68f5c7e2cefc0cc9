"""Digests of weights, to check that a sender and a receiver hold the same numbers.

The digest of a tensor is xxh3-128 over its name, dtype, shape and bytes; that of a set of weights is xxh3-128 over the
digests of its tensors, sorted by name. So tensors can be hashed in any order, and a mismatch names the tensors. A sync
hashes each tensor once per side: as it leaves the trainer, and where it ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
import xxhash
from torch import Tensor

from flowrl.sync.pieces import in_pieces

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def named_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """The weights of a Hugging Face model under the names that `save_pretrained` writes, sorted, tied ones once.

    The tensors are the live ones, or copies where the model stores several of them fused (experts): those of a layer at
    a time.
    """
    from transformers.modeling_utils import remove_tied_weights_from_state_dict  # here, since it takes seconds

    state = remove_tied_weights_from_state_dict(model.state_dict(), model)
    for piece in in_pieces(model, state):
        yield from piece.convert(model, state)


def tensor_digest(name: str, tensor: Tensor) -> str:
    """xxh3-128 of one named tensor, as 32 hex digits."""
    digest = xxhash.xxh3_128(f"{name}\n{tensor.dtype}\n{tuple(tensor.shape)}\n".encode())
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)  # bytes, since NumPy has no bfloat16
    digest.update(content.numpy().data)
    return digest.hexdigest()


def combine(digests: Mapping[str, str]) -> str:
    """xxh3-128 of a set of weights, given the `tensor_digest` of each under its name."""
    return xxhash.xxh3_128_hexdigest("\n".join(f"{name} {digests[name]}" for name in sorted(digests)).encode())


def weights_digest(weights: Iterable[tuple[str, Tensor]]) -> str:
    """xxh3-128 of a set of named weights, in any order, as 32 hex digits."""
    return combine({name: tensor_digest(name, tensor) for name, tensor in weights})


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one dtype and shape have the same bits; unlike `torch.equal`, NaN equals itself."""
    flat = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*flat)
