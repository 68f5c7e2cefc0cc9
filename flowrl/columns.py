"""Every column, defined once: an annotated tensor with its name in the `DataProto` and the *kind* of its numbers.

A column type is ``Annotated[<jaxtyping array>, Column(name, kind, ...)]``: jaxtyping gives dtype and axes, `Column`
gives the name, the kind and the pad value. The kind is the meaning of the numbers, so passing `values` to a port of
`token_level_rewards` is an error although both are float32 ``[batch response]``.

Names follow verl. Prompts are padded on the left, responses on the right, and a sequence is a prompt followed by its
response, so response token ``t`` is sequence token ``sequence - response + t``.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import numpy as np
from jaxtyping import Bool, Float32, Int64, Shaped
from torch import Tensor

from flowrl.errors import DefinitionError

Side = Literal["left", "right", "sequence"]

# How the axes of a padded column are padded. "sequence" is a left-padded prompt followed by a right-padded response.
PAD_SIDE: dict[str, Side] = {"prompt": "left", "response": "right", "sequence": "sequence"}

# A reward without KL is a score, so a port of rewards accepts scores; no other kinds mix.
ACCEPTED_KINDS: dict[str, frozenset[str]] = {"reward": frozenset({"reward", "score"})}


@dataclass(frozen=True)
class Column:
    """The annotation of a column, in addition to dtype and axes.

    Raises:
        DefinitionError: the name is not an identifier, the kind is empty, or the pad is not a number.

    Args:
        name: the column's name in a `DataProto`.
        kind: what the numbers mean; ports are matched by kind, dtype and axes, not by name.
        pad: the value that fills padding when rows of unequal width are joined.
    """

    name: str
    kind: str
    pad: int | float | bool = 0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.isidentifier():
            raise DefinitionError(
                f"Column({self.name!r}, ...): the name is not an identifier. Pass a name such as 'values'.",
                code="column.definition",
                argument="name",
                found=repr(self.name),
            )
        if not isinstance(self.kind, str) or not self.kind:
            raise DefinitionError(
                f"Column({self.name!r}, {self.kind!r}): the kind is not text. Pass what the numbers mean, such as "
                f"'value'.",
                code="column.definition",
                argument="kind",
                found=repr(self.kind),
            )
        if not isinstance(self.pad, int | float):
            raise DefinitionError(
                f"Column({self.name!r}, pad={self.pad!r}): the padding is not a number. Pass a number, such as 0.",
                code="column.definition",
                argument="pad",
                found=repr(self.pad),
            )


@dataclass(frozen=True)
class Own:
    """The annotation of a port by `Rows` and `Widths`: its axes are not those of the other ports.

    Args:
        name: of these axes within the operator.
        rows: whether its rows are separate, too.
    """

    name: str
    rows: bool


if TYPE_CHECKING:
    from typing import Annotated as Rows
    from typing import Annotated as Widths
else:

    class Rows:
        """``demos: Rows[RolloutBatch, "demo"]``: a port with other rows than the operator's other ports,
        and so with other axes; ports of one name share them. Each rank gets all of these rows."""

        def __class_getitem__(cls, given: Any) -> Any:
            return Annotated[given[0], _own("Rows", given, rows=True)]

    class Widths:
        """``second: Widths[RolloutBatch, "second"]``: a port on the same rows, whose prompts and responses may have
        other widths: for example, those of another `Generate`."""

        def __class_getitem__(cls, given: Any) -> Any:
            return Annotated[given[0], _own("Widths", given, rows=False)]


def _own(annotation: str, given: Any, rows: bool) -> Own:
    name = given[1] if isinstance(given, tuple) and len(given) == 2 else None
    if not isinstance(name, str) or not name.isidentifier() or name == "batch":
        raise DefinitionError(
            f"{annotation}[...] needs a record or column and a name of its axes other than batch. Write "
            f'{annotation}[RolloutBatch, "demo"].',
            code="column.port-axes",
            annotation=annotation,
        )
    return Own(name, rows)


def split_axes(annotation: Any) -> tuple[Any, Own | None]:
    """An annotation without that of `Rows` or `Widths`, and the latter."""
    extras = get_args(annotation)[1:] if get_origin(annotation) is Annotated else ()
    if not (own := [extra for extra in extras if isinstance(extra, Own)]):
        return annotation, None
    if len(own) > 1:
        raise DefinitionError(
            f"A port has two names of axes, {own[0].name!r} and {own[1].name!r}. Use one Rows[...] or Widths[...].",
            code="column.port-axes",
            names=[own[0].name, own[1].name],
        )
    rest = tuple(extra for extra in extras if extra is not own[0])
    plain = get_args(annotation)[0]
    return (Annotated[(plain, *rest)] if rest else plain), own[0]


@dataclass(frozen=True)
class ColumnType:
    """A column annotation, parsed: `name`, `kind`, `dtype` (``"float32"``, ..., ``"object"``), `axes`, `pad`; and of a
    port that has axes of its own, which."""

    name: str
    kind: str
    dtype: str
    axes: tuple[str, ...]
    pad: int | float | bool = 0
    own: Own | None = None

    def __str__(self) -> str:
        return f"{self.kind}[{' '.join(self.here)}] {self.dtype}"

    @property
    def here(self) -> tuple[str, ...]:
        """The axes by their names within an operator: ``demo`` and ``demo.response`` are a separate port's."""
        if self.own is None:
            return self.axes
        rows = self.own.name if self.own.rows else self.axes[0]
        return rows, *(f"{self.own.name}.{axis}" for axis in self.axes[1:])

    @property
    def on_batch(self) -> bool:
        """Whether its rows are those that the operator processes."""
        return self.own is None or not self.own.rows

    def accepts(self, other: ColumnType) -> bool:
        """Whether a column of type `other` may be read in place of this one (regardless of axis *identity*)."""
        kinds = ACCEPTED_KINDS.get(self.kind, frozenset({self.kind}))
        return other.kind in kinds and self.dtype == other.dtype and self.axes == other.axes


