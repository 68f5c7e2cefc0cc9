"""The live engine of a `MegatronTrainer`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from flowrl.backends.megatron.model import MegatronModel
from flowrl.backends.torch.score.engine import TorchTrainerEngine
from flowrl.backends.torch.score.rows import Rows, SequenceInputs, ends, micro_rows, put
from flowrl.data.segments import begins
from flowrl.errors import DataError
from flowrl.records import Sequences


class MegatronTrainerEngine(TorchTrainerEngine):
    """A live `Trainer` on megatron-core; made by `MegatronTrainer.build`.

    Its processes make the same calls. Those with the same rows get the same scores; only those of the last stage have
    metrics.
    """

    _scorer: MegatronModel

    def _checked(self, batch: Rows) -> Rows:
        found = super()._checked(batch)
        refuse_gaps(batch)  # type: ignore[arg-type]
        return found

    def _score(
        self,
        call: str,
        batch: Sequences,
        out: Sequence[Tensor],
        score: Callable[[SequenceInputs], Sequence[Tensor]],
    ) -> None:
        self.residence.require_awake(call)
        mesh = self._scorer.mesh
        with mesh.all_or_none(call):
            inputs = SequenceInputs.of(batch, self._scorer.vocabulary)
            refuse_gaps(inputs)
        runs = [(run, micro) for run, micro in micro_rows(mesh, inputs, self._budget) if run is not None]

        def see(number: int) -> None:
            run, micro = runs[number]
            put(out, run, score(micro))

        self._scorer.run([micro for _, micro in runs], see, backward=False)
        for column in out:
            mesh.from_last(column)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `TrainedEngine.load_state_dict`; a collective."""
        super().load_state_dict(state)
        self._scorer.stage.share_embedding()

    def load_checkpoint(self, folder: str) -> None:
        """See `TrainedEngine.load_checkpoint`."""
        super().load_checkpoint(folder)
        self._scorer.stage.share_embedding()


def refuse_gaps(batch: Sequences) -> None:
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
