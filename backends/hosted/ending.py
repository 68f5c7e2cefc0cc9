"""Where responses end: one rule for all rollout engines, whichever of them stops by itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from flowrl.core.protocols import Sampling
from flowrl.data.tokenizer import ChatTokenizer


class Ending:
    """The rule of a `Sampling`: EOS, a stop token, or the token that completes a stop string ends a response.

    Args:
        tokenizer: whose text and EOS count.
        sampling: `stop_token_ids`, `stop` and `ignore_eos`.
        token_ids: the tokens that end a response.
    """

    def __init__(self, tokenizer: ChatTokenizer, sampling: Sampling) -> None:
        self.token_ids = [*([] if sampling.ignore_eos else [tokenizer.eos_id]), *sampling.stop_token_ids]
        self.stop = sampling.stop
        self._tokenizer = tokenizer

    def watch(self) -> Watch:
        """Looks at one response, from its first token on."""
        return Watch(self._tokenizer, self.stop)

    def length(self, ids: Sequence[int]) -> int | None:
        """How many tokens of `ids` are the response: up to the first that ends it, inclusive; None if none does."""
        length = next((i + 1 for i, token in enumerate(ids) if token in self.token_ids), None)
        text = self._tokenizer.text(ids[:length]) if self.stop else ""
        if any(string in text for string in self.stop):
            watch = self.watch()
            length = next((i + 1 for i, token in enumerate(ids[:length]) if watch.completes(token)), length)
        return length


class Watch:
    """Tells the token that completes a stop string.

    Text is made of the last tokens only. They are as many as the longest string has bytes, since a token that is not
    special is a byte at least, and one more, whose text may depend on what came before it.
    """

    def __init__(self, tokenizer: ChatTokenizer, stop: Sequence[str]) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        self._last: deque[int] = deque(maxlen=1 + max((len(string.encode()) for string in stop), default=0))

    def completes(self, token: int) -> bool:
        """Whether a stop string is complete with the next token."""
        if not self._stop or token in self._tokenizer.special_ids:
            return False
        self._last.append(token)
        text = self._tokenizer.text(self._last)
        return any(string in text for string in self._stop)
