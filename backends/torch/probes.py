"""What a model is asked over a few tokens before it computes anything that counts.

Architectures differ in what they make of attention, padding, heads and training mode, and few say so. So it is tried
out: each question costs a forward pass or two over some ten tokens.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from flowrl.errors import BindError

if TYPE_CHECKING:  # it takes seconds to import
    from transformers import PreTrainedModel

Attention = Literal["sdpa", "eager"]
"""Torch's fused `scaled_dot_product_attention`, or the plain products of an architecture's own code."""

Inputs = dict[str, Any]

LENGTH = 8


def tolerance(dtype: torch.dtype) -> float:
    """How far two ways to compute one thing may be apart (`apart`) that differ by rounding alone.

    Float32 is coarse too where torch was told to multiply in TF32 or bfloat16.
    """
    return 1e-3 if dtype == torch.float32 and _multiplies_in_float32() else 0.2


def _multiplies_in_float32() -> bool:
    try:
        return torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # it was told by `torch.backends...fp32_precision`, and says no more
        return False


def apart(found: Tensor, truth: Tensor) -> float:
    """The distance of `found` from `truth`, as a share of the length of `truth`."""
    return float((found.double() - truth.double()).norm() / truth.double().norm())


def probe_inputs(lm: PreTrainedModel, device: torch.device, rows: int = 1) -> Inputs:
    """Tokens ``[rows LENGTH]`` of any vocabulary, with what a model wants beside them."""
    size = cast(nn.Embedding, lm.get_input_embeddings()).num_embeddings
    ids = torch.arange(rows * LENGTH, device=device).view(rows, LENGTH) % size
    positions = torch.arange(LENGTH, device=device).expand(rows, -1)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "position_ids": positions,
        "use_cache": False,
    }


def padded(probe: Inputs, left: int, right: int) -> Inputs:
    """`probe` with padding on both sides, as rows of unequal length have it."""
    wider = {name: nn.functional.pad(tensor, (left, right)) for name, tensor in probe.items() if name != "use_cache"}
    return {**wider, "use_cache": False}


def known(model: nn.Module, inputs: Inputs) -> Inputs:
    """The inputs that a model knows; not all know position ids."""
    names = inspect.signature(model.forward).parameters
    return {name: value for name, value in inputs.items() if name in names}


def settle_attention(probe: Inputs, lm: PreTrainedModel, named: Attention | None, folder: str, bound: float) -> None:
    """Let `lm` compute attention as it was written, by what was named where that can; else by what can.

    Fused attention ignores what it has no argument for, such as the soft cap of Gemma 2, and that may show only once
    weights have grown. So what the plain attention of an architecture takes by name, fused attention must take too, and
    both must give the same numbers.

    Args:
        probe: see `probe_inputs`.
        lm: the model, loaded with the attention that was named, or with transformers' choice.
        named: what was asked for; None is fused attention where it is right, else plain.
        folder: where the model came from.
        bound: see `tolerance`.

    Raises:
        BindError: fused attention was asked for, and it does not compute this model.
    """
    fused = lm.config._attn_implementation
    if fused == "eager":
        return
    inputs = known(lm, padded(probe, 2, 1))
    kept = inputs["attention_mask"].bool()
    with _ignored_by(fused) as ignored:
        found = lm(**inputs)[0][kept]
    lm.set_attn_implementation("eager")
    if lm.config._attn_implementation != "eager":  # an architecture that is built with one attention or another
        return
    distance = apart(found, lm(**inputs)[0][kept])
    if not ignored and distance <= bound:
        lm.set_attn_implementation(fused)
    elif named == fused:
        why = f"ignores its {', '.join(sorted(ignored))}" if ignored else f"is {distance:.2g} off its plain attention"
        raise BindError(
            f"{type(lm).__name__} in {folder!r} does not support attention={named!r}, which {why}. Bind it with "
            f'attention="eager", or leave `attention` out.',
            code="model.attention",
            path=folder,
            architecture=type(lm).__name__,
            attention=named,
        )


@contextmanager
def _ignored_by(fused: str) -> Iterator[set[str]]:
    """The names of what layers give to fused attention within, and it does not take, but plain attention does."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    attend, ignored = ALL_ATTENTION_FUNCTIONS[fused], set[str]()
    taken = inspect.signature(attend).parameters

    def noting(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        plain = getattr(sys.modules[type(layer).__module__], "eager_attention_forward", attend)
        wanted = inspect.signature(plain).parameters
        ignored.update(n for n, value in kwargs.items() if value is not None and n in wanted and n not in taken)
        return attend(layer, *args, **kwargs)

    ALL_ATTENTION_FUNCTIONS[fused] = noting
    try:
        yield ignored
    finally:
        del ALL_ATTENTION_FUNCTIONS[fused]


def refuse_blind_to_padding(probe: Inputs, model: PreTrainedModel, folder: str, bound: float) -> None:
    """Refuse a model that gives a row other numbers where it is padded.

    Args:
        probe, folder, bound: as in `settle_attention`.
        model: what is run: a causal LM, or its body.

    Raises:
        BindError: it does, or gives NaN or infinity without padding.
    """
    if "attention_mask" not in inspect.signature(model.forward).parameters:
        raise BindError(
            f"{type(model).__name__} in {folder!r} has no parameter attention_mask, so it cannot distinguish padding "
            f"from tokens. Bind a model of another architecture.",
            code="model.padding",
            path=folder,
            architecture=type(model).__name__,
        )
    alone = model(**known(model, probe))[0]
    distance = apart(model(**known(model, padded(probe, 3, 2)))[0][:, 3:-2], alone)
    if not alone.isfinite().all():
        raise BindError(
            f"{type(model).__name__} in {folder!r} computes NaN or infinity for plain tokens, although its weights are "
            f"finite; its config.json or its weights are not those of its training. Use another copy of the model.",
            code="model.not-finite",
            path=folder,
            architecture=type(model).__name__,
        )
    if not distance <= bound:
        raise BindError(
            f"{type(model).__name__} in {folder!r} cannot distinguish padding from tokens: with padding its outputs "
            f"differ by {distance:.2g} from those of the row alone (expected at most {bound:g}), so batches would be "
            f"wrong. Bind a model of another architecture.",
            code="model.padding",
            path=folder,
            architecture=type(model).__name__,
            distance=distance,
        )


class AfterHead(NamedTuple):
    """What a model makes of what its head gives, so that it becomes its logits: ``cap * tanh(scale * x / cap)``.

    Args:
        scale: of Granite and Cohere; 1 for most.
        cap: of Gemma 2 and later ones; None is none.
    """

    scale: float = 1.0
    cap: float | None = None

    def __call__(self, x: Tensor) -> Tensor:
        x = x if self.scale == 1.0 else x * self.scale
        return x if self.cap is None else torch.tanh(x / self.cap) * self.cap

    def slope(self, made: Tensor) -> Tensor | float:
        """Its derivative where it has made `made`."""
        return self.scale if self.cap is None else (1 - (made / self.cap).square()) * self.scale


def after_head(probe: Inputs, lm: PreTrainedModel) -> AfterHead | None:
    """What makes ``lm(x).logits`` of ``head(base(x).last_hidden_state)``; None where that is something else than a
    scale and a cap, or the head is given something else.

    The head is made to give logits from a wide range, so that a cap shows even where the model's own logits are small.
    """
    head, base = lm.get_output_embeddings(), lm.base_model
    if head is None or base is lm:
        return None
    seen: list[tuple[Tensor, Tensor]] = []

    def widen(module: nn.Module, args: tuple[Tensor, ...], logits: Tensor) -> Tensor:
        seen.append((args[0], torch.linspace(-100, 100, logits.numel(), device=logits.device).view_as(logits)))
        return seen[-1][1]

    handle = head.register_forward_hook(widen)
    try:
        logits = lm(**known(lm, probe)).logits
    finally:
        handle.remove()
    states = getattr(base(**known(base, probe)), "last_hidden_state", None)
    if len(seen) != 1 or states is None or not torch.allclose(seen[0][0], states, rtol=1e-5, atol=1e-5):
        return None
    given = seen[0][1]
    if torch.equal(given, logits):
        return AfterHead()
    if logits.shape != given.shape:
        return None
    cap = getattr(lm.config.get_text_config(), "final_logit_softcapping", None)
    scale = float(logits.flatten()[-1].double() / given.flatten()[-1].double())
    likely = (AfterHead(scale), AfterHead(cap=cap))
    return next((after for after in likely if torch.allclose(after(given), logits, rtol=1e-5, atol=1e-5)), None)


def prepare_checkpointing(probe: Inputs, lm: PreTrainedModel, folder: str) -> None:
    """Recompute layers in the backward pass. Transformers does so in training mode only, so make that mode as
    evaluation is: what is random in it is set to 0.

    Raises:
        BindError: the model cannot do so, or computes something else in training mode.
    """
    if not lm.supports_gradient_checkpointing:
        raise BindError(
            f"{type(lm).__name__} in {folder!r} does not support gradient checkpointing. Bind it with "
            f"gradient_checkpointing=False.",
            code="model.gradient-checkpointing",
            path=folder,
            architecture=type(lm).__name__,
        )
    inputs = known(lm, probe)
    calm = lm(**inputs)[0]
    lm.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    for module in lm.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and ("drop" in name or "jitter" in name):
                setattr(module, name, 0.0)
    lm.train()
    trained = lm(**inputs)[0]
    lm.eval()
    if not torch.allclose(trained, calm, rtol=1e-4, atol=1e-5):
        raise BindError(
            f"{type(lm).__name__} in {folder!r} computes other outputs in training mode than in evaluation mode, "
            f"although dropout is off, so its log-probs could not be recomputed. Bind it with "
            f"gradient_checkpointing=False.",
            code="model.gradient-checkpointing",
            path=folder,
            architecture=type(lm).__name__,
        )


def refuse_other_cache(
    probe: Inputs, model: PreTrainedModel, step: Callable[..., Tensor], cache: Any, folder: str, bound: float
) -> None:
    """Refuse a model whose next-token logits with a cache are not those without.

    Args:
        probe: of two rows.
        model: a causal LM.
        step: logits of the token after the last column, given ids, attention mask, position ids and cache.
        cache: a fresh one.
        folder, bound: as in `settle_attention`.

    Raises:
        BindError: they are not, once rows were padded, repeated, and went on token by token; or it cannot do that.
    """
    try:
        found, truth = _with_and_without(probe, model, step, cache)
        distance = apart(found, truth)
        if distance <= bound:
            return
        fault = f"its logits differ by {distance:.2g} (expected at most {bound:g})"
    except Exception as error:
        fault = f"it raises {type(error).__name__}: {error}"
    raise BindError(
        f"{type(model).__name__} in {folder!r} computes other logits with its KV cache than without: {fault}, so "
        f"TorchRollout cannot sample from it. Bind rollout= to VLLM(...) or SGLang(...) if they support this "
        f"architecture, or bind another model.",
        code="model.cache",
        path=folder,
        architecture=type(model).__name__,
    )


def _with_and_without(
    probe: Inputs, model: PreTrainedModel, step: Callable[..., Tensor], cache: Any
) -> tuple[Tensor, Tensor]:
    """Logits after the last three columns of rows of unequal length: by steps with a cache, and by one pass without."""
    rows = padded(probe, 2, 0)
    ids, attention = rows["input_ids"], rows["attention_mask"].bool()
    attention[0, 2] = False
    position = (attention.cumsum(1) - 1).clamp(min=0)
    truth = model(**known(model, rows | {"attention_mask": attention.long(), "position_ids": position})).logits
    start = ids.shape[1] - 2
    found = [step(ids[:, :start], attention[:, :start], position[:, :start], cache)]
    turned = torch.tensor([1, 0, 1], device=ids.device)  # a rollout repeats prompts, and rows that end leave it
    cache.reorder_cache(turned)
    for t in range(start, ids.shape[1]):
        column = slice(t, t + 1)
        found.append(step(ids[turned][:, column], attention[turned][:, : t + 1], position[turned][:, column], cache))
    return torch.cat(found), torch.cat([truth[:, start - 1], truth[turned, start], truth[turned, start + 1]])
