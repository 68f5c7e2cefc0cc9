"""The memory of a model's activations: it runs on tensors without data while `LiveBytes` counts them.

It runs the model's own code with the trainer's settings, so the trace has what autograd saves (Griewank & Walther 2008,
chapter 4), what gradient checkpointing recomputes (Chen et al. 2016, arXiv:1604.06174), and autocast's copies of
weights. A model of equal blocks is run with two and with three of them: each peak grows linearly with their number. If
each n-th is recomputed, the second run has n more.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from flowrl.backends.torch.load import quiet
from flowrl.backends.torch.probes import known
from flowrl.backends.torch.score.blocks import Checkpointing, blocks_of, checkpoint_blocks
from flowrl.backends.torch.score.packed import ATTENTION
from flowrl.backends.torch.sizing.live_bytes import LiveBytes
from flowrl.errors import BindError

if TYPE_CHECKING:  # it takes seconds to import
    from transformers import PreTrainedModel

FEW = 2
"""The fewest blocks of the smaller of two traces."""


class MicroBatch(NamedTuple):
    """Rows of equal length: `packed` into a line, or each in its own.

    Args:
        scored: the last tokens of each row, whose states the head reads.
    """

    rows: int
    tokens: int
    scored: int
    packed: bool

    @property
    def positions(self) -> int:
        """The tokens of all rows."""
        return self.rows * self.tokens


class Run(NamedTuple):
    """How a model computes.

    Args:
        bfloat16: under autocast.
        trains: with a backward pass.
        checkpoints: the blocks that it recomputes.
        sharded: the weights are gathered block by block, so their compute copies are not activations.
        routed: keeps the outputs of routers, for a load-balancing loss.
    """

    bfloat16: bool
    trains: bool
    checkpoints: Checkpointing = False
    sharded: bool = False
    routed: bool = False

    @property
    def period(self) -> int:
        """The number of blocks after which their checkpointing repeats."""
        return 1 if isinstance(self.checkpoints, bool | str) else self.checkpoints


class Peaks(NamedTuple):
    """Bytes of activations over the weights, their gradients and the inputs.

    Args:
        saved: alive after the forward pass, with its output.
        forward: the most in the forward pass.
        last: the most in the backward pass of the last block.
        rest: the most in the rest of it.
    """

    saved: int
    forward: int
    last: int = 0
    rest: int = 0

    @property
    def backward(self) -> int:
        """The most in the backward pass."""
        return max(self.last, self.rest)

    def over(self, other: Peaks, times: int) -> Peaks:
        """Those of a model with `times` as many more blocks than that of these, as that of `other` has."""
        return Peaks(*(few + (more - few) * times for few, more in zip(self, other, strict=True)))


def trace(lm: PreTrainedModel, batch: MicroBatch, run: Run) -> Peaks:
    """The peaks of the body of `lm`, a skeleton on the meta device, which is used up.

    Raises:
        BindError: the model's shapes depend on its data, so it cannot run without.
    """
    with quiet():
        if batch.packed:
            lm.set_attn_implementation(ATTENTION)
    lm.eval()
    blocks = blocks_of(lm)
    if run.bfloat16 and run.sharded:
        for block in filter(gathered_narrow, blocks):
            block.to(torch.bfloat16)
    stack, period = _stack(lm, blocks), run.period
    few = FEW + (len(blocks) - FEW) % period
    if stack is None or len(blocks) <= few or len({_shape_of(block) for block in blocks}) > 1:
        return _traced(_without_data(lm), blocks, batch, run)
    parent, name = stack
    setattr(parent, name, nn.ModuleList(blocks[: few + period]))
    more = _traced(_without_data(lm), blocks[: few + period], batch, run)
    setattr(parent, name, nn.ModuleList(blocks[:few]))
    return _traced(lm, blocks[:few], batch, run).over(more, (len(blocks) - few) // period)


def _without_data(lm: PreTrainedModel) -> PreTrainedModel:
    with FakeTensorMode(allow_non_fake_inputs=True):
        cast(nn.Module, lm).to_empty(device="cpu")
        lm.tie_weights()
    return lm


def _stack(lm: PreTrainedModel, blocks: list[nn.Module]) -> tuple[nn.Module, str] | None:
    """The module with the list of all blocks, and its name there; None without one."""
    for module in lm.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.ModuleList) and list(child) == blocks:
                return module, name
    return None


def _shape_of(block: nn.Module) -> tuple[Any, ...]:
    """What makes two blocks equal: their weights, and the kind of their attention."""
    parts = ((name, tuple(p.shape), p.requires_grad) for name, p in block.named_parameters())
    kind = getattr(block, "attention_type", None) or getattr(getattr(block, "self_attn", None), "sliding_window", None)
    return (type(block).__name__, kind, *parts)


def _traced(lm: PreTrainedModel, blocks: list[nn.Module], batch: MicroBatch, run: Run) -> Peaks:
    counter = LiveBytes()
    if run.checkpoints:
        checkpoint_blocks(lm, run.checkpoints, counter.elsewhere)
    for parameter in lm.parameters():
        if parameter.requires_grad and run.trains:
            parameter.grad = torch.zeros_like(parameter)
            counter.ignore([parameter.grad])
    counter.ignore([*lm.parameters(), *lm.buffers()])
    with _refusing(lm), counter, torch.set_grad_enabled(run.trains):
        return _run(lm.base_model, blocks, batch, run, counter)


def _run(body: Any, blocks: list[nn.Module], batch: MicroBatch, run: Run, counter: LiveBytes) -> Peaks:
    last: list[int] = []
    before = blocks[-1].register_forward_pre_hook(_marking(counter, last), with_kwargs=True) if blocks else None
    body.train(bool(run.checkpoints) and run.trains)
    with torch.autocast("cpu", torch.bfloat16, enabled=run.bfloat16):
        loss = _Scored.apply(*_states(body, batch, run.routed))  # type: ignore[no-untyped-call]
    if before is not None:
        before.remove()
    peaks = Peaks(counter.live, counter.mark())
    if not run.trains:
        return peaks
    loss.backward()
    rest = counter.mark()
    return peaks._replace(last=last[0] if last else rest, rest=rest)


class _Scored(torch.autograd.Function):
    """Stands in for the head and the loss: saves what it reads, and has a gradient for it."""

    @staticmethod
    def forward(ctx: Any, *read: Tensor) -> Tensor:
        ctx.save_for_backward(*read)
        return read[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors)


def _states(body: Any, batch: MicroBatch, routed: bool) -> list[Tensor]:
    """The last hidden states, as `flowrl.backends.torch.score.model.TorchModel` picks them, and what a load-balancing
    loss reads of routers."""
    shape = (1, batch.positions) if batch.packed else (batch.rows, batch.tokens)
    ids = torch.zeros(shape, dtype=torch.int64)
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "position_ids": torch.arange(batch.tokens).repeat(batch.rows).view(shape),
        "use_cache": False,
    }
    within = {"packed": ((batch.rows, batch.tokens),)} if batch.packed else {}
    found = body(**known(body, inputs), **within, **({"output_router_logits": True} if routed else {}))
    routers = [logits.float().softmax(-1).sum(0) for logits in (found.router_logits or ())] if routed else []
    ends = torch.arange(batch.tokens - batch.scored, batch.tokens)
    lines = torch.arange(batch.rows).repeat_interleave(batch.scored)
    places = ends.repeat(batch.rows)
    if batch.packed:
        lines, places = torch.zeros_like(lines), places + lines * batch.tokens
    return [found.last_hidden_state[lines, places], *routers]


def _marking(counter: LiveBytes, last: list[int]) -> Any:
    """A hook of a block that notes the peak when the gradient of its input is there."""

    def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.requires_grad]
        if given and not last:
            last.append(0)
            given[0].register_hook(lambda gradient: last.__setitem__(0, max(last[0], counter.mark())))

    return hook


def gathered_narrow(block: nn.Module) -> bool:
    """Whether a sharded block is gathered in bfloat16; see `flowrl.backends.torch.train.sharded.Sharded`."""
    return not any(isinstance(part, nn.LayerNorm) for part in block.modules())


@contextmanager
def _refusing(lm: PreTrainedModel) -> Iterator[None]:
    try:
        with quiet():
            yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        name = type(lm).__name__
        raise BindError(
            f"The activations of {name} cannot be predicted: the shapes in its forward pass depend on its tokens "
            f"({error.func}). State what the role takes: bind it with memory=<GiB>.",
            code="memory.untraceable",
            architecture=name,
        ) from error
