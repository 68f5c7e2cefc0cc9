"""Log-probs and entropies computed tile by tile, against autograd over full distributions in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from flowrl.backends.torch.probes import AfterHead
from flowrl.backends.torch.score import tiles
from flowrl.backends.torch.score.tiles import Entropy, LMHead, score_tokens
from tests.nightly import examples

HIDDEN = 6
AFTER = {"plain": AfterHead(), "scaled": AfterHead(0.3), "capped": AfterHead(cap=1.5), "both": AfterHead(2.0, 3.0)}


class Case(NamedTuple):
    """Inputs of a score; without a `layer`, `states` are the logits."""

    layer: nn.Linear | None
    after: AfterHead
    states: Tensor
    targets: Tensor
    temperature: Tensor

    def scored(self, entropy: Entropy, chunk: int = 1024) -> tuple[Tensor, ...]:
        head = LMHead(self.layer, self.after)
        return score_tokens(entropy, head, chunk, self.states, self.targets, self.temperature)

    @property
    def leaves(self) -> list[Tensor]:
        return [self.states, *([] if self.layer is None else self.layer.parameters())]


def case(tokens: int, size: int, seed: int = 0, bias: bool = False, ready: bool = False, **settings: Any) -> Case:
    generator = torch.Generator().manual_seed(seed)
    layer = None if ready else nn.Linear(HIDDEN, size, bias=bias)
    for parameter in () if layer is None else layer.parameters():
        nn.init.normal_(parameter, generator=generator)
    states = torch.randn(tokens, size if ready else HIDDEN, generator=generator).requires_grad_()
    targets = torch.randint(size, (tokens,), generator=generator)
    temperature = 0.5 + torch.rand(tokens, generator=generator)
    if settings.get("temperature") == 1.0:
        temperature = torch.ones(tokens)
    return Case(layer, settings.get("after", AfterHead()), states, targets, temperature)


def exact(found: Case) -> tuple[list[Tensor], list[Tensor]]:
    """Log-probs and entropies from full float64 distributions, and the leaf tensors of both."""
    leaves = [leaf.detach().double().requires_grad_() for leaf in found.leaves]
    logits = leaves[0] if found.layer is None else found.after(nn.functional.linear(leaves[0], *leaves[1:]))
    log_p = (logits / found.temperature[:, None].double()).log_softmax(1)
    return [log_p.gather(1, found.targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(1)], leaves


def relative_error(found: Tensor, truth: Tensor) -> float:
    return float((found.double() - truth).norm() / truth.norm().clamp_min(1e-30))


@pytest.fixture
def set_tile_sizes(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A function that sets set_tile_sizes tile sizes."""

    def to(part: int, numbers: int) -> None:
        monkeypatch.setattr(tiles, "_PART", part)
        monkeypatch.setattr(tiles, "_numbers", lambda device, products: numbers)

    return to


def assert_equals_float64(found: Case, entropy: Entropy, chunk: int = 1024, bound: float = 1e-6) -> None:
    """Assert that results and gradients equal float64 up to rounding: gradients with relative error < `bound`."""
    scored, (truth, leaves) = found.scored(entropy, chunk), exact(found)
    if entropy != "gradient":
        truth[1] = truth[1].detach()
    pulls = [torch.linspace(-1.0, 2.0, len(found.targets)) * sign for sign in (1.0, 0.7)]
    for x, expected in zip(scored, truth, strict=False):
        assert x.dtype == torch.float32
        torch.testing.assert_close(x.double(), expected.detach(), atol=3 * bound, rtol=1e-6)
    moving = [(x, y, pull) for x, y, pull in zip(scored, truth, pulls, strict=False) if y.requires_grad]
    sum(((x * pull).sum() for x, _, pull in moving), torch.zeros(())).backward()
    sum(((y * pull).sum() for _, y, pull in moving), torch.zeros(())).backward()
    for leaf, expected in zip(found.leaves, leaves, strict=True):
        assert leaf.grad is not None and expected.grad is not None and leaf.grad.dtype == leaf.dtype
        assert relative_error(leaf.grad, expected.grad) < bound


@pytest.mark.parametrize("entropy", ["none", "value", "gradient"])
@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize("bias", [False, True])
def test_log_probs_entropies_and_gradients_match_float64(
    after: str, bias: bool, entropy: Entropy, set_tile_sizes: Callable[..., None]
) -> None:
    set_tile_sizes(7, 21)
    assert_equals_float64(case(11, 40, bias=bias, after=AFTER[after]), entropy)
    assert_equals_float64(case(11, 40, bias=bias, after=AFTER[after], temperature=1.0), entropy)


@examples(40)
@given(
    st.integers(1, 9), st.integers(1, 30), st.integers(1, 12), st.integers(1, 60), st.integers(1, 10),
    st.booleans(), st.sampled_from(["none", "value", "gradient"]),
)  # fmt: skip
def test_results_do_not_depend_on_tile_sizes(
    tokens: int, size: int, part: int, numbers: int, chunk: int, ready: bool, entropy: Entropy
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "_PART", part)
        patch.setattr(tiles, "_numbers", lambda device, products: numbers)
        assert_equals_float64(case(tokens, size, tokens * size, ready=ready), entropy, chunk)


def test_default_tile_sizes_match_float64_for_a_large_vocabulary() -> None:
    """The bound is close to that of float32 autograd over full distributions, 3e-6 here."""
    assert_equals_float64(case(70, 9000), "gradient", bound=5e-6)
    assert_equals_float64(case(70, 9000, ready=True, temperature=1.0), "gradient", bound=5e-6)


