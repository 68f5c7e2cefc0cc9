"""`Transcript`: a conversation as the exact tokens that the policy saw and sampled.

What was sampled is never tokenised again, since decoding and encoding again need not give the same ids. Between two
answers the *delta* alone is tokenised: what the chat template writes behind an answer, up to where the assistant is to
go on. A template that writes what stands before otherwise once there is more (which strips thinking, merges turns, or
trims) is found by comparing texts; the tokens are exact all the same, but they are no conversation that the template
would ever write.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar, get_args

from flowrl.data.text.tokenizer import ChatTokenizer
from flowrl.errors import DataError, EpisodeError

Check = Literal["strict", "loose", "off"]
"""How the text of the template is held against what is there: letter by letter; without white space; or not at all."""

Message = Mapping[str, Any]

T = TypeVar("T")

_MARK = "flowrl-marks-an-answer"  # no white space, which templates trim


class SampledSpan(NamedTuple):
    """What the policy sampled in a turn.

    Args:
        start: where it stands among the ids.
        ids: its tokens, the one that ended it included.
        log_probs: one a token, of the distribution that it was drawn from.
        text: of the ids, as `ChatTokenizer.decode` gives it.
        message: where it stands among the messages.
    """

    start: int
    ids: Sequence[int]
    log_probs: Sequence[float]
    text: str
    message: int


class Transcript:
    """A conversation that goes on: a prompt, then answers and replies by turns.

    Args:
        tokenizer: with a chat template.
        messages: what stands before the first answer.
        check: how the template is held against what is there.
        template_kwargs: arguments of the template.

    Raises:
        DataError: the template does not take the messages.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        messages: Sequence[Message],
        check: Check = "loose",
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if check not in get_args(Check):
            raise DataError(f"check is {check!r}; expected one of {', '.join(map(repr, get_args(Check)))}.")
        self._tokenizer, self._check, self._arguments = tokenizer, check, template_kwargs
        self.messages: list[Message] = list(messages)
        self.ids: list[int] = tokenizer.prompt_ids(messages, template_kwargs)
        """All tokens so far."""
        self.prompt_length = len(self.ids)
        """How many of them stand before the first answer."""
        self.answers: list[SampledSpan] = []
        self._shown = "" if check == "off" else tokenizer.conversation_text(messages, template_kwargs, go_on=True)

    def answer(self, ids: Sequence[int], log_probs: Sequence[float]) -> SampledSpan:
        """Put in what was sampled.

        Args:
            ids: at least one token.
            log_probs: one a token.

        Raises:
            ValueError: an answer stands at the end already, there is no token, or not one log-prob a token.
        """
        if self._answered():
            raise ValueError("an answer stands at the end already; expected a reply before the next one.")
        if not ids:
            raise ValueError("an answer of 0 tokens is put in; expected at least one, as every engine samples.")
        if len(ids) != len(log_probs):
            raise ValueError(f"an answer of {len(ids)} tokens has {len(log_probs)} log-probs; expected one for each.")
        text = self._tokenizer.decode(ids)
        answered = SampledSpan(len(self.ids), list(ids), list(log_probs), text, len(self.messages))
        self.ids.extend(answered.ids)
        self.answers.append(answered)
        self.messages.append({"role": "assistant", "content": self._tokenizer.shown(self._unended(ids))})
        return answered

    def reply(self, messages: Sequence[Message]) -> list[int]:
        """Put in what the environment says to the last answer, and let the assistant go on; the tokens of the delta.

        Args:
            messages: at least one, of other roles than the assistant's.

        Raises:
            ValueError: no answer stands at the end.
            DataError: the template does not take the messages.
            EpisodeError: it writes what stands before otherwise than it is there, or nothing for the reply, or a
                message is the assistant's.
        """
        if not self._answered():
            raise ValueError("no answer stands at the end; expected one before a reply.")
        if any(isinstance(message, Mapping) and message.get("role") == "assistant" for message in messages):
            raise EpisodeError(
                "a reply holds a message of the assistant, and what the assistant says is the policy's to sample; "
                "expected other roles, such as user or tool."
            )
        marked = [*self.messages[:-1], {"role": "assistant", "content": _MARK}, *messages]
        _, _, behind = self._tokenizer.conversation_text(marked, self._arguments, go_on=True).rpartition(_MARK)
        delta, ended = self._tokenizer.encode(behind), self.ids[-1]
        if ended in self._tokenizer.ends and delta[:1] == [ended]:  # the policy has written it
            delta = delta[1:]
        if not delta:
            roles = ", ".join(dict.fromkeys(repr(message.get("role")) for message in messages)) or "none"
            raise EpisodeError(
                f"the chat template in {self._tokenizer.folder!r} writes nothing for a reply (roles: {roles}), so the "
                f"policy would neither read it nor know that it is to go on; expected a template that writes it, and "
                f"opens the turn of the assistant behind it: reply in a role that it knows, such as user, or mend it."
            )
        if self._check != "off":
            self._shown += f"{self.messages[-1]['content']}{behind}"
            written = self._tokenizer.conversation_text([*self.messages, *messages], self._arguments, go_on=True)
            self._refuse_rewritten(self._shown, written)
        self.messages.extend(messages)
        self.ids.extend(delta)
        return delta

    @property
    def sampled(self) -> list[bool]:
        """By token behind the prompt, whether the policy sampled it."""
        return self._behind_prompt(False, lambda answered: [True] * len(answered.ids))

    @property
    def log_probs(self) -> list[float]:
        """By token behind the prompt, its log-prob; 0 where the policy did not sample it."""
        return self._behind_prompt(0.0, lambda answered: answered.log_probs)

    def _behind_prompt(self, other: T, of: Callable[[SampledSpan], Sequence[T]]) -> list[T]:
        """By token behind the prompt: what `of` says of an answer's tokens, and `other` of those in between."""
        found = [other] * (len(self.ids) - self.prompt_length)
        for answered in self.answers:
            start = answered.start - self.prompt_length
            found[start : start + len(answered.ids)] = of(answered)
        return found

    def _unended(self, ids: Sequence[int]) -> Sequence[int]:
        """Tokens without the one that ends the turn."""
        return ids[:-1] if ids[-1] in self._tokenizer.ends else ids

    def _answered(self) -> bool:
        return bool(self.answers) and self.answers[-1].start + len(self.answers[-1].ids) == len(self.ids)

    def _refuse_rewritten(self, there: str, written: str) -> None:
        a, b = (text if self._check == "strict" else "".join(text.split()) for text in (there, written))
        if a == b:
            return
        first = next((i for i, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]), min(len(a), len(b)))
        near = slice(max(0, first - 40), first + 40)
        raise EpisodeError(
            f"the chat template in {self._tokenizer.folder!r} writes the conversation so far otherwise once a reply "
            f"follows: there is {a[near]!r}, and it writes {b[near]!r}; expected a template that only adds, since an "
            f"episode is one row of tokens, and is not cut into several. Take one that keeps earlier turns as they "
            f"were (thinking included), or allow it: check='off', where the policy is trained on what it saw, which no "
            f"later use of the template will show it."
        )
