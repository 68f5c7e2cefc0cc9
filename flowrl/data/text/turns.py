"""Which tokens of a conversation the assistant writes, for supervised training.

The tokens of an assistant's turn are those that the policy would sample there: from the end of the generation prompt to
the token that ends the turn. Each part is encoded alone, as during generation, where the policy reads the tokens of a
prompt and then samples. Whitespace that a template writes after the end of a turn is not sampled, nor trained.

A template that rewrites earlier turns once more messages follow (it strips thinking, merges turns) shows an earlier
turn otherwise than the policy would have sampled it. Only its last turn can be trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from flowrl.data.text.control_tokens import as_text
from flowrl.data.text.tokenizer import ChatTokenizer
from flowrl.errors import DataError


class Turns(NamedTuple):
    """The tokens of a conversation from the first turn to train on.

    Args:
        ids: of all its messages to the end of the last turn.
        mask: whether the assistant writes each.
    """

    ids: list[int]
    mask: list[bool]


def turns_of(
    tokenizer: ChatTokenizer,
    prompt: Sequence[Mapping[str, Any]],
    response: Sequence[Mapping[str, Any]],
    template_kwargs: Mapping[str, Any] | None = None,
) -> Turns:
    """The tokens that follow ``tokenizer.prompt_ids(prompt)``; all turns of the assistant in `response` are trained.

    Args:
        response: messages, the first and last of the assistant.

    Raises:
        DataError: the template rejects the messages, or rewrites earlier turns.
    """
    messages, start = [*prompt, *response], len(prompt)
    whole = tokenizer.rendered(messages, template_kwargs)
    opened = tokenizer.rendered(prompt, template_kwargs, add_generation_prompt=True)
    if not whole.startswith(opened) and response[0].keys() == {"role", "content"} and len(response) == 1:
        # generation reads another prompt than the conversation has, such as a closed thinking block
        ids = [*tokenizer.response_ids(response[0]["content"]), tokenizer.turn_end]
        return Turns(ids, [True] * len(ids))
    found, end = Turns([], []), len(opened)
    for i in range(start, len(messages)):
        if messages[i]["role"] != "assistant":
            continue
        if i > start:
            opened = tokenizer.rendered(messages[:i], template_kwargs, add_generation_prompt=True)
        closed = _to_the_end(
            tokenizer,
            tokenizer.rendered(messages[: i + 1], template_kwargs) if i + 1 < len(messages) else whole,
            len(opened),
        )
        for earlier, later in ((opened, closed), (closed, whole)):
            if not later.startswith(earlier):
                _refuse_rewritten(tokenizer, earlier, later, i)
        _append(found, tokenizer.encode(whole[end : len(opened)]), trained=False)
        _append(found, tokenizer.encode(whole[len(opened) : len(closed)]), trained=True)
        end = len(closed)
    if not found.ids or found.ids[-1] not in tokenizer.ends:  # the template writes no end
        _append(found, [tokenizer.turn_end], trained=True)
    return found


def _append(turns: Turns, ids: Sequence[int], trained: bool) -> None:
    turns.ids.extend(ids)
    turns.mask.extend([trained] * len(ids))


def _to_the_end(tokenizer: ChatTokenizer, rendered: str, start: int) -> str:
    """A rendered conversation up to the token that ends the last turn, which begins at `start`; the whole one if the
    template writes no such token."""
    marks = [tokenizer.shown([end]) for end in tokenizer.ends]
    return rendered[: max((at + len(mark) for mark in marks if (at := rendered.rfind(mark, start)) >= 0), default=None)]


def _refuse_rewritten(tokenizer: ChatTokenizer, earlier: str, later: str, message: int) -> None:
    first = next((i for i, (a, b) in enumerate(zip(earlier, later, strict=False)) if a != b), len(later))
    expected, found = (as_text(text[max(0, first - 40) : first + 40]) for text in (earlier, later))
    raise DataError(
        f"The chat template in {tokenizer.folder!r} rewrites turns once more messages follow: at message {message} it "
        f"writes {expected!r} first, and {found!r} later. So earlier turns of the assistant cannot be trained as they "
        f"would be sampled; use a template that keeps them, or train the last turn only: DemoData(..., turns='last').",
        code="tokenizer.rewritten-turns",
        path=tokenizer.folder,
        index=message,
        expected=expected,
        found=found,
    )
