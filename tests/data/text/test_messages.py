"""Roles: those that models know, and those that the chat template names."""

from __future__ import annotations

import pytest

from tests.support.errors import raises
from tests.support.templates import TEMPLATES, tokenizer_of


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_misspelled_role_is_refused_with_the_right_one(name: str) -> None:
    with raises("tokenizer.bad-messages", index=1) as error:
        tokenizer_of(name).prompt_ids([{"role": "user", "content": "the"}, {"role": "usr", "content": "and"}])
    assert "did you mean 'user'?" in error.value.message


def test_a_role_that_the_template_names_is_accepted() -> None:
    messages = [{"role": "model", "content": "the"}]
    with raises("tokenizer.bad-messages", index=0):
        tokenizer_of("qwen2.5").prompt_ids(messages)
    assert tokenizer_of("merging").template_reads("model") and tokenizer_of("merging").prompt_ids(messages)
