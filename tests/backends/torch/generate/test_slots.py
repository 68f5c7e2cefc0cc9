"""Tests of `slots.py` and `passes.py`: a KV cache that is updated in place.

They cover prefix reuse, growth and release of its memory, and the supported models.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM, MistralConfig, Qwen2Config
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from flowrl.backends.torch.generate.decoder import Context
from flowrl.backends.torch.generate.passes import Decode, Extend
from flowrl.backends.torch.generate.rollout import TorchRolloutEngine
from flowrl.backends.torch.generate.slots import STEP, Slots, suits
from flowrl.backends.torch.probes import probe_inputs, tolerance
from flowrl.protocols.protocols import Request
from tests.backends.torch.generate.rollouts import KEY, SAMPLED, Actor, names, ragged
from tests.backends.torch.generate.test_decoder import finished, responses_of, same, sampled_alone, tokens
from tests.support.models import VOCAB

LONG = replace(SAMPLED, ignore_eos=True)


@pytest.fixture
def passes(engine: TorchRolloutEngine) -> list[tuple[int, ...]]:
    """The shapes of the token ids of each forward pass."""
    shapes: list[tuple[int, ...]] = []
    engine.model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    return shapes


def full_logits(model: Any, ids: list[int]) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
    return logits


# Prefix reuse


def test_a_shared_prefix_is_prefilled_once(actor: Actor, engine: TorchRolloutEngine, passes: list[Any]) -> None:
    prefix = tokens(40, 1)
    requests = [Request(str(i), prefix + tokens(2 + i, i), LONG, KEY.response(str(i))) for i in range(5)]
    responses = responses_of(engine, *requests)
    assert passes[:3] == [(1, 40), (5, 6), (5, 1)]
    del passes[:]
    for request, response in zip(requests, responses, strict=True):
        assert same(response, sampled_alone(actor.model.eval(), request))


def test_requests_reuse_the_cached_prefix_of_running_requests(
    actor: Actor, engine: TorchRolloutEngine, passes: list[Any]
) -> None:
    prompt = tokens(30, 1)
    requests = [
        Request("a", prompt, LONG, KEY.response("a")),
        Request("b", prompt, LONG, KEY.response("b")),
        Request("c", [*prompt[:20], *tokens(5, 2)], LONG, KEY.response("c")),
        Request("d", [*prompt[:10], *tokens(5, 2)], LONG, KEY.response("d")),
    ]
    for request in requests:
        engine.submit(request)
        engine.step()
    assert [shape for shape in passes if shape[1] > 1] == [
        (1, 30),
        (1, 5),
        (1, 15),
    ]  # a prefix of 10 tokens is too short to copy
    assert passes[2] == (1, 1)  # "b" computes only the last token of the prompt
    assert (engine.context_tokens, engine.cached_tokens) == (30 + 30 + 25 + 15, 29 + 20)
    responses = finished(engine, 4)
    for request in requests:
        assert same(responses[request.name], sampled_alone(actor.model.eval(), request))


def test_a_turn_prefills_only_its_new_tokens(actor: Actor, engine: TorchRolloutEngine, passes: list[Any]) -> None:
    context = tokens(50, 1)
    (first,) = responses_of(engine, Request("a", context, LONG, KEY, retain_cache=True))
    context = [*context, *first.ids, *tokens(7, 2)]
    request = Request("a", context, LONG, KEY.response("a", 1), retain_cache=True)
    del passes[:]
    (second,) = responses_of(engine, request)
    assert passes[0] == (1, 8)  # including the last sampled token, which has no cache entry yet
    assert (engine.context_tokens, engine.cached_tokens) == (50 + len(context), len(context) - 8)
    rewritten = Request("a", [*context[:30], *tokens(9, 3)], LONG, KEY)
    del passes[:]
    (third,) = responses_of(engine, rewritten)
    assert passes[0] == (1, 9)
    assert same(second, sampled_alone(actor.model.eval(), request)) and same(
        third, sampled_alone(actor.model, rewritten)
    )


# Memory


def test_the_cache_grows_with_its_rows_and_is_freed_with_them(engine: TorchRolloutEngine) -> None:
    memory: Any = engine._memory
    assert memory.width == 0
    engine.submit(Request("a", tokens(STEP + 1, 1), replace(LONG, max_new_tokens=70), KEY, retain_cache=True))
    engine.step()
    assert memory.width == 2 * STEP
    finished(engine, 1)
    assert memory.width == 3 * STEP
    engine.drop("a")
    assert memory.width == 0
    prompts, mask = ragged(engine, [4, 2])
    engine.generate(prompts, mask, names(2), LONG, KEY)
    assert memory.width == 0
    engine.submit(Request("b", [5], LONG, KEY, retain_cache=True))
    engine.step()
    engine.sleep()
    assert memory.width == 0
    engine.wake()
    assert len(finished(engine, 1)["b"].ids) == 12


def test_responses_are_unchanged_while_cache_buffers_grow(actor: Actor) -> None:
    slots, model = Slots(actor.model), actor.model.eval()
    rows = [tokens(3, 0)]
    with torch.no_grad(), slots.decoding():
        slots.join([Context(rows[0])])
        for t in range(2 * STEP):
            logits = slots.extend(torch.tensor([5 + (t + i) % 9 for i in range(len(rows))]))
            rows = [[*row, 5 + (t + i) % 9] for i, row in enumerate(rows)]
            if t in (10, STEP, STEP + 30):
                rows += [tokens(t, t), tokens(2, t)]
                slots.join([Context(row) for row in rows[-2:]])
            if t == STEP + 20:
                rows = [rows[i] for i in slots.leave([1, 3])]
    for row, row_logits in zip(rows, logits, strict=True):
        torch.testing.assert_close(row_logits, full_logits(model, row), atol=2e-5, rtol=1e-5)


# Supported models


def is_supported(model: Any) -> bool:
    with torch.no_grad():
        return suits(model.eval(), probe_inputs(model, model.device, rows=2), tolerance(torch.float32))


def small(config: type, **options: Any) -> Any:
    sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=VOCAB)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config(**sizes, num_key_value_heads=1, **options))


def test_sliding_windows_of_any_width_are_unsupported() -> None:
    assert is_supported(small(MistralConfig, sliding_window=None))
    assert not is_supported(small(MistralConfig, sliding_window=4096))
    windows = dict(use_sliding_window=True, sliding_window=4096, max_window_layers=1)
    assert is_supported(small(Qwen2Config)) and not is_supported(small(Qwen2Config, **windows))


@pytest.mark.parametrize("more", [{"softcap": 50.0}, {"s_aux": torch.zeros(2)}, {"sliding_window": 4096}])
def test_attention_with_extra_arguments_is_unsupported(
    actor: Actor, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_supported(actor.model)
    forward = Slots.attend

    def handed(self: Slots, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs, **more)

    monkeypatch.setattr(Slots, "attend", handed)
    assert not is_supported(actor.model)


def test_attention_with_different_results_is_unsupported(actor: Actor, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Slots.attend

    def scaled(self: Slots, module: Any, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        return forward(self, module, 1.05 * query, *args, **kwargs)

    monkeypatch.setattr(Slots, "attend", scaled)
    assert not is_supported(actor.model)


def test_the_support_check_restores_the_attention_of_the_model(actor: Actor) -> None:
    before = actor.model.config._attn_implementation
    for _ in range(2):
        is_supported(actor.model)
        assert actor.model.config._attn_implementation == before
        assert not [name for name in ALL_ATTENTION_FUNCTIONS if "flowrl_slots" in name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_errors_are_no_larger_than_without_a_cache(actor: Actor, dtype: torch.dtype) -> None:
    """The rounding error of cached logits is at most 1.5 times that of a pass without a cache."""
    exact = actor.model.eval()
    rows = [tokens(20, 1), tokens(9, 2)]
    exact_logits = torch.stack([full_logits(exact, row) for row in rows])
    model = exact.to(dtype)
    slots = Slots(model)
    with torch.no_grad(), slots.decoding():
        slots.join([Context(row[:-1]) for row in rows])
        found = slots.extend(torch.tensor([row[-1] for row in rows])).float()
    off = (torch.stack([full_logits(model, row) for row in rows]).float() - exact_logits).norm()
    assert (found - exact_logits).norm() <= 1.5 * off + 1e-5 * exact_logits.norm()


def test_extending_with_grouped_heads_attends_as_torch() -> None:
    generator, at = torch.Generator().manual_seed(0), torch.tensor([[4, 5], [2, 3], [5, 5]])
    query = torch.randn(3, 4, 2, 8, generator=generator)
    keys, values = torch.randn(2, 3, 2, 6, 8, generator=generator)
    mask = torch.arange(6) <= at[:, None, :, None]
    expected = scaled_dot_product_attention(query, keys, values, mask, scale=0.5, enable_gqa=True).transpose(1, 2)
    found = Extend(torch.arange(3), at, 6, mask).attend(query, keys, values, 0.5)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("positions", [[6, 6, 6], [2, 6, 4]], ids=["equal lengths", "unequal lengths"])
def test_decoding_with_grouped_heads_attends_as_torch(positions: list[int]) -> None:
    """4 query heads over 2 key heads: heads 0 and 1 share keys, as 2 and 3 do, in `torch`'s grouped attention."""
    generator, at = torch.Generator().manual_seed(0), torch.tensor(positions)
    query = torch.randn(3, 4, 1, 8, generator=generator)
    keys, values = torch.randn(2, 3, 2, 7, 8, generator=generator)
    mask = torch.arange(7) <= at[:, None, None, None]
    expected = scaled_dot_product_attention(query, keys, values, mask, scale=0.5, enable_gqa=True).transpose(1, 2)
    found = Decode(at, min(positions), max(positions) + 1).attend(query, keys, values, 0.5)
    torch.testing.assert_close(found, expected)
