"""What megatron-core asks of rows."""

from __future__ import annotations

from flowrl.backends.torch.score.rows import ends
from flowrl.data.segments import begins
from flowrl.errors import DataError
from flowrl.records import Tokens


def refuse_gaps(batch: Tokens) -> None:
    """Refuse rows that hide tokens between others, or skip positions: megatron-core numbers the tokens of a row itself.
    Raises `DataError`."""
    attended = batch.attention_mask.bool()
    first, last = ends(attended)
    starts, both = begins(attended, batch.position_ids)[:, 1:], attended[:, 1:] & attended[:, :-1]
    skips = both & ~starts & (batch.position_ids.diff(dim=1) != 1)
    wrong = (attended.sum(1) != (last - first).clamp(min=0)) | skips.any(1)
    if wrong.any():
        row = int(wrong.nonzero()[0])
        raise DataError(
            f"Row {row} hides tokens between others, or its position_ids skip some; MegatronTrainer computes only "
            f"consecutive tokens. Use TorchTrainer, or rows without gaps.",
            code="megatron.gaps",
            row=row,
        )
