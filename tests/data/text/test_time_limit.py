"""Python code that never ends is ended, in any thread, and what follows it is not."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from flowrl.data.text import tokenizer as module
from flowrl.data.text.time_limit import time_limit
from flowrl.data.text.tokenizer import ChatTokenizer
from tests.support.errors import raises
from tests.support.models import char_tokenizer

ENDLESS = "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}"


def never_ends() -> None:
    with time_limit(0.05):
        while True:
            pass


def test_a_loop_without_an_end_is_ended_in_every_thread() -> None:
    with pytest.raises(TimeoutError):
        never_ends()
    with ThreadPoolExecutor(1) as pool, pytest.raises(TimeoutError):
        pool.submit(never_ends).result()


def test_what_follows_a_block_is_never_ended() -> None:
    total = 0
    for _ in range(100):
        with suppress(TimeoutError), time_limit(1e-4):
            pass
        total += sum(range(1000))
    assert total == 100 * 499500


def test_a_template_of_nested_loops_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RENDERING_SECONDS", 0.1)
    made = char_tokenizer()
    made.chat_template = ENDLESS
    made.save_pretrained(tmp_path)
    with raises("tokenizer.template-limit", path=str(tmp_path)):
        ChatTokenizer(str(tmp_path))