def parse(annotation: Any) -> ColumnType | None:
    """The `ColumnType` of an annotation, or None if it is not a column."""
    if get_origin(annotation) is not Annotated:
        return None
    array, *extras = get_args(annotation)
    found = [e for e in extras if isinstance(e, Column)]
    if not found:
        return None
    column = found[0]
    if len(found) > 1:
        raise DefinitionError(
            f"An annotation has two columns, {column.name!r} and {found[1].name!r}. Keep one.",
            code="column.definition",
            column=column.name,
            other=found[1].name,
        )
    dtypes, axes = getattr(array, "dtypes", None), getattr(array, "dim_str", None)
    if axes is None:
        raise DefinitionError(
            f"Column {column.name!r} annotates {array!r}. Expected a jaxtyping array, such as "
            f'Annotated[Float32[Tensor, "batch response"], Column({column.name!r}, {column.kind!r})].',
            code="column.definition",
            column=column.name,
            found=repr(array),
        )
    names = tuple(axes.split())
    if names[:1] != ("batch",) or len(set(names)) < len(names) or not all(name.isidentifier() for name in names):
        raise DefinitionError(
            f"Column {column.name!r} has the axes {axes!r}. Expected distinct names, the first one batch, such as "
            f"'batch response'.",
            code="column.definition",
            column=column.name,
            axes=axes,
        )
    # jaxtyping lists the dtypes that it allows, or has a marker for any; it spells torch.bool as "bool_" and "bool"
    allowed = {str(d).removesuffix("_") for d in dtypes} if isinstance(dtypes, list | tuple) else None
    if array.array_type is np.ndarray and allowed is None:
        dtype = "object"
    elif array.array_type is Tensor and allowed is not None and len(allowed) == 1:
        dtype = allowed.pop()
    else:
        raise DefinitionError(
            f"Column {column.name!r} annotates {array.__name__}. Expected a Tensor of exactly one dtype, such as "
            f'Float32[Tensor, "batch response"], or an array of objects, Shaped[np.ndarray, "batch"].',
            code="column.definition",
            column=column.name,
            found=array.__name__,
        )
    return ColumnType(column.name, column.kind, dtype, names, column.pad)


