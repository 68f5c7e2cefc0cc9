"""Which tokens of a conversation the assistant writes, for supervised training.

A chat template that marks them by ``{% generation %}``, as transformers and TRL read it, is taken at its word. In any
other template, they are those that the policy would sample: from the end of the generation prompt to the token that
ends the turn. Whitespace that a template writes after that token is not sampled, nor trained. Such a template must not
rewrite earlier turns once more messages follow (strip thinking, merge turns): they would be trained otherwise than the
policy samples them, so only the last turn can be.

Each part is encoded alone, as during generation, where the policy reads the tokens of a prompt and then samples.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from flowrl.data.text.control_tokens import as_text
from flowrl.data.text.tokenizer import ChatTokenizer
from flowrl.errors import DataError


class Turns(NamedTuple):
    """The tokens of a conversation.

    Args:
        prompt: of the text before the first turn to train on.
        ids: of the rest, to the end of the last turn.
        mask: whether the assistant writes each of `ids`.
    """

    prompt: list[int]
    ids: list[int]
    mask: list[bool]


def turns_of(
    tokenizer: ChatTokenizer,
    prompt: Sequence[Mapping[str, Any]],
    response: Sequence[Mapping[str, Any]],
    template_kwargs: Mapping[str, Any] | None = None,
) -> Turns:
    """The tokens of `prompt` and `response`, of which all turns of the assistant in `response` are trained.

    Args:
        response: messages, the first and last of the assistant.

    Raises:
        DataError: the template rejects the messages, or rewrites earlier turns.
    """
    messages = [*prompt, *response]
    whole = tokenizer.rendered(messages, template_kwargs)
    if marks := _marks(tokenizer, messages, template_kwargs):
        return _marked(tokenizer, whole, marks[len(_marks(tokenizer, prompt, template_kwargs)) :])
    opened = tokenizer.rendered(prompt, template_kwargs, add_generation_prompt=True)
    found, end = Turns(tokenizer.encode(opened), [], []), len(opened)
    if not whole.startswith(opened) and response[0].keys() == {"role", "content"} and len(response) == 1:
        # generation reads another prompt than the conversation has, such as a closed thinking block
        _append(found, [*tokenizer.response_ids(response[0]["content"]), tokenizer.turn_end], trained=True)
        return found
    for i in range(len(prompt), len(messages)):
        if messages[i]["role"] != "assistant":
            continue
        if i > len(prompt):
            opened = tokenizer.rendered(messages[:i], template_kwargs, add_generation_prompt=True)
        last = i + 1 == len(messages)
        closed = whole if last else tokenizer.rendered(messages[: i + 1], template_kwargs)
        closed = _to_the_end(tokenizer, closed, len(opened))
        for earlier, later in ((opened, closed), (closed, whole)):
            if not later.startswith(earlier):
                _refuse_rewritten(tokenizer, earlier, later, i)
        _append(found, tokenizer.encode(whole[end : len(opened)]), trained=False)
        _append(found, tokenizer.encode(whole[len(opened) : len(closed)]), trained=True)
        end = len(closed)
    if not found.ids or found.ids[-1] not in tokenizer.ends:  # the template writes no end
        _append(found, [tokenizer.turn_end], trained=True)
    return found


def _marks(
    tokenizer: ChatTokenizer, messages: Sequence[Mapping[str, Any]], template_kwargs: Mapping[str, Any] | None
) -> list[tuple[int, int]]:
    """What the chat template marks by ``{% generation %}`` in the text of a conversation; nothing without marks."""
    from transformers.utils.chat_template_utils import render_jinja_template

    messages, arguments = tokenizer._quoted(messages, template_kwargs)
    given = {**tokenizer._tokenizer.special_tokens_map, **(arguments or {})}
    template = tokenizer._tokenizer.get_chat_template(None, given.get("tools"))
    if not re.search(r"{%[-+]?\s*generation\b", template):
        return []
    given |= {"chat_template": template, "return_assistant_tokens_mask": True}
    spans: Any = render_jinja_template([[*map(dict, messages)]], **given)[1]
    return [(int(start), int(end)) for start, end in spans[0]]


def _marked(tokenizer: ChatTokenizer, whole: str, marks: Sequence[tuple[int, int]]) -> Turns:
    """The turns that a template marks in the text of a conversation."""
    end = marks[0][0]
    found = Turns(tokenizer.encode(whole[:end]), [], [])
    for start, stop in marks:
        _append(found, tokenizer.encode(whole[end:start]), trained=False)
        _append(found, tokenizer.encode(whole[start:stop]), trained=True)
        end = stop
    return found


def _append(turns: Turns, ids: Sequence[int], trained: bool) -> None:
    turns.ids.extend(ids)
    turns.mask.extend([trained] * len(ids))


def _to_the_end(tokenizer: ChatTokenizer, rendered: str, start: int) -> str:
    """A rendered conversation to the first token after `start` that ends a turn; the whole one if there is none."""
    marks = [tokenizer.shown([end]) for end in tokenizer.ends]
    return rendered[: min((at + len(mark) for mark in marks if (at := rendered.find(mark, start)) >= 0), default=None)]


def _refuse_rewritten(tokenizer: ChatTokenizer, earlier: str, later: str, message: int) -> None:
    first = next((i for i, (a, b) in enumerate(zip(earlier, later, strict=False)) if a != b), len(later))
    expected, found = (as_text(text[max(0, first - 40) : first + 40]) for text in (earlier, later))
    raise DataError(
        f"The chat template in {tokenizer.folder!r} rewrites turns once more messages follow: at message {message} it "
        f"writes {expected!r} first, and {found!r} later. So earlier turns of the assistant cannot be trained as they "
        f"would be sampled; use a template that keeps them, or train the last turn only: DemoData(turns='last').",
        code="tokenizer.rewritten-turns",
        path=tokenizer.folder,
        index=message,
        expected=expected,
        found=found,
    )
