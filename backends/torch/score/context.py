"""Ulysses context parallelism (Jacobs et al. 2023, arXiv:2309.14509, section 3): several processes share each row.

All have the same rows. Each computes some consecutive tokens of the packed rows in every layer; around attention, an
all-to-all exchange gives it all tokens of some heads instead. It scores its own tokens, and a sum gives all processes
the scores of all tokens, so all compute the same loss. The backward pass of that sum takes the gradient of the own
tokens, so that the gradients of the weights add up over processes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from flowrl.backends.torch.probes import LENGTH, Inputs, known, probe_inputs, relative_error
from flowrl.backends.torch.score.rows import ShiftedRows, TokenInputs, packed
from flowrl.backends.torch.score.tiles import summed
from flowrl.backends.torch.train.mesh import ProcessMesh
from flowrl.errors import BindError

if TYPE_CHECKING:  # it takes seconds to import
    from transformers import PreTrainedModel

_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}
"""The kinds of layers whose heads attend separately."""


class Part(NamedTuple):
    """What a process computes of a micro-batch.

    Args:
        rows: its tokens.
        own: which of the scored tokens are its own: int64 ``[own]``, or all.
        lines, places: of its own tokens in `rows`, int64 ``[own]``.
        counted: which of its tokens count in sums over all tokens, bool ``[line place]``.
        within: further arguments for attention.
    """

    rows: ShiftedRows
    own: Tensor | slice
    lines: Tensor
    places: Tensor
    counted: Tensor
    within: dict[str, Any]


class Context:
    """One process computes each row."""

    size = 1

    @staticmethod
    def of(mesh: ProcessMesh) -> Context:
        """The context of this process."""
        return Context() if mesh.neighbors is None else Ulysses(mesh.spec.context, mesh.position.part, mesh.neighbors)

    def part(self, moved: ShiftedRows, lines: Tensor, places: Tensor) -> Part:
        """The part of this process, if the tokens at these lines and places are scored."""
        return Part(moved, slice(None), lines, places, moved.attention_mask, moved.within)

    def whole(self, values: Tensor, own: Tensor | slice, tokens: int) -> Tensor:
        """The values of all `tokens` from those of this process's own: ``[tokens ...]``."""
        return values

    def total(self, sums: Tensor) -> Tensor:
        """Sums over all tokens from those over the counted tokens of each process."""
        return sums