@pytest.mark.parametrize("ready", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probs_are_bit_equal_with_and_without_entropy_or_gradient(dtype: torch.dtype, ready: bool) -> None:
    found = case(50, 5000, ready=ready)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        with torch.no_grad():
            alone = found.scored("none")[0]
        others = [found.scored(entropy) for entropy in ("none", "value", "gradient")]
    assert all(torch.equal(scored[0].detach(), alone) for scored in others)
    assert torch.equal(others[1][1], others[2][1]) and not others[1][1].requires_grad


@pytest.mark.parametrize("after", AFTER)
def test_bfloat16_rounds_only_the_logits(after: str) -> None:
    """Given the logits of autocast, results equal float64."""
    found = case(30, 5000, bias=True, after=AFTER[after])
    with torch.autocast("cpu", torch.bfloat16):
        log_prob, entropy = found.scored("gradient")
        logits = LMHead(found.layer, found.after)(found.states).detach()
    assert logits.dtype == torch.bfloat16 and log_prob.dtype == entropy.dtype == torch.float32
    (truth, uncertain), _ = exact(Case(None, AfterHead(), logits, *found[3:]))
    torch.testing.assert_close(log_prob.double(), truth.detach(), atol=5e-6, rtol=1e-6)
    torch.testing.assert_close(entropy.double(), uncertain.detach(), atol=5e-6, rtol=1e-6)
    (log_prob.sum() + entropy.sum()).backward()
    (log_prob, entropy), leaves = exact(found)
    (log_prob.sum() + entropy.sum()).backward()
    assert all(
        relative_error(leaf.grad, expected.grad) < 0.03 for leaf, expected in zip(found.leaves, leaves, strict=True)
    )


def test_bfloat16_logits_get_a_bfloat16_gradient() -> None:
    found = case(9, 40, ready=True)
    narrow = found.states.detach().bfloat16().requires_grad_()
    for x in found._replace(states=narrow), found._replace(states=narrow.detach().float().requires_grad_()):
        x.scored("gradient")[1].sum().backward()
        assert x.states.grad.dtype == x.states.dtype
        truth = exact(x)
        truth[0][1].sum().backward()
        assert relative_error(x.states.grad, truth[1][0].grad) < (3e-3 if x.states.dtype == torch.bfloat16 else 1e-6)


@pytest.mark.parametrize("ready", [False, True])
def test_gradients_of_zero_tokens_are_zero(ready: bool) -> None:
    found = case(0, 40, bias=not ready, ready=ready)
    log_prob, entropy = found.scored("gradient")
    assert log_prob.shape == entropy.shape == (0,)
    (log_prob.sum() + entropy.sum()).backward()
    assert all(leaf.grad is not None and leaf.grad.eq(0).all() for leaf in found.leaves)


@pytest.mark.parametrize("frozen", ["states", "head"])
def test_frozen_tensors_get_no_gradient_and_others_are_unchanged(frozen: str) -> None:
    found, other = case(5, 40, bias=True), case(5, 40, bias=True)
    for leaf in found.leaves[:1] if frozen == "states" else found.leaves[1:]:
        leaf.requires_grad_(False)
    for x in found, other:
        x.scored("none")[0].sum().backward()
    for leaf, expected in zip(found.leaves, other.leaves, strict=True):
        assert torch.equal(leaf.grad, expected.grad) if leaf.requires_grad else leaf.grad is None


def test_logits_of_minus_infinity_do_not_affect_the_other_logits() -> None:
    """Some models give impossible tokens logits of -inf."""
    found = case(6, 40, ready=True)
    targets = found.targets.where(found.targets < 30, 3)
    ruled = found.states.detach().clone()
    ruled[:, 30:] = -torch.inf
    allowed = found._replace(states=ruled[:, :30].clone().requires_grad_(), targets=targets)
    found = found._replace(states=ruled.requires_grad_(), targets=targets)
    for x in found, allowed:
        x.scored("none")[0].sum().backward()
    torch.testing.assert_close(found.scored("none")[0], allowed.scored("none")[0])
    torch.testing.assert_close(found.states.grad[:, :30], allowed.states.grad)
    assert found.states.grad[:, 30:].eq(0).all()


def test_nan_affects_only_its_row(set_tile_sizes: Callable[..., None]) -> None:
    set_tile_sizes(7, 21)
    found, clean = case(6, 40), case(6, 40)
    with torch.no_grad():
        found.states[2, 3] = torch.nan
    for x in found, clean:
        x.scored("none")[0].sum().backward()
    scored, others = found.scored("value"), torch.arange(6) != 2
    for x, expected in zip(scored, clean.scored("value"), strict=True):
        assert x[2].isnan() and torch.equal(x[others], expected[others])
    assert found.states.grad[2].isnan().all() and torch.equal(found.states.grad[others], clean.states.grad[others])


def test_a_token_outside_the_vocabulary_is_refused(set_tile_sizes: Callable[..., None]) -> None:
    set_tile_sizes(7, 21)
    for size in (40, 42):
        found = case(3, size)
        with pytest.raises((IndexError, RuntimeError)):
            found._replace(targets=torch.tensor([0, size, 1])).scored("none")


class Largest(TorchDispatchMode):
    """Records the largest number of elements of any tensor created in the block."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor):
                self.numbers = max(self.numbers, tensor.numel())
        return out


def test_memory_for_a_large_vocabulary_is_bounded_by_the_tile_size() -> None:
    """21 million logits are computed in tiles of at most 8 MB; the gradient of the head is smaller than a tile."""
    found = case(140, 152_000)._replace(layer=nn.Linear(2, 152_000), states=torch.randn(140, 2).requires_grad_())
    with Largest() as largest:
        sum(x.sum() for x in found.scored("gradient")).backward()
    assert 1 << 18 < largest.numbers <= 1 << 21
