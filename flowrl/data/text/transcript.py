"""`Transcript`: a conversation as the exact tokens that the policy read and sampled.

Sampled tokens are never tokenized again, since decoding and encoding need not give the same ids. Between two responses,
only the *delta* is tokenized: what the chat template writes after a response, up to the assistant's next turn. Some
templates rewrite earlier turns once more follow (they strip thinking, merge turns, or trim). `Transcript` detects this
by comparing texts: the tokens are still exact, but the template would never render this conversation.

A template gets each response in the form in which it renders it unchanged; see `flowrl.data.text.answers`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar, get_args

from flowrl.data.text.answers import MARK, Form, forms
from flowrl.data.text.control_tokens import as_text
from flowrl.data.text.tokenizer import ChatTokenizer
from flowrl.errors import DataError, EpisodeError

Check = Literal["strict", "loose", "off"]
"""How to compare the template's text with the transcript: exactly, without whitespace, or not at all."""

Message = Mapping[str, Any]

T = TypeVar("T")


class SampledSpan(NamedTuple):
    """What the policy sampled in a turn.

    Args:
        start: its index among the ids.
        ids: its tokens, including the one that ended it.
        log_probs: one per token, of the distribution it was sampled from.
        text: of the ids, as `ChatTokenizer.decode` returns it.
        message: its index among the messages.
    """

    start: int
    ids: Sequence[int]
    log_probs: Sequence[float]
    text: str
    message: int


