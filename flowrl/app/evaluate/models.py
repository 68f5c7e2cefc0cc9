"""The model that ``flowrl evaluate`` is given: a folder, a repository, or a role of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from flowrl.errors import DataError, ParameterError, offer

LAST, BEST = "last", "best"


def model_of(name: str, checkpoint: str = LAST, role: str | None = None) -> str:
    """The folder or repository of a model; of a run folder that of its trained model.

    Args:
        checkpoint: of a run: ``"last"`` is the model that the run saved at its end, or else, also if it was resumed and
            has not ended again, in its newest checkpoint; ``"best"`` that of ``Training(keep_best=...)``; a number
            that after this step.
        role: of a run that trains several models.

    Raises:
        DataError: the run has no such model, or its checkpoint is damaged.
        ParameterError: the run has no such role; `checkpoint` is none; or `name` is not a run.
    """
    folder = Path(name).expanduser()
    if not (folder / "run.json").is_file():
        if checkpoint != LAST or role is not None:
            raise ParameterError(
                f"--checkpoint and --role choose a model of a run, and {name} holds no run.json. Leave them out, or "
                f"pass the folder of a run.",
                code="cli.bad-option",
                option="--checkpoint",
                found=name,
            )
        return name
    found = dict(_models(folder, _of_checkpoint(folder, checkpoint)))
    if not found:
        raise DataError(
            f"{folder} holds no trained model: neither of its end (save_model=True) nor of a checkpoint "
            f"(checkpoint_every=). Finish the run, or pass the folder of a model.",
            code="run.no-model",
            path=folder,
        )
    if role in found or (role is None and len(found) == 1):
        return str(found[role or next(iter(found))])
    raise ParameterError(
        f"{folder} holds the models of {', '.join(map(repr, found))}; {offer(role or '', found)} Pass --role.",
        code="run.no-model",
        path=folder,
        role=role,
        known=list(found),
    )


def _models(run: Path, checkpoint: Path | None) -> Iterator[tuple[str, Path]]:
    """The trained models by role: those of the checkpoint, or with None those of the end of the run."""
    if checkpoint is None:
        yield from ((path.parent.name, path.parent) for path in sorted(run.glob("*/config.json")))
    else:
        pattern = "*/huggingface/config.json"
        yield from ((path.parent.parent.name, path.parent) for path in sorted(checkpoint.glob(pattern)))


def _of_checkpoint(run: Path, checkpoint: str) -> Path | None:
    """The folder of a checkpoint; None is the end of the run."""
    from flowrl.look.recorded_run import open_run
    from flowrl.run.training.checkpoint import Checkpoints
    from flowrl.run.training.run_folder import CHECKPOINTS

    known, description = Checkpoints(run / CHECKPOINTS, 1), open_run(run).description
    if checkpoint == LAST:
        # A run that was resumed, and has not ended again, holds the model of its earlier end.
        ended = description.get("status") == "finished" and any(_models(run, None))
        latest = None if ended else known.latest()
        return None if latest is None else latest[0]
    best: Mapping[str, int] | None = description.get("best")
    step = None if best is None else best["step"]
    has = [LAST, *([BEST] if step in known.steps() else []), *map(str, known.steps())]
    if checkpoint != BEST:
        step = int(checkpoint) if checkpoint.isdecimal() else None
    if step not in known.steps():
        raise ParameterError(
            f"--checkpoint {checkpoint} is none of {run}; it has {', '.join(has)}. Pass one of these.",
            code="cli.bad-option",
            option="--checkpoint",
            found=checkpoint,
            known=known.steps(),
        )
    return known.intact(step)
