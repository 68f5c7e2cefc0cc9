"""The live engine of a `MegatronTrainer`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from flowrl.backends.megatron.model import MegatronModel
from flowrl.backends.megatron.rows import refuse_gaps
from flowrl.backends.torch.score.engine import TorchTrainerEngine
from flowrl.backends.torch.score.rows import Rows, SequenceInputs, micro_rows, put
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
        self._scorer.stage.follow()

    def load_checkpoint(self, folder: str) -> None:
        """See `TrainedEngine.load_checkpoint`."""
        super().load_checkpoint(folder)
        self._scorer.stage.follow()
