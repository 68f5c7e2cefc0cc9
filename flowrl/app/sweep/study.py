"""`Study`: the trials of a sweep, in Optuna's SQLite storage.

A grid is a queue of all its points; ranges are sampled by Optuna's TPE (Bergstra et al. 2011). A trial is one setting
of all axes; with several seeds it is as many runs, and its value is their mean. A trial that was running when the
sweep was killed is run again under its number, in its folder, from its checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from flowrl.app.sweep.axes import Axis, Choices, grid
from flowrl.data.keys import Key
from flowrl.errors import BindError, ParameterError

if TYPE_CHECKING:
    import optuna

FILE = "sweep.db"
State = Literal["waiting", "running", "finished", "failed"]


@dataclass(frozen=True)
class Trial:
    """A trial.

    Args:
        settings: text by path, of the settings that the sweep varies.
        value: the mean over seeds.
    """

    number: int
    settings: Mapping[str, str]
    state: State
    value: float | None = None


class Study:
    """The trials in a folder.

    Args:
        described: what the sweep is, as JSON-able data; a sweep that continues has the same.
        total: the number of trials; None for all points of the grid.

    Raises:
        ParameterError: the folder holds another sweep; ranges without a number of trials, or a grid with one.
        BindError: Optuna is not installed.
    """

    def __init__(
        self, folder: Path, axes: Sequence[Axis], total: int | None, maximize: bool, seed: int, described: Any
    ) -> None:
        optuna = _optuna()
        self._axes, self._seed, points = axes, seed, grid(axes)
        _refuse_other_number(points, total)
        folder.mkdir(parents=True, exist_ok=True)
        self._study = optuna.create_study(
            storage=f"sqlite:///{folder / FILE}",
            study_name="sweep",
            direction="maximize" if maximize else "minimize",
            load_if_exists=True,
        )
        before = self._study.user_attrs.get("described")
        if before is not None and before != described:
            changed = next(key for key in described if before.get(key) != described[key])
            raise ParameterError(
                f"{folder} holds a sweep with another {changed}: {before.get(changed)!r}, and here it is "
                f"{described[changed]!r}. Continue with the original, or choose another folder (--folder).",
                code="sweep.other-sweep",
                path=folder,
                changed=changed,
            )
        for point in (points or ()) if axes else ():
            self._study.enqueue_trial(point, skip_if_exists=True)
        self._study.set_user_attr("described", described)
        self.total = len(points) if points is not None else total or 0

    def pending(self) -> Iterator[Trial]:
        """The trials to run: those that were running before, then new ones."""
        for trial in self.trials():
            if trial.state == "running" and len(trial.settings) == len(self._axes):
                yield trial
            elif trial.state == "running":  # killed before its settings were sampled
                self.fail(trial)
        while sum(len(one.settings) == len(self._axes) for one in self._started()) < self.total:
            yield self._ask()

    def _started(self) -> list[Trial]:
        return [trial for trial in self.trials() if trial.state != "waiting"]

    def _ask(self) -> Trial:
        """The next trial: of the queue, or sampled; by its number, so that an interruption changes none."""
        optuna = _optuna()
        number = len(self._started())
        seed = Key.of(self._seed).derive("sweep", str(number)).bits % 2**32
        self._study.sampler = optuna.samplers.TPESampler(seed=seed)
        asked = self._study.ask({axis.path: _distribution(optuna, axis) for axis in self._axes})
        return self._of(self._study.trials[asked.number])

    def tell(self, trial: Trial, value: float) -> None:
        """Finish a trial."""
        self._study.tell(trial.number, value)

    def fail(self, trial: Trial) -> None:
        """Finish a trial that failed."""
        self._study.tell(trial.number, state=_optuna().trial.TrialState.FAIL)

    def trials(self) -> list[Trial]:
        """All trials, by number."""
        return [self._of(trial) for trial in self._study.get_trials(deepcopy=False)]

    def _of(self, trial: optuna.trial.FrozenTrial) -> Trial:
        """A trial of Optuna's."""
        states: dict[str, State] = {"WAITING": "waiting", "RUNNING": "running", "COMPLETE": "finished"}
        texts = {
            axis.path: trial.params[axis.path] if isinstance(axis, Choices) else axis.text(trial.params[axis.path])
            for axis in self._axes
            if axis.path in trial.params
        }
        state = states.get(trial.state.name, "failed")
        return Trial(trial.number, texts, state, trial.value if state == "finished" else None)


def _distribution(optuna: Any, axis: Axis) -> Any:
    """What Optuna samples an axis from."""
    if isinstance(axis, Choices):
        return optuna.distributions.CategoricalDistribution(axis.texts)
    if axis.integer:
        return optuna.distributions.IntDistribution(int(axis.low), int(axis.high), log=axis.log)
    return optuna.distributions.FloatDistribution(axis.low, axis.high, log=axis.log)


def _refuse_other_number(points: Sequence[Any] | None, total: int | None) -> None:
    """Refuse a range without a number of trials, and a grid with one."""
    if points is None and total is None:
        what = "a range needs a number of trials. Pass --trials 20"
    elif points is not None and total is not None:
        what = f"--trials {total} needs a range; a grid runs all of its {len(points)} points. Leave it out"
    else:
        return
    raise ParameterError(f"flowrl sweep: {what}.", code="cli.bad-option", option="--trials", found=total)


def _optuna() -> Any:
    """Optuna, without its lines about each trial."""
    try:
        import optuna
    except ImportError as error:
        raise BindError(
            "flowrl sweep needs the package optuna: pip install 'flowrl[sweep]'.",
            code="package.not-installed",
            package="optuna",
        ) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
