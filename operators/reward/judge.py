"""`Judge`: scores responses by a generating model, whose verdict a user's function parses."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from string import Formatter
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np
import torch
from pydantic import Field

from flowrl import references
from flowrl.columns import Conversation, GroundTruth, PromptMask, Prompts, RawPrompt, RowId, TokenLevelScores, parse
from flowrl.core.operators.ports import INJECTED, FromParameters, Port, PortField, Signature
from flowrl.core.operators.roles import Reads, Role
from flowrl.data.keys import Key
from flowrl.data.metrics import Metrics
from flowrl.errors import DataError, ParameterError, RewardError
from flowrl.operators.engines.engines import Generate
from flowrl.operators.reward.models import place_row_scores
from flowrl.operators.reward.operator import Scorable
from flowrl.protocols.protocols import Rollout

FIELDS = ("prompt", "response", "reference", "conversation")


class Question(NamedTuple):
    """The prompts of the judge, in its own tokens."""

    prompts: Prompts
    prompt_mask: PromptMask
    row_id: RowId


class Judgeable(Protocol):
    """The columns of the prompt that a judge reads."""

    @property
    def raw_prompt(self) -> RawPrompt: ...
    @property
    def ground_truth(self) -> GroundTruth: ...
    @property
    def row_id(self) -> RowId: ...


class Judge(Generate):
    """Score each response by the verdict of a judge, on the last token on the mask.

    The judge is an engine that generates and is not trained, such as ``TorchRollout(folder, frozen=True)``. It uses its
    own tokenizer and chat template, so its vocabulary may differ from the policy's. It samples like `Generate`, by
    default greedily. Fully masked rows are not judged.

    Reports ``<log>/mean``, ``<log>/min``, ``<log>/max``, ``<log>/unparsed`` (number of verdicts) and, under the node's
    name, the metrics of `Generate` for the verdicts.

    Args:
        template: the user message to the judge: text with ``{response}`` or ``{conversation}`` (all messages of an
            episode of `Interact`), and optionally ``{prompt}`` (the messages of the prompt) and ``{reference}``
            (`ground_truth`). Write literal braces twice: ``{{`` and ``}}``.
        parse: function from the text of a verdict to a number, or None if there is none; or a reference to it.
        unparsed: ``"error"``, or the score of a row without a finite number.
        log: prefix of the metrics.
        rollout: the judge.

    Raises:
        ParameterError: on construction: the template has neither ``{response}`` nor ``{conversation}``, or an unknown
            field; or the reference to `parse` is invalid.
        RewardError: `parse` raises, or returns no finite number and `unparsed` is ``"error"``; names the row.
        DataError: the template has ``{reference}`` and a row has none; or the prompt is too long for the judge.
        SyncError: the judge has no weights.
    """

    references: ClassVar[frozenset[str]] = frozenset({"parse"})

    temperature: float = Field(default=0.0, ge=0)
    rollout: Reads[Rollout] = Role("judge")
    template: str = Field(kw_only=True)
    parse: Callable[..., Any] | str = Field(kw_only=True)
    unparsed: Literal["error"] | Annotated[float, Field(allow_inf_nan=False, strict=True)] = Field(
        default="error", kw_only=True
    )
    log: str = Field(default="reward", kw_only=True)

    def __post_init__(self) -> None:
        if isinstance(self.parse, str):
            references.check(self.parse)
        try:
            fields = self._fields
        except ValueError as error:
            raise ParameterError(
                f"The template {self.template!r} is malformed ({error}). Put {{response}} into it, and write literal "
                f"braces twice: {{{{ and }}}}.",
                code="judge.invalid-template",
                given=self.template,
            ) from None
        about = fields & {"response", "conversation"}
        if not about or (unknown := sorted(fields - set(FIELDS))):
            found = f"has an unknown field {unknown[0]!r}" if about else "has no response"
            raise ParameterError(
                f"The template {self.template!r} {found}, expected {{response}} (for episodes {{conversation}}), and "
                f"optionally {{prompt}} and {{reference}}. Write literal braces twice: {{{{ and }}}}.",
                code="judge.invalid-template",
                given=self.template,
            )

    @property
    def _fields(self) -> frozenset[str]:
        """The fields of the template."""
        return frozenset(name for _, name, _, _ in Formatter().parse(self.template) if name is not None)

    @cached_property
    def more_ports(self) -> Signature:
        """`conversation`, if the template has it."""
        typed = parse(Conversation)
        assert typed is not None
        port = Port("conversation", {PortField("conversation"): typed})
        return Signature({port.name: port} if port.name in self._fields else {}, {}, {})

    def __call__(  # type: ignore[override]
        self,
        response: Scorable,
        prompts: Judgeable,
        key: Key = INJECTED,
        metrics: Metrics = INJECTED,
        **columns: FromParameters,
    ) -> TokenLevelScores:
        rows = response.response_mask.any(-1).nonzero().flatten().tolist()
        scores = torch.zeros(len(response.response_mask))
        if rows:
            of_verdicts, unparsed = Metrics(), 0
            question = self._question(response, prompts, rows, columns.get("conversation"))
            verdicts = super().__call__(question, key=key, metrics=of_verdicts)
            metrics.merge({f"{self.name}/{name}": metric for name, metric in of_verdicts.items()})
            for row, text in zip(rows, verdicts.response_text, strict=True):
                score = self._parsed(text, prompts.row_id[row])
                unparsed += score is None
                scores[row] = float(self.unparsed) if score is None else score
            metrics.sum(f"{self.log}/unparsed", unparsed)
        return place_row_scores(self.name, self.log, scores, response.response_mask, metrics)

    def _question(
        self, response: Scorable, prompts: Judgeable, rows: Sequence[int], messages: Conversation | None
    ) -> Question:
        """The prompts of the judge for these rows."""
        tokenizer, questions = self.rollout.tokenizer, []
        needs_reference = "reference" in self._fields
        for row in rows:
            reference = prompts.ground_truth[row]
            if needs_reference and reference in (None, ""):
                raise DataError(
                    f"{self.name}: the template has {{reference}}, and the ground_truth of row {prompts.row_id[row]!r} "
                    f"is {reference!r}. Put a reference into every row of the data, or remove it from the template.",
                    code="judge.no-reference",
                    node=self.name,
                    row=prompts.row_id[row],
                )
            text = self.template.format(
                prompt=conversation(prompts.raw_prompt[row]),
                response=response.response_text[row],
                reference=reference,
                conversation="" if messages is None else conversation(messages[row]),
            )
            questions.append(tokenizer.prompt_ids([{"role": "user", "content": text}]))
        ids, mask = tokenizer.pad_left(questions)
        return Question(ids, mask, prompts.row_id[np.array(rows)])

    def _parsed(self, text: str, row_id: str) -> float | None:
        """The score in a verdict; None if there is none and `unparsed` is a score."""
        parse = references.resolve(self.parse) if isinstance(self.parse, str) else self.parse
        try:
            found = parse(text)
            score = None if found is None else float(found)
        except Exception as error:
            raise RewardError(
                f"{self.name}: parse raised {type(error).__name__}: {error}, for the judge's verdict {text!r} on row "
                f"{row_id!r}. Return a number, or None for a verdict without one.",
                code="judge.parse-raised",
                node=self.name,
                row=row_id,
                error=type(error).__name__,
            ) from error
        if score is not None and math.isfinite(score):
            return score
        if self.unparsed == "error":
            raise RewardError(
                f"{self.name}: parse returned {found!r} for the judge's verdict {text!r} on row {row_id!r}, expected a "
                f"finite number. Change the template, raise max_new_tokens, or score such rows by "
                f"Judge(..., unparsed=0.0).",
                code="judge.unparsed",
                node=self.name,
                row=row_id,
                found=repr(found),
            )
        return None


def conversation(messages: Sequence[Mapping[str, Any]]) -> str:
    """The text of messages: the content of a single message, or each content after its role."""
    if len(messages) == 1:
        return str(messages[0].get("content", ""))
    return "\n\n".join(f"{message['role']}: {message.get('content', '')}" for message in messages)
