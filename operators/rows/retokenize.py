"""`Retokenize`: responses of a model with another tokenizer, as rows of the trained model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from flowrl import columns as c
from flowrl.core.operators.effects import Effect
from flowrl.core.operators.operator import Granularity, Operator
from flowrl.data.proto.column_math import objects
from flowrl.data.text.tokenizer import ChatTokenizer
from flowrl.errors import DataError
from flowrl.padding import assemble, pad_right


class Retokenized(NamedTuple):
    """Prompts and responses in the tokens of another model."""

    prompts: c.Prompts
    responses: c.Responses
    input_ids: c.InputIds
    attention_mask: c.AttentionMask
    position_ids: c.PositionIds
    response_mask: c.ResponseMask
    response_text: c.ResponseText
    temperature: c.Temperature
    policy_version: c.PolicyVersion


class Retokenize(Operator):
    """Encode prompts and responses again, by their text, with the tokenizer of another model.

    It lets a policy learn from a teacher that has another tokenizer. A response is encoded as a demonstration is: its
    text, in which control tokens are text, and the token that ends a turn. The result has no log-probs of the teacher,
    and temperature 1.

    Args:
        model: folder of the model whose tokenizer and chat template encode the rows.
        max_new_tokens: that of the node that sampled; a response with so many tokens was cut off, so its turn does not
            end.
        chat_template_kwargs: arguments of the chat template.

    Raises:
        DataError: the folder has no tokenizer, its chat template rejects a prompt, or a row has several turns.
    """

    granularity: ClassVar[Granularity] = "row"
    new_axes: ClassVar[tuple[str, ...]] = ("prompt", "response")

    model: str
    max_new_tokens: int = Field(ge=1)
    chat_template_kwargs: Mapping[str, Any] = Field(default_factory=dict)

    @property
    def effects(self) -> frozenset[str]:
        """``{"retokenizes"}``."""
        return frozenset({Effect.RETOKENIZES})

    def rehearse(self, tokenizer_of: Callable[[str], ChatTokenizer | None]) -> None:
        _tokenizer(self.model)

    def __call__(
        self,
        raw_prompt: c.RawPrompt,
        response_text: c.ResponseText,
        response_mask: c.ResponseMask,
        policy_version: c.PolicyVersion,
    ) -> Retokenized:
        _refuse_several_turns(response_mask, self.name)
        tokenizer, device = _tokenizer(self.model), response_mask.device
        prompts, prompt_mask = tokenizer.pad_left(
            [tokenizer.prompt_ids(messages, self.chat_template_kwargs) for messages in raw_prompt]
        )
        cut = (response_mask.sum(-1) >= self.max_new_tokens).tolist()
        ids = [tokenizer.response_ids(text) for text in response_text]
        ended = [row if off else [*row, tokenizer.turn_end] for row, off in zip(ids, cut, strict=True)]
        responses, mask = pad_right(ended, tokenizer.pad_id)
        input_ids, attention_mask, position_ids = assemble(prompts, prompt_mask, responses, mask)
        return Retokenized(
            prompts.to(device),
            responses.to(device),
            input_ids.to(device),
            attention_mask.to(device),
            position_ids.to(device),
            mask.to(device),
            objects(response_text),
            torch.ones(len(mask), device=device),
            policy_version,
        )


def _refuse_several_turns(response_mask: Tensor, node: str) -> None:
    """Refuse episodes, whose text is that of their last turn."""
    begins = response_mask & ~torch.nn.functional.pad(response_mask[:, :-1], (1, 0))
    several = (begins.sum(-1) > 1).nonzero().flatten().tolist()
    if several:
        raise DataError(
            f"Row {several[0]} ({len(several)} of {len(response_mask)}) of {node} has several turns, but its "
            f"response_text is the last of them only, which does not follow the prompt. Sample with Generate(...) or "
            f"Interact(..., max_turns=1).",
            code="rows.several-turns",
            node=node,
            row=several[0],
        )


@functools.lru_cache(maxsize=4)
def _tokenizer(folder: str) -> ChatTokenizer:
    return ChatTokenizer(folder)
