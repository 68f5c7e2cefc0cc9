"""``flowrl evaluate``: samples and scores responses to held-out prompts, and prints pass@k, maj@k and avg@n."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from flowrl.app.changes.changes import Set, engine_of, split
from flowrl.app.evaluate.models import LAST, model_of
from flowrl.app.printing import print_json
from flowrl.app.run import complain, ended
from flowrl.errors import ParameterError, offer, type_of

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="Model folder, name on the Hub, or run folder.", show_default=False)
]
Data = Annotated[
    str, typer.Argument(metavar="DATA", help="File, data set on the Hub, or FILE.py:name.", show_default=False)
]
RewardName = Annotated[
    str | None, typer.Option(help="Such as gsm8k, or FILE.py:name. [default: by the data source, as verl]")
]
AnswerName = Annotated[str | None, typer.Option(help="FILE.py:name: the answer of a response, for maj@k.")]
K = Annotated[str, typer.Option(help="k of pass@k and maj@k, such as 1,4,16.")]
N = Annotated[int | None, typer.Option("-n", help="Responses per prompt. [default: the largest k]")]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy. [default: 0, or 1 for several responses]")]
Length = Annotated[int, typer.Option(help="Most tokens of a response.")]
Limit = Annotated[int | None, typer.Option(help="Only so many prompts, the first.")]
Seed = Annotated[int, typer.Option(help="Random seed of the sampling.")]
Engine = Annotated[str, typer.Option(help="Engine: vllm, sglang or torch.")]
Checkpoint = Annotated[str, typer.Option(help="Of a run: last, best, or a step.")]
RoleName = Annotated[str | None, typer.Option(help="Of a run: the trained role, if there are several.")]
Folder = Annotated[str | None, typer.Option(help="Output folder. [default: runs/evaluate-001, ...]")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def add_to(app: typer.Typer, out: Console) -> None:
    """Add the command to a command line that prints to `out`."""

    @app.command()
    def evaluate(
        model: Model,
        data: Data,
        reward: RewardName = None,
        answer: AnswerName = None,
        k: K = "1",
        n: N = None,
        temperature: Temperature = None,
        max_new_tokens: Length = 1024,
        limit: Limit = None,
        seed: Seed = 0,
        engine: Engine = "torch",
        checkpoint: Checkpoint = LAST,
        role: RoleName = None,
        folder: Folder = None,
        settings: Set = None,
        as_json: Json = False,
    ) -> None:
        """Evaluate a model without training. With --folder, the same command continues an interrupted evaluation.

        --set changes engine, data, generate and reward: engine.tensor_parallel=2, data.split=test, generate.top_p=0.95,
        reward.timeout=30.
        """
        from flowrl.app.changes.engine import kinds
        from flowrl.evaluation.evaluation import Evaluation
        from flowrl.operators import Generate, Reward

        kind, sizes = kinds()[engine_of(engine)], _sizes(k)
        count = max(sizes) if n is None else n
        evaluation = Evaluation(
            kind(model_of(model, checkpoint, role), frozen=True),
            _data(data),
            Reward(_reward(reward)),
            Generate(float(count > 1) if temperature is None else temperature, max_new_tokens=max_new_tokens),
            n=count,
            k=sizes,
            answer=answer,
            limit=limit,
            seed=seed,
            folder=folder,
        )
        _run(_changed(evaluation, split(settings or ())), out, as_json)


def _run(evaluation: Any, out: Console, as_json: bool) -> None:
    """Run an evaluation with a progress bar, and print its result."""
    from flowrl.run.training.run_folder import jsonable
    from flowrl.run.training.signals import Ended

    bar = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    try:
        with Progress(*bar, console=out, disable=as_json or not out.is_terminal, transient=True) as progress:
            task = progress.add_task("prompts", total=None)
            found = evaluation.run(lambda done, prompts: progress.update(task, completed=done, total=prompts))
    except (KeyboardInterrupt, Ended) as error:
        what, code = ended(error)
        folder = evaluation.folder or "runs/evaluate-..."
        complain(f"{what}; the same command with --folder={folder} continues it.")
        raise typer.Exit(code) from None
    if as_json:
        values = {name: one._asdict() for name, one in found.estimates.items()}
        print_json(out, jsonable({**found._asdict(), "estimates": values}))
    else:
        out.print(str(found), markup=False)


def _sizes(text: str) -> tuple[int, ...]:
    """The numbers of ``1,4,16``."""
    try:
        sizes = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise ParameterError(
            f"--k {text} is no list of positive numbers; expected such as --k 1,4,16.",
            code="cli.bad-option",
            option="--k",
            found=text,
        )
    return sizes


def _data(text: str) -> Any:
    """A source of prompts: that of ``FILE.py:name``, or of a path or a name on the Hub."""
    from flowrl.app.targets import load_target
    from flowrl.data.sources.prompts import PromptData

    if ".py:" not in text:
        return PromptData(text)
    found = load_target(text)
    if not isinstance(found, PromptData):
        raise ParameterError(
            f"{text} is {type_of(found)}; expected prompts: PromptData(...), or a function that returns it.",
            code="cli.wrong-target",
            target=text,
            found=type(found).__name__,
            expected="PromptData",
        )
    return found


def _reward(text: str | None) -> Any:
    """A reward function of `flowrl.rewards` by its name, a reference to another; None is that of the data source."""
    from flowrl import rewards

    if text is None:
        return rewards.by_data_source(rewards.verl_sources())
    if ":" in text:
        return text
    if isinstance(found := getattr(rewards, text, None) if text in rewards.__all__ else None, rewards.RewardFunction):
        return found
    known = [name for name in rewards.__all__ if isinstance(getattr(rewards, name), rewards.RewardFunction)]
    raise ParameterError(
        f"--reward {text} is no reward function; {offer(text, known, 'flowrl has')} Name your own by FILE.py:name.",
        code="cli.bad-option",
        option="--reward",
        found=text,
        known=known,
    )


def _changed(evaluation: Any, settings: Mapping[str, str]) -> Any:
    """The evaluation with the settings at these paths."""
    from flowrl.edits.parameters import with_parameters
    from flowrl.run.settings.typed import typed

    def call(path: str) -> str:
        return f"--set '{path.removeprefix('evaluation.')}=...'"

    return with_parameters(evaluation, "evaluation", settings, call, lambda text, of, _: typed(text, of))