_registry: dict[str, ColumnType] = {}


def register(column: ColumnType) -> ColumnType:
    """Register `column` under its name, for padding and display; a second, different definition is an error."""
    known = _registry.setdefault(column.name, column)
    if known != column:
        raise DefinitionError(
            f"Column {column.name!r} is already defined as {known} (pad {known.pad!r}), and now as {column} "
            f"(pad {column.pad!r}). Choose another name for the new column.",
            code="column.definition",
            column=column.name,
            expected=str(known),
            found=str(column),
        )
    return known


def lookup(name: str) -> ColumnType | None:
    """The column type that is defined under `name`, or None."""
    return _registry.get(name)


Prompts = Annotated[Int64[Tensor, "batch prompt"], Column("prompts", "tokens")]
PromptMask = Annotated[Bool[Tensor, "batch prompt"], Column("prompt_mask", "mask", pad=False)]
Responses = Annotated[Int64[Tensor, "batch response"], Column("responses", "tokens")]
InputIds = Annotated[Int64[Tensor, "batch sequence"], Column("input_ids", "tokens")]
AttentionMask = Annotated[Bool[Tensor, "batch sequence"], Column("attention_mask", "mask", pad=False)]
PositionIds = Annotated[Int64[Tensor, "batch sequence"], Column("position_ids", "positions")]
ResponseMask = Annotated[Bool[Tensor, "batch response"], Column("response_mask", "mask", pad=False)]
"""True at tokens that the policy itself sampled and the loss counts."""

RolloutLogProbs = Annotated[
    Float32[Tensor, "batch response"], Column("rollout_log_probs", "log-prob of the rollout", 0.0)
]
OldLogProbs = Annotated[Float32[Tensor, "batch response"], Column("old_log_probs", "log-prob of the old policy", 0.0)]
LogProbs = Annotated[
    Float32[Tensor, "batch response"], Column("log_probs", "log-prob of the policy that is trained", 0.0)
]
"""The model's current log-probs, with a gradient: for losses. No operator writes it."""
Entropies = Annotated[
    Float32[Tensor, "batch response"], Column("entropies", "entropy of the policy that is trained", 0.0)
]
"""Of the next-token distribution, with a gradient: for losses."""
Distributions = Annotated[
    Float32[Tensor, "batch vocabulary"], Column("distributions", "distribution of the policy that is trained")
]
"""Log-probs of the whole vocabulary after each token, with a gradient: for losses, which see a few tokens at a time."""
TeacherIds = Annotated[Int64[Tensor, "batch response top"], Column("teacher_ids", "tokens that a teacher finds likely")]
TeacherLogProbs = Annotated[
    Float32[Tensor, "batch response top"], Column("teacher_log_probs", "log-prob of a teacher's likely tokens")
]
TeacherRest = Annotated[
    Float32[Tensor, "batch response"], Column("teacher_rest", "log-prob of all tokens but a teacher's likely ones")
]
TeacherHiddenStates = Annotated[
    Float32[Tensor, "batch response hidden"], Column("teacher_states", "last hidden state of a teacher")
]
"""A teacher's head turns it into distributions over the whole vocabulary; see `flowrl.protocols.heads`."""
NewValues = Annotated[Float32[Tensor, "batch response"], Column("new_values", "value of the critic that is trained")]
"""The critic's current values, with a gradient: for losses."""
NewScores = Annotated[
    Float32[Tensor, "batch response"], Column("new_scores", "score of the reward model that is trained", 0.0)
]
"""The reward model's current scores, with a gradient, each on the last token on the mask: for losses."""
RefLogProbs = Annotated[Float32[Tensor, "batch response"], Column("ref_log_prob", "log-prob of the reference", 0.0)]
LogitNorms = Annotated[
    Float32[Tensor, "batch response"], Column("logit_norms", "squared norm in the logits of the old policy", 0.0)
]
"""``||d log p(token) / d logits||**2`` of each token, between 0 and 2: the uncertainty of the policy about it."""
Values = Annotated[Float32[Tensor, "batch response"], Column("values", "value", 0.0)]
Returns = Annotated[Float32[Tensor, "batch response"], Column("returns", "return", 0.0)]
Advantages = Annotated[Float32[Tensor, "batch response"], Column("advantages", "advantage", 0.0)]
TokenLevelScores = Annotated[Float32[Tensor, "batch response"], Column("token_level_scores", "score", 0.0)]
TokenLevelRewards = Annotated[Float32[Tensor, "batch response"], Column("token_level_rewards", "reward", 0.0)]