class Ulysses(Context):
    """The `size` processes of `group` share each row, and this one computes the part `place`; the number of heads must
    be a multiple of `size`."""

    def __init__(self, size: int, place: int, group: ProcessGroup) -> None:
        self.size, self._place, self._group = size, place, group

    def part(self, moved: ShiftedRows, lines: Tensor, places: Tensor) -> Part:
        """Equal consecutive parts of packed rows, the last ones padded. Rows with holes in their masks are not packed:
        each process computes them whole, and scores a part of their tokens."""
        if moved.runs is None:
            own = torch.arange(len(places), device=places.device).tensor_split(self.size)[self._place]
            counted = moved.attention_mask & (self._place == 0)
            return Part(moved, own, lines[own], places[own], counted, moved.within)
        tokens = moved.input_ids.shape[1]
        each = -(-tokens // self.size)
        first, missing = self._place * each, each * self.size - tokens
        columns = (moved.input_ids, moved.position_ids, moved.attention_mask)
        ids, positions, counted = (nn.functional.pad(x, (0, missing))[:, first : first + each] for x in columns)
        rows = moved._replace(input_ids=ids, position_ids=positions, attention_mask=torch.ones_like(counted))
        runs = (*moved.runs, (1, missing)) if missing else moved.runs
        own = ((places >= first) & (places < first + each)).nonzero().squeeze(1)
        return Part(rows, own, lines[own], places[own] - first, counted, {"packed": runs, "context": self})

    def whole(self, values: Tensor, own: Tensor | slice, tokens: int) -> Tensor:
        return cast(Tensor, _Whole.apply(values, own, tokens, self._group))  # type: ignore[no-untyped-call]

    def total(self, sums: Tensor) -> Tensor:
        return summed(sums, self._group)

    def to_heads(self, *parts: Tensor) -> list[Tensor]:
        """Exchange all heads of the own tokens for the own heads of all tokens: ``[1 head token head_dim]`` each.

        Fewer heads than processes are repeated. In an autocast region parts are exchanged in its dtype, in which
        attention computes.
        """
        device = parts[0].device.type
        if torch.is_autocast_enabled(device):
            parts = tuple(x.to(torch.get_autocast_dtype(device)) for x in parts)
        split = [self._repeated(x[0]).unflatten(0, (self.size, -1)) for x in parts]
        found = self._exchange(torch.cat([x.flatten(1) for x in split], 1)).split([x[0].numel() for x in split], 1)
        return [x.view(like.shape).transpose(0, 1).flatten(1, 2)[None] for x, like in zip(found, split, strict=True)]

    def to_tokens(self, out: Tensor) -> Tensor:
        """Exchange the own heads of all tokens for all heads of the own tokens: ``[1 token head head_dim]``."""
        return self._exchange(out[0].unflatten(0, (self.size, -1))).transpose(0, 1).flatten(1, 2)[None]

    def _repeated(self, heads: Tensor) -> Tensor:
        return heads.repeat_interleave(self.size // len(heads), 0) if len(heads) < self.size else heads

    def _exchange(self, blocks: Tensor) -> Tensor:
        """Send block ``i`` of ``[size ...]`` to process ``i``, and return those received, in order."""
        return cast(Tensor, _Exchange.apply(blocks, self._group))  # type: ignore[no-untyped-call]


class Layer(NamedTuple):
    """What fused attention reads of a layer, for a part of its heads."""

    num_key_value_groups: int
    is_causal: bool


class _Exchange(torch.autograd.Function):
    """An all-to-all of equal blocks; gradients go back the same way."""

    @staticmethod
    def forward(ctx: Any, blocks: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        blocks = blocks.contiguous()
        received = torch.empty_like(blocks)
        dist.all_to_all_single(received, blocks, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        return _Exchange.apply(slope, ctx.group), None  # type: ignore[no-untyped-call]


class _Whole(torch.autograd.Function):
    """See `Context.whole`; all processes compute the same from the result, so each gets the gradient of its own."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, own: Tensor, tokens: int, group: ProcessGroup) -> Tensor:
        ctx.save_for_backward(own)
        found = values.new_zeros(tokens, *values.shape[1:])
        found[own] = values
        dist.all_reduce(found, group=group)
        return found

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None, None]:
        return slope[ctx.saved_tensors[0]], None, None, None


def refuse_uncut(lm: PreTrainedModel, folder: str, backend: str) -> None:
    """Raise `BindError` if not all layers of a model (`skeleton`) mix tokens only by fused attention, head by head."""
    if why := _why_uncut(lm):
        _refuse(lm, folder, backend, why)


def _why_uncut(lm: PreTrainedModel) -> str | None:
    config = lm.config.get_text_config()
    ropes = getattr(config, "rope_parameters", None) or {}
    kinds = {str(each.get("rope_type")) for each in (ropes, *ropes.values()) if isinstance(each, dict)}
    if others := set(getattr(config, "layer_types", None) or ()) - _ATTENTION:
        return f"it has layers of {', '.join(sorted(others))}"
    if lm._is_stateful:
        return "it has recurrent layers"
    if lm.config._attn_implementation != "sdpa":
        return f"its attention is {lm.config._attn_implementation!r}, and only fused attention (sdpa) is cut by heads"
    if getattr(config, "attn_logit_softcapping", None):
        return "fused attention does not cap logits (attn_logit_softcapping)"
    if longest := kinds & {"dynamic", "longrope"}:
        return f"its rotary frequencies ({', '.join(longest)}) depend on the longest row of each process"
    return None


def refuse_other_outputs(
    probe: Inputs, model: PreTrainedModel, context: Ulysses, unpacked: str | None, folder: str, bound: float
) -> None:
    """Raise `BindError` if rows that are cut have other outputs than whole ones; `unpacked` is why rows cannot be
    packed. A collective of the processes of `context`."""
    why = unpacked or _fault(probe, model, context, bound)
    if why is not None:
        _refuse(model, folder, "A mesh", why)


def _fault(probe: Inputs, model: PreTrainedModel, context: Ulysses, bound: float) -> str | None:
    probe = probe_inputs(model, probe["input_ids"].device, rows=3)
    lengths = torch.tensor([LENGTH - 3, LENGTH, LENGTH - 5], device=probe["input_ids"].device)
    mask = probe["position_ids"] < lengths[:, None]
    moved = packed(TokenInputs(probe["input_ids"], mask, probe["position_ids"], mask))
    lines, places = moved.find(*mask.nonzero(as_tuple=True))
    part = context.part(moved, lines, places)
    try:
        whole = model(**known(model, moved.inputs), **moved.within)[0][lines, places]
        own = model(**known(model, part.rows.inputs), **part.within)[0][part.lines, part.places]
        found = context.whole(own, part.own, len(whole))
    except Exception as error:
        return f"over parts of rows it raises {type(error).__name__}: {error}"
    if not (distance := relative_error(found, whole)) <= bound:
        return f"its outputs for parts of rows differ by {distance:.2g} from those of whole rows"
    return None


def _refuse(lm: nn.Module, folder: str, backend: str, why: str) -> None:
    raise BindError(
        f"{backend} with context= cannot cut the rows of {type(lm).__name__} in {folder!r}, because {why}. Leave "
        f"context out, and lower max_tokens if rows do not fit in memory.",
        code="mesh.no-context",
        path=folder,
        architecture=type(lm).__name__,
    )