class Transcript:
    """A growing conversation: a prompt, then alternating responses of the policy and replies of the environment.

    Args:
        check: how to compare the template's text with the transcript.

    Raises:
        DataError: the template rejects the messages, or `check` is unknown.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        messages: Sequence[Message],
        check: Check = "loose",
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if check not in get_args(Check):
            raise DataError(
                f"check is {check!r}. Expected one of {', '.join(map(repr, get_args(Check)))}.",
                code="parameter.invalid",
                found=check,
                expected=get_args(Check),
            )
        self._tokenizer, self._check, self._arguments = tokenizer, check, template_kwargs
        self.ids: list[int] = tokenizer.prompt_ids(messages, template_kwargs)
        """All tokens so far."""
        self.messages: list[Message] = copy.deepcopy([*messages])  # an agent may edit its own later
        """The conversation, with responses as the policy sampled them."""
        self.template_messages: list[Message] = list(self.messages)
        """The conversation as the template gets it, with responses in the forms that it renders unchanged."""
        self.prompt_length = len(self.ids)
        """Number of tokens of the prompt."""
        self.answers: list[SampledSpan] = []
        self.inherited = 0
        """How many of the answers were sampled in another transcript, and are context in this one."""
        self._shown_before: list[str] = []  # by answer
        self._shown = (
            "" if check == "off" else tokenizer.conversation_text(messages, template_kwargs, add_generation_prompt=True)
        )

    def answer(self, ids: Sequence[int], log_probs: Sequence[float]) -> SampledSpan:
        """Append what the policy sampled.

        There is at least one token, and one log-prob per token.

        Raises:
            ValueError: the last turn is a response already, there are no tokens, or not one log-prob per token.
        """
        if self._ends_with_response():
            raise ValueError("The transcript ends with a response; expected a reply before the next response.")
        if not ids:
            raise ValueError("The response has 0 tokens; expected at least one.")
        if len(ids) != len(log_probs):
            raise ValueError(f"The response has {len(ids)} tokens but {len(log_probs)} log-probs; expected one each.")
        text = self._tokenizer.decode(ids)
        span = SampledSpan(len(self.ids), list(ids), list(log_probs), text, len(self.messages))
        self.ids.extend(span.ids)
        self.answers.append(span)
        self._shown_before.append(self._shown)
        self.messages.append({"role": "assistant", "content": self._tokenizer.shown(self._without_end(ids))})
        self.template_messages.append(self.messages[-1])
        return span

    def reply(self, messages: Sequence[Message]) -> list[int]:
        """Append the environment's reply to the last response; returns the tokens of the delta.

        Raises:
            ValueError: the last turn is not a response.
            DataError: the template rejects the messages.
            EpisodeError: the template rewrites earlier turns or writes nothing for the reply, or a message has the role
                assistant.
        """
        if not self._ends_with_response():
            raise ValueError("The transcript does not end with a response; expected one before a reply.")
        if any(isinstance(message, Mapping) and message.get("role") == "assistant" for message in messages):
            raise EpisodeError(
                "The environment replied with a message of role assistant, which only the policy may sample. Reply "
                "with other roles, such as user or tool.",
                code="episode.invalid-reply",
            )
        fault: DataError | EpisodeError | None = None
        for form in self._forms():
            try:
                delta, shown = self._delta(form, messages)
                break
            except (DataError, EpisodeError) as error:
                fault = fault or error
        else:
            assert fault is not None
            raise fault
        self._shown, messages = shown, copy.deepcopy([*messages])
        self.messages.extend(messages)
        self.template_messages[-1:] = [form.message, *messages]
        self.ids.extend(delta)
        return delta

    def rewritten(self, messages: Sequence[Message]) -> Transcript:
        """The conversation with a reply, as the template writes it now: all earlier turns are part of the prompt.

        Raises:
            DataError: the template rejects the messages.
        """
        *_, form = forms(self._tokenizer, self._shown, self.messages[-1]["content"], self._cut)
        conversation = [*self.template_messages[:-1], form.message, *messages]
        made = Transcript(self._tokenizer, conversation, self._check, self._arguments)
        made.messages = [*self.messages, *messages]
        return made

    @property
    def _cut(self) -> bool:
        """Whether no token ended the last response."""
        return self.ids[-1] not in self._tokenizer.ends

    def _forms(self) -> Sequence[Form]:
        """The last response as messages."""
        found = forms(self._tokenizer, self._shown, self.messages[-1]["content"], self._cut)
        return [next(found)] if self._check == "off" else [*found]

    def _delta(self, form: Form, messages: Sequence[Message]) -> tuple[list[int], str]:
        """The tokens after a response in this form, to the next one, and the text of the transcript with them."""
        before = self.template_messages[:-1]
        rendered = self._tokenizer.rendered([*before, form.marked, *messages], self._arguments, True)
        suffix = rendered.rpartition(MARK)[2].removeprefix(form.closing)
        delta, last = self._tokenizer.encode(suffix), self.ids[-1]
        if not self._cut and delta[:1] == [last]:  # the policy has sampled it
            delta = delta[1:]
        if not delta:
            raise self._empty_reply(messages)
        if self._check == "off":
            return delta, self._shown
        answer = f"{self._shown}{self.messages[-1]['content']}"
        shown = f"{answer}{as_text(suffix)}"
        rendered = self._tokenizer.conversation_text([*before, form.message, *messages], self._arguments, True)
        self._refuse_rewritten(shown, rendered)
        if form.ends is not None and not self._cut:
            self._refuse_rewritten(f"{answer}{self._tokenizer.shown([last])}", f"{answer}{form.ends}")
        return delta, shown

    def _empty_reply(self, messages: Sequence[Message]) -> EpisodeError:
        roles = list(dict.fromkeys(repr(message.get("role")) for message in messages))
        return EpisodeError(
            f"The chat template in {self._tokenizer.folder!r} writes nothing for a reply (roles: "
            f"{', '.join(roles) or 'none'}), so the policy could not read it. Reply with a role that the template "
            f"supports, such as user, or change the template to write the reply and open the assistant's turn.",
            code="tokenizer.empty-reply",
            path=self._tokenizer.folder,
            roles=roles,
        )

    def until(self, answer: int) -> Transcript:
        """The conversation up to one of its answers, by number, as the same tokens; all answers are `inherited`."""
        branch, span = copy.copy(self), self.answers[answer]
        branch.ids, branch.messages = self.ids[: span.start + len(span.ids)], self.messages[: span.message + 1]
        branch.template_messages = [*self.template_messages[: span.message], branch.messages[-1]]
        branch.answers, branch._shown_before = self.answers[: answer + 1], self._shown_before[: answer + 1]
        branch.inherited, branch._shown = answer + 1, self._shown_before[answer]
        return branch

    @property
    def own(self) -> Sequence[SampledSpan]:
        """The answers that were sampled in this transcript."""
        return self.answers[self.inherited :]

    @property
    def sampled(self) -> list[bool]:
        """Whether the policy sampled each token after the prompt."""
        return self._after_prompt(False, lambda span: [True] * len(span.ids))

    @property
    def log_probs(self) -> list[float]:
        """The log-prob of each token after the prompt; 0 for tokens that the policy did not sample."""
        return self._after_prompt(0.0, lambda span: span.log_probs)

    def _after_prompt(self, default: T, of: Callable[[SampledSpan], Sequence[T]]) -> list[T]:
        """One value per token after the prompt: `of` for sampled spans, `default` for the others."""
        values = [default] * (len(self.ids) - self.prompt_length)
        for span in self.own:
            start = span.start - self.prompt_length
            values[start : start + len(span.ids)] = of(span)
        return values

    def _without_end(self, ids: Sequence[int]) -> Sequence[int]:
        """Tokens without the one that ends the turn."""
        return ids[:-1] if ids[-1] in self._tokenizer.ends else ids

    def _ends_with_response(self) -> bool:
        return bool(self.answers) and self.answers[-1].start + len(self.answers[-1].ids) == len(self.ids)

    def _refuse_rewritten(self, transcript: str, rendered: str) -> None:
        a, b = (text if self._check == "strict" else "".join(text.split()) for text in (transcript, rendered))
        if a == b:
            return
        first = next((i for i, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]), min(len(a), len(b)))
        near = slice(max(0, first - 40), first + 40)
        raise EpisodeError(
            f"The chat template in {self._tokenizer.folder!r} rewrites earlier turns once a reply follows: the "
            f"transcript has {a[near]!r}, the template writes {b[near]!r}. Pass "
            f"Interact(rewrites='segment') to train an episode on several sequences, or use a template that keeps "
            f"earlier turns (including thinking).",
            code="tokenizer.rewritten-turns",
            path=self._tokenizer.folder,
            expected=a[near],
            found=b[near],
        )