RowScores = Annotated[Float32[Tensor, "batch"], Column("row_scores", "score of a row")]
"""The score of a whole response, such as that of another response to the same prompt, as its baseline."""

Margin = Annotated[Float32[Tensor, "batch"], Column("margin", "margin of a pair")]
"""The margin by which the chosen response of a pair should lead, at both of its rows; 0 if the data has none."""
KLBaseline = Annotated[Float32[Tensor, "batch"], Column("kl_baseline", "KL baseline")]
"""An estimate of KL to the reference, the same for all rows; see `flowrl.operators.KTOBaseline`."""

Temperature = Annotated[Float32[Tensor, "batch"], Column("temperature", "temperature", 1.0)]
"""The temperature that a row was sampled at; all later log-probs of the row use it."""
PolicyVersion = Annotated[Int64[Tensor, "batch"], Column("policy_version", "version", -1)]
"""Which version of the policy sampled a row: the oldest of its tokens'; -1 if none did, -2 if a frozen engine did."""
TokenVersion = Annotated[Int64[Tensor, "batch response"], Column("token_version", "version of a token", pad=-1)]
"""Which version of the policy sampled a token; -1 if none did, -2 if a frozen engine did."""

Turns = Annotated[Int64[Tensor, "batch"], Column("turns", "number of turns")]
"""The number of responses of the policy in an episode."""
TurnIds = Annotated[Int64[Tensor, "batch response"], Column("turn_ids", "turn of a token", pad=-1)]
"""The turn of a token in its episode, from 0; -1 if the policy did not sample it."""

Asked = Annotated[Shaped[np.ndarray, "batch"], Column("asked", "episodes of other engines")]
"""By the name of each other engine that an episode may ask, what that engine read and sampled: a dict of
`flowrl.episodes.sequences.OtherSide`."""

RowMask = Annotated[Bool[Tensor, "batch"], Column("row_mask", "row mask", pad=False)]
"""Whether a row passes a `Filter` or a `Collect`."""

Uid = Annotated[Shaped[np.ndarray, "batch"], Column("uid", "group")]
RowId = Annotated[Shaped[np.ndarray, "batch"], Column("row_id", "row id")]
DataSource = Annotated[Shaped[np.ndarray, "batch"], Column("data_source", "source name")]
GroundTruth = Annotated[Shaped[np.ndarray, "batch"], Column("ground_truth", "ground truth")]
ExtraInfo = Annotated[Shaped[np.ndarray, "batch"], Column("extra_info", "record")]
RawPrompt = Annotated[Shaped[np.ndarray, "batch"], Column("raw_prompt", "messages")]
Conversation = Annotated[Shaped[np.ndarray, "batch"], Column("conversation", "messages of an episode")]
Episode = Annotated[Shaped[np.ndarray, "batch"], Column("episode", "how an episode went")]
"""The messages of an episode and its outcome, as plain data; see `flowrl.episodes.summary`."""

ResponseText = Annotated[Shaped[np.ndarray, "batch"], Column("response_text", "text")]

for _name, _value in list(vars(sys.modules[__name__]).items()):
    if (_parsed := parse(_value)) is not None:
        register(_parsed)
