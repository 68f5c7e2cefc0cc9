"""Digests of weights, to check that a sender and a receiver hold the same numbers.

The digest of a tensor is xxh3-128 over its name, dtype, shape and bytes; that of a set of weights is xxh3-128 over the
digests of its tensors, sorted by name. So tensors can be hashed in any order, and a mismatch names the tensors. A sync
hashes each tensor once per side: as it leaves the trainer, and where it ends.

xxh3 is a hash of CPUs. On other devices the bytes are hashed there, by `hash64`, and only its 64 bits go into xxh3.
Such a digest names its algorithm, so that a receiver on any device can compute it too; and so does that of a set, which
the receipt has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Literal

import torch
import xxhash
from torch import Tensor

from flowrl.sync.hash64 import hash64
from flowrl.sync.pieces import in_pieces

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Algorithm = Literal["xxh3", "hash64"]
"""How the bytes of a tensor are hashed."""
_ALGORITHMS: tuple[Algorithm, ...] = ("xxh3", "hash64")


def named_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """The weights of a Hugging Face model under the names that `save_pretrained` writes, sorted, tied ones once.

    The tensors are the live ones, or copies where the model stores several of them fused (experts): those of a layer at
    a time.
    """
    from transformers.modeling_utils import remove_tied_weights_from_state_dict  # here, since it takes seconds

    state = remove_tied_weights_from_state_dict(model.state_dict(), model)
    for piece in in_pieces(model, state):
        yield from piece.convert(model, state)


def algorithm_for(tensor: Tensor) -> Algorithm:
    """The algorithm that hashes a tensor where it is: xxh3 on a CPU, and hash64 on other devices."""
    return "xxh3" if tensor.device.type == "cpu" else "hash64"


def algorithm_of(digest: str) -> Algorithm:
    """The algorithm of a digest."""
    return "hash64" if digest.startswith("hash64:") else "xxh3"


def tensor_digest(name: str, tensor: Tensor, algorithm: Algorithm = "xxh3") -> str:
    """xxh3-128 of one named tensor, as 32 hex digits; of its `hash64` in place of its bytes, as ``hash64:`` and 32
    digits."""
    digest = xxhash.xxh3_128(f"{name}\n{tensor.dtype}\n{tuple(tensor.shape)}\n".encode())
    if algorithm == "hash64":
        digest.update(hash64(tensor).to_bytes(8, "little"))
        return f"hash64:{digest.hexdigest()}"
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)  # bytes, since NumPy has no bfloat16
    digest.update(content.numpy().data)
    return digest.hexdigest()


def has_digest(name: str, tensor: Tensor, digest: str) -> bool:
    """Whether a named tensor has a digest, by the algorithm of the digest."""
    return tensor_digest(name, tensor, algorithm_of(digest)) == digest


def digest_to_bytes(digest: str) -> bytes:
    """A digest of a tensor as 17 bytes: the algorithm, and 128 bits."""
    return bytes([_ALGORITHMS.index(algorithm_of(digest))]) + bytes.fromhex(digest.rpartition(":")[2])


def digest_of_bytes(raw: bytes) -> str:
    """The digest that `digest_to_bytes` wrote."""
    prefix = "" if raw[0] == _ALGORITHMS.index("xxh3") else f"{_ALGORITHMS[raw[0]]}:"
    return prefix + raw[1:].hex()


def combine(digests: Mapping[str, str]) -> str:
    """xxh3-128 of a set of weights, given the `tensor_digest` of each under its name; with ``hash64:`` before it if any
    of them was hashed so."""
    prefix = "hash64:" if any(algorithm_of(digest) == "hash64" for digest in digests.values()) else ""
    return prefix + xxhash.xxh3_128_hexdigest("\n".join(f"{name} {digests[name]}" for name in sorted(digests)).encode())


def weights_digest(weights: Iterable[tuple[str, Tensor]]) -> str:
    """xxh3-128 of a set of named weights, in any order, as 32 hex digits."""
    return combine({name: tensor_digest(name, tensor) for name, tensor in weights})


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one dtype and shape have the same bits; unlike `torch.equal`, NaN equals itself."""
    flat = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*flat)
