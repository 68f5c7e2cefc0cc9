"""`Judge`: a model that generates is asked what a response is worth, and its answer is read by a user's function."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from string import Formatter
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np
import torch
from pydantic import Field

from flowrl.columns import Conversation, GroundTruth, PromptMask, Prompts, RawPrompt, RowId, TokenLevelScores, parse
from flowrl.core.operators import references
from flowrl.core.operators.ports import INJECTED, FromParameters, Port, PortField, Signature
from flowrl.core.operators.roles import Reads, Role
from flowrl.data.keys import Key
from flowrl.data.metrics import Metrics
from flowrl.errors import DataError, ParameterError, RewardError
from flowrl.operators.engines.engines import Generate
from flowrl.operators.reward.models import placed
from flowrl.operators.reward.operator import Scorable
from flowrl.protocols.protocols import Rollout

FIELDS = ("prompt", "response", "reference", "conversation")


class Question(NamedTuple):
    """What the judge is asked, in its own tokens."""

    prompts: Prompts
    prompt_mask: PromptMask
    row_id: RowId


class Judgeable(Protocol):
    """What a response is judged by, and which row it is."""

    @property
    def raw_prompt(self) -> RawPrompt: ...
    @property
    def ground_truth(self) -> GroundTruth: ...
    @property
    def row_id(self) -> RowId: ...


class Judge(Generate):
    """Score each response by the answer of a judge, on the last token on the mask.

    The judge is an engine that generates and is not trained, such as ``TorchRollout(folder, frozen=True)``. It is asked
    in its own tokens, by its own chat template, so it need not have the policy's vocabulary; and it samples as
    `Generate` does, greedily unless said. Rows that are masked entirely are not judged.

    Reports ``<log>/mean``, ``<log>/min``, ``<log>/max``, ``<log>/unparsed`` (how many answers) and, under the node's
    name, what `Generate` reports of the judge's answers.

    Args:
        template: what the judge is asked as a user: text with ``{response}`` in it, or ``{conversation}`` (all that was
            said in an episode of `Interact`), and ``{prompt}`` (the messages of the prompt) and ``{reference}``
            (`ground_truth`) where wanted; braces themselves are doubled.
        parse: makes a number of an answer, given its text, or None where it cannot: a function, or where to find one.
        unparsed: ``"error"``, or the score of a row whose answer is no finite number by `parse`.
        log: what metrics begin with.
        rollout: the judge.

    Raises:
        ParameterError: on construction: the template asks about no response and no conversation, or about something
            else; or there is no such function.
        RewardError: an answer cannot be parsed and `unparsed` is ``"error"``, or `parse` raises; names the row.
        DataError: the template wants a reference, and a row has none; or the question is longer than the judge reads.
        SyncError: the judge holds no weights that it could answer with.
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
            named = self._named
        except ValueError as error:
            raise ParameterError(
                f"the template {self.template!r} is broken ({error}); expected text with {{response}} in it, where "
                f"braces that stand for themselves are doubled."
            ) from None
        about = named & {"response", "conversation"}
        if not about or (odd := sorted(named - set(FIELDS))):
            found = f"names {odd[0]!r}" if about else "names no response"
            raise ParameterError(
                f"the template {self.template!r} {found}; expected {{response}} or, of episodes, {{conversation}}, and "
                f"perhaps {{prompt}} and {{reference}}; braces that stand for themselves are doubled: {{{{ and }}}}."
            )

    @property
    def _named(self) -> frozenset[str]:
        """What the template asks for."""
        return frozenset(name for _, name, _, _ in Formatter().parse(self.template) if name is not None)

    @cached_property
    def more_ports(self) -> Signature:
        """`conversation`, where the template has it."""
        wanted = parse(Conversation)
        assert wanted is not None
        port = Port("conversation", {PortField("conversation"): wanted})
        return Signature({port.name: port} if port.name in self._named else {}, {}, {})

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
            said, unparsed = Metrics(), 0
            question = self._question(response, prompts, rows, columns.get("conversation"))
            answers = super().__call__(question, key=key, metrics=said)
            metrics.merge({f"{self.name}/{name}": metric for name, metric in said.items()})
            for row, text in zip(rows, answers.response_text, strict=True):
                score = self._parsed(text, prompts.row_id[row])
                unparsed += score is None
                scores[row] = float(self.unparsed) if score is None else score
            metrics.sum(f"{self.log}/unparsed", unparsed)
        return placed(self.name, self.log, scores, response.response_mask, metrics)

    def _question(
        self, response: Scorable, prompts: Judgeable, rows: Sequence[int], said: Conversation | None
    ) -> Question:
        """The questions about these rows."""
        tokenizer, asked = self.rollout.tokenizer, []
        wants_reference = "reference" in self._named
        for row in rows:
            reference = prompts.ground_truth[row]
            if wants_reference and reference in (None, ""):
                raise DataError(
                    f"{self.name}: the template has {{reference}}, and row {prompts.row_id[row]!r} has no ground_truth "
                    f"({reference!r}); expected a reference answer in every row of the data, or a template without it."
                )
            text = self.template.format(
                prompt=conversation(prompts.raw_prompt[row]),
                response=response.response_text[row],
                reference=reference,
                conversation="" if said is None else conversation(said[row]),
            )
            asked.append(tokenizer.prompt_ids([{"role": "user", "content": text}]))
        ids, mask = tokenizer.pad_left(asked)
        return Question(ids, mask, prompts.row_id[np.array(rows)])

    def _parsed(self, text: str, row_id: str) -> float | None:
        """What `parse` makes of an answer; None where that is no number, and that is allowed."""
        parse = references.resolve(self.parse) if isinstance(self.parse, str) else self.parse
        try:
            found = parse(text)
            score = None if found is None else float(found)
        except Exception as error:
            raise RewardError(
                f"{self.name}: parse raised {type(error).__name__}: {error}, for the judge's answer {text!r} to row "
                f"{row_id!r}; expected a number, or None where there is none in the answer."
            ) from error
        if score is not None and math.isfinite(score):
            return score
        if self.unparsed == "error":
            raise RewardError(
                f"{self.name}: parse made {found!r} of the judge's answer {text!r} to row {row_id!r}; expected a "
                f"finite number: ask more clearly, allow more max_new_tokens, or choose the score of such rows by "
                f"Judge(..., unparsed=0.0)."
            )
        return None


def conversation(messages: Sequence[Mapping[str, Any]]) -> str:
    """The text of messages: of one, its content; of several, each behind its role."""
    if len(messages) == 1:
        return str(messages[0].get("content", ""))
    return "\n\n".join(f"{message['role']}: {message.get('content', '')}" for message in messages)
