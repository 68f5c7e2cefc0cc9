"""The end of a response, against a search over all its prefixes; finite log-probs; lengths of prompts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from flowrl.backends.rollout import RolloutEngine, StopRule, check_prompts
from flowrl.data.keys import Key
from flowrl.data.text.tokenizer import ChatTokenizer
from flowrl.protocols.protocols import Sampled, Sampling
from flowrl.records import Receipt
from tests.support.errors import raises

PIECES = ["ab", "ba", "abba", " a", "<think>", "</s", "é!"]
SPECIALS = ["<pad>", "<eos>"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    """Byte-level: 2 special tokens, all bytes, and `PIECES`, some of which contain others."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    encoder = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pieces = [encoder.pre_tokenize_str(piece)[0][0] for piece in PIECES]
    core = Tokenizer(models.BPE({token: i for i, token in enumerate([*SPECIALS, *alphabet, *pieces])}, []))
    core.pre_tokenizer, core.decoder = encoder, decoders.ByteLevel()
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    return ChatTokenizer(str(folder))


def sampling(stop: tuple[str, ...], stop_token_ids: tuple[int, ...] = (), ignore_eos: bool = False) -> Sampling:
    return Sampling(1.0, 0, 1.0, 64, stop_token_ids, stop, ignore_eos)


def ids_of(tokenizer: ChatTokenizer, *tokens: str) -> list[int]:
    """The ids of tokens, each written as in the vocabulary, or one byte."""
    vocabulary = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *PIECES]
    return [vocabulary.index(token) for token in tokens]


@given(data=st.data())
def test_a_response_ends_with_its_shortest_prefix_that_contains_a_stop(
    tokenizer: ChatTokenizer, data: st.DataObject
) -> None:
    letters = [*ids_of(tokenizer, "a", "b", "!", "<", "s", "Ã", "©", *PIECES, *SPECIALS), 7, 150]
    ids = data.draw(st.lists(st.sampled_from(letters), max_size=30))
    stop = tuple(data.draw(st.lists(st.text("ab! <éskhit>/", min_size=1, max_size=6), max_size=3)))
    ignore_eos = data.draw(st.booleans())
    ending = StopRule(tokenizer, sampling(stop, tuple(ids_of(tokenizer, "!")), ignore_eos))
    assert ending.token_ids == [*([] if ignore_eos else [1]), *ids_of(tokenizer, "!")]
    expected = None
    for n, token in enumerate(ids, start=1):
        if token in ending.token_ids or any(string in tokenizer.text(ids[:n]) for string in stop):
            expected = n
            break
    assert ending.length(ids) == expected


def test_stop_strings_match_inside_tokens_and_across_special_tokens(tokenizer: ChatTokenizer) -> None:
    within = ids_of(tokenizer, "a", "<think>", "b")
    assert StopRule(tokenizer, sampling(("hin",))).length(within) == 2
    across = ids_of(tokenizer, "a", "<pad>", "<pad>", "<pad>", "ba", "b")
    assert StopRule(tokenizer, sampling(("ab",))).length(across) == 5
    assert StopRule(tokenizer, sampling(("<pad>",))).length(across) is None


def test_a_multi_token_character_matches_at_its_last_token(tokenizer: ChatTokenizer) -> None:
    detector = StopRule(tokenizer, sampling(("é",))).detector()
    first, second = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("é")[0][0]
    a, b, c = ids_of(tokenizer, "a", first, second)
    assert [detector.completes(token) for token in (a, b, c)] == [False, False, True]


class FixedLogProbs(RolloutEngine):
    """Samples responses of two tokens and of one token with fixed log-probs."""

    name = "FixedLogProbs"

    def __init__(self, tokenizer: ChatTokenizer, log_probs: list[list[float]]) -> None:
        super().__init__(tokenizer)
        self._fixed, self._receipt = torch.tensor(log_probs), Receipt(0, "", 0, 0.0, "none")

    def _require_awake(self, what: str) -> None: ...

    def _limits(self) -> tuple[int, None]:
        return 300, None

    def _sample(self, *_: Any) -> Sampled:
        tokens = torch.ones(2, 2, dtype=torch.int64)
        return Sampled(tokens, torch.tensor([[True, True], [True, False]]), self._fixed, tokens)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_log_probs_that_are_not_finite_are_refused(tokenizer: ChatTokenizer, bad: float) -> None:
    prompts, mask = torch.ones(2, 3, dtype=torch.int64), torch.ones(2, 3, dtype=torch.bool)

    def generate(log_probs: list[list[float]]) -> Sampled:
        return FixedLogProbs(tokenizer, log_probs).generate(prompts, mask, ["one", "two"], sampling(()), Key.of(0))

    assert generate([[-1.0, -2.0], [-3.0, bad]]).log_probs[0, 1] == -2  # ignored off the mask
    with raises("engine.not-finite", engine="FixedLogProbs", row="one", token=1) as caught:
        generate([[-1.0, bad], [bad, 0.0]])
    assert "2 tokens in 2 of 2 rows" in caught.value.message


@pytest.mark.parametrize(
    ("prompt", "response", "fix"),
    [
        (
            9,
            1024,
            "Raise it if the model allows that, or lower max_new_tokens to 247.",
        ),  # no prompt would be short enough
        (250, 28, "lower max_new_tokens to 6, or drop prompts of more than 228 tokens."),
        (403, 28, "Raise it if the model allows that, or drop prompts of more than 228 tokens."),
        (255, 255, "lower max_new_tokens to 1, or drop prompts of more than 1 tokens."),
        (256, 256, "Raise it if the model allows that."),
        (300, 300, "Raise it if the model allows that."),
    ],
)
def test_overlong_prompts_are_refused_with_possible_lengths(prompt: int, response: int, fix: str) -> None:
    prompts, mask = torch.ones(1, prompt, dtype=torch.long), torch.ones(1, prompt, dtype=torch.bool)
    sampling = Sampling(temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=response)
    with raises("model.too-long", row="a", found=prompt + response, expected=256) as caught:
        check_prompts(prompts, mask, ["a"], sampling, 10, 256, "model")
    assert caught.value.message.endswith(fix)
