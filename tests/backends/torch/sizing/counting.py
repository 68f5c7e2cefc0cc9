"""The memory of a real update, counted independently of the prediction: all storages are asked for their size after
every operation."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3MoeConfig

from flowrl.backends.torch.score import tiles
from flowrl.protocols.protocols import MiniBatch
from tests.support.models import char_tokenizer

ROWS, PROMPT, RESPONSE = 4, 32, 96
IDS = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
SIZE = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}


def config(kind: str, **changes: Any) -> PreTrainedConfig:
    """Four layers of hidden size 256."""
    common = {
        "vocab_size": 512,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        **IDS,
        **SIZE,
        **changes,
    }
    if kind == "llama":
        return LlamaConfig(**{"intermediate_size": 768, **common})
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    return Qwen3MoeConfig(**{"intermediate_size": 512, **experts, **common})


def folder_of(path: Any, kind: str, **changes: Any) -> str:
    """The folder of a random model with a tokenizer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config(kind, **changes), dtype=torch.float32)
    model.save_pretrained(path)
    char_tokenizer().save_pretrained(path)
    return str(path)


class Batch(NamedTuple):
    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    response_mask: Tensor
    temperature: Tensor


def batch() -> Batch:
    """Rows of equal length without padding."""
    tokens = PROMPT + RESPONSE
    ids = torch.randint(2, 500, (ROWS, tokens), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(tokens).repeat(ROWS, 1)
    mask = torch.ones(ROWS, RESPONSE, dtype=torch.bool)
    return Batch(ids, torch.ones_like(ids).bool(), positions, mask, torch.ones(ROWS))


class Sum:
    """The weighted sum of log-probs."""

    wants_entropy, of_distribution, of_tokens = False, None, True

    def __call__(self, output: Tensor, entropy: Any, rows: Any, weights: Tensor, metrics: Any) -> Tensor:
        return (output * weights).sum()


class Allocations(TorchDispatchMode):
    """The bytes of all storages that operations read or write, by the tag of the time at which they were first seen;
    those of `ignore` count nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, tuple[Any, str]] = {}
        self._ignored: set[int] = set()
        self.tag = "activations"
        self.peak: dict[str, int] = {}

    def ignore(self, *tensors: Tensor) -> None:
        self._ignored |= {local(tensor).untyped_storage()._cdata for tensor in tensors}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, found)):
            if isinstance(tensor, Tensor) and tensor.device.type != "meta":
                storage = local(tensor).untyped_storage()
                key = storage._cdata
                if key not in self._ignored and (key not in self._seen or self._seen[key][0]() is None):
                    self._seen[key] = weakref.ref(storage), self.tag
        sizes: dict[str, int] = {}
        for key, (reference, tag) in list(self._seen.items()):
            if (storage := reference()) is None:
                del self._seen[key]
            else:
                sizes[tag] = sizes.get(tag, 0) + storage.nbytes()
        if sum(sizes.values()) > sum(self.peak.values()):
            self.peak = sizes
        return found


def local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@contextmanager
def tagging(counter: Allocations) -> Iterator[None]:
    """Tag what the tiles of logits allocate."""

    def tagged(function: Callable[..., Any]) -> Any:
        def call(*args: Any) -> Any:
            counter.tag = "logits"
            try:
                return function(*args)
            finally:
                counter.tag = "activations"

        return staticmethod(call)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("forward", "backward"):
            patch.setattr(tiles._Scores, name, tagged(getattr(tiles._Scores, name)))
        yield


def parts_of(tensor: Tensor) -> list[Tensor]:
    """A tensor, or those that one in 8 bits has."""
    own: Any = local(tensor)
    names = own.__tensor_flatten__()[0] if hasattr(own, "__tensor_flatten__") else []
    return [getattr(own, name) for name in names] or [own]


def size_of(tensor: Tensor) -> int:
    """The bytes of a tensor, or of those that one in 8 bits has."""
    return sum(part.nbytes for part in parts_of(tensor))


def step(engine: Any) -> int:
    """The most bytes that the second step of an engine's optimizer makes and frees."""
    parameters, optimizer = list(engine.model.parameters()), engine.learner.optimizer
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values()]
    states += [part for value in states for part in parts_of(value)]
    counter = Allocations()
    counter.ignore(*parameters, *(parameter.grad for parameter in parameters), *states)
    with counter:
        optimizer.step()
    return sum(counter.peak.values())


class Elsewhere:
    """Copies tensors as if to other memory, which `counter` does not count."""

    def __init__(self) -> None:
        self.counter = Allocations()
        self.copies: list[Tensor] = []

    def __call__(self, tensor: Tensor) -> Tensor:
        with _disable_current_modes():  # no operation that a counter sees
            self.copies.append(tensor.detach().clone())
        self.counter.ignore(self.copies[-1])
        return self.copies[-1]


@dataclass
class Measured:
    """Bytes of a real update, by part."""

    weights: int = 0
    gradients: int = 0
    states: int = 0
    peak: dict[str, int] = field(default_factory=dict)

    @property
    def passes(self) -> int:
        """The most that one moment took over weights, gradients and states."""
        return sum(self.peak.values()) - self.gradients


def update(engine: Any, elsewhere: Elsewhere | None = None) -> Measured:
    """Measure the second update of an engine; what is copied `elsewhere` counts nothing."""
    rows, whole = batch(), [MiniBatch(torch.arange(ROWS), torch.full((ROWS, RESPONSE), 1.0), None)]
    engine.update(rows, whole, Sum())
    counter, states = Allocations(), engine.learner.optimizer.state.values()
    if elsewhere is not None:
        elsewhere.counter = counter
    parameters = list(engine.model.parameters())
    each = [value for state in states for value in state.values()]
    counter.ignore(*parameters, *engine.model.buffers(), *each, *rows)
    gradients: list[int] = []

    class Noting(Sum):
        def __call__(self, *args: Any) -> Tensor:
            gradients.append(sum(local(p.grad).nbytes for p in parameters if p.grad is not None))
            return super().__call__(*args)

    with tagging(counter), counter:
        engine.update(rows, whole, Noting())
    unique = {local(p).untyped_storage()._cdata: local(p).nbytes for p in parameters}
    return Measured(sum(unique.values()), gradients[0], sum(map(size_of, each)), counter.peak)
