"""``flowrl episodes``: the episodes of a run, turn by turn."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from flowrl.errors import DataError, ParameterError, offer

TRAINING = "training"
"""The origin of rollouts for `--of`; predictions have the name of their validation."""

_POLICY, _ENVIRONMENT = (">", "bold green"), ("|", "cyan")
"""Mark and color of lines: sampled ones, and all others."""

_ENDED = {
    "done": "ended by its environment",
    "turns": "out of turns",
    "context": "out of context",
    "failed": "failed",
}

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


@dataclass(frozen=True)
class LoggedEpisode:
    """An episode that a run wrote.

    `of` is the name of the validation, or `TRAINING`; `step` the steps done before it, or the rollout's own step.
    """

    of: str
    step: int
    record: Mapping[str, Any]

    @property
    def episode(self) -> Mapping[str, Any]:
        """Its summary; see `flowrl.episodes.summary`."""
        found: Mapping[str, Any] = self.record["episode"]
        return found

    @property
    def score(self) -> float:
        """The last score; 0 if unknown."""
        return float(self.record.get("score") or 0.0)

    @property
    def turns(self) -> int:
        """The number of the policy's turns."""
        return sum("sampled" in message for message in self.episode["messages"])

    def is_of(self, row: str) -> bool:
        """Whether it is this row, or of this group."""
        return row in (self.record.get("row_id"), self.record.get("uid"))


def add_to(app: typer.Typer, out: Console) -> None:
    """Add the command to a command line that prints to `out`."""

    @app.command()
    def episodes(
        run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.", show_default=False)],
        step: Annotated[int | None, typer.Option(help="Training step. [default: the latest with episodes]")] = None,
        of: Annotated[str | None, typer.Option(help="Name of a validation, or 'training'. [default: all]")] = None,
        row: Annotated[str | None, typer.Option(help="Row id, or uid of a group of rows.")] = None,
        best: Annotated[bool, typer.Option("--best", help="Sort by score, highest first.")] = False,
        worst: Annotated[bool, typer.Option("--worst", help="Sort by score, lowest first.")] = False,
        failed: Annotated[bool, typer.Option("--failed", help="Only episodes whose environment failed.")] = False,
        count: Annotated[int, typer.Option(help="Number of episodes to show.", min=1)] = 1,
    ) -> None:
        """Show the episodes of a run: text of the policy (>) and of its environment (|)."""
        if best and worst:
            raise ParameterError(
                "--best and --worst exclude each other. Pass one of the two.", code="cli.bad-option", option="--best"
            )
        seen = of_step(read(run), run, step, of)
        chosen = [one for one in seen if row is None or one.is_of(row)]
        if row is not None and not chosen:
            raise ParameterError(
                f"--row {row} matches no episode; {_offered(row, seen)}",
                code="cli.no-episodes",
                option="--row",
                found=row,
            )
        out.print(_about(seen), markup=False)
        chosen = [one for one in chosen if one.episode["ended"] == "failed"] if failed else chosen
        if best or worst:
            chosen.sort(key=lambda one: one.score, reverse=best)
        for number, one in enumerate(chosen[:count], 1):
            out.print(shown(one, f"{number} of {len(chosen)}"))
        if not chosen:
            out.print("No episode failed.", markup=False)


def read(folder: Path) -> list[LoggedEpisode]:
    """All episodes in the files of a run."""
    from flowrl.run.training.run_folder import RunFolder

    if not (folder / "run.json").is_file():
        raise DataError(
            f"{folder} holds no run. Pass the folder of one, such as runs/grpo-001.",
            code="cli.no-episodes",
            path=folder,
        )
    records = {file: RunFolder(folder).records(file) for file in ("predictions.jsonl", "rollouts.jsonl")}
    if not any(records.values()):
        raise DataError(
            f"{folder} holds a run without logged rows. Runs log rows with a validation, "
            f"Training(validation=Validation(...)), or with Training(rollouts_every=10).",
            code="cli.no-episodes",
            path=folder,
        )
    seen = [
        LoggedEpisode(str(record.get("validation", TRAINING)), record["step"], record)
        for found in records.values()
        for record in found
        if "episode" in record
    ]
    if not seen:
        raise DataError(
            f"{folder} holds a run whose rows are single responses, in predictions.jsonl or rollouts.jsonl. For "
            f"episodes, replace Generate(...) by Interact(...) in the graph.",
            code="cli.no-episodes",
            path=folder,
        )
    return seen


def of_step(seen: Sequence[LoggedEpisode], folder: Path, step: int | None, of: str | None) -> list[LoggedEpisode]:
    """The episodes of one step, by default the newest."""
    names = dict.fromkeys(one.of for one in seen)
    if of is not None and of not in names:
        raise ParameterError(
            f"--of {of} matches no episode in {folder}; {offer(of, names, 'there are those of')}",
            code="cli.no-episodes",
            path=folder,
            option="--of",
            found=of,
        )
    mine = [one for one in seen if of in (None, one.of)]
    steps = sorted({one.step for one in mine})
    if step is not None and step not in steps:
        raise ParameterError(
            f"--step {step} matches no episode in {folder}; there are those of {_few(steps)}.",
            code="cli.no-episodes",
            path=folder,
            option="--step",
            found=step,
        )
    found = [one for one in mine if one.step == (steps[-1] if step is None else step)]
    for one in found:
        _refuse_damaged(one, folder)
    return found


def shown(one: LoggedEpisode, number: str) -> Text:
    """An episode as lines for a terminal."""
    episode, score = one.episode, one.record.get("score")
    worth = "" if score is None else f", score {score:g}"
    text = Text()
    text.append(f"\n{number}: {one.of}, step {one.step}, row {one.record.get('row_id')}{worth}\n", style="bold")
    for message in episode["messages"]:
        sampled = message.get("sampled")
        mark, style = _ENVIRONMENT if sampled is None else _POLICY
        name = f" {message['name']}" if message.get("name") else ""
        header = f"{message['role']}{name}" if sampled is None else _turn(sampled)
        text.append(f"{printable(header)}\n", style="dim")
        for line in printable(_content(message)).split("\n"):
            text.append(f"{mark} {line}\n", style=style)
    tries = f", attempt {episode['tries']}" if episode["tries"] > 1 else ""
    calls = f", {episode['tool_calls']} tool calls" if episode["tool_calls"] else ""
    wrong = f" ({episode['tool_errors']} invalid)" if episode["tool_errors"] else ""
    text.append(f"{_ENDED[episode['ended']]} after {one.turns} turns{tries}{calls}{wrong}", style="bold")
    if episode["fault"] is not None:
        text.append(f"\n{printable(episode['fault'])}", style="red")
    return text


def printable(text: str) -> str:
    """Text without terminal control: control characters are escaped as in Python, ``\\x1b``."""
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def _turn(sampled: Mapping[str, Any]) -> str:
    reward = "" if sampled["reward"] is None else f", reward {sampled['reward']:g}"
    cut = ", truncated" if sampled["cut"] else ""
    return f"policy, turn {sampled['turn'] + 1}: {sampled['tokens']} tokens{reward}{cut}"


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content", "")
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def _about(seen: Sequence[LoggedEpisode]) -> str:
    """A summary line of a step's episodes."""
    ended = Counter(one.episode["ended"] for one in seen)
    how = ", ".join(f"{ended[why]} {_ENDED[why]}" for why in _ENDED if ended[why])
    scores = [one.score for one in seen if "score" in one.record]
    mean = f", mean score {sum(scores) / len(scores):.3f}" if scores else ""
    turns = sum(one.turns for one in seen) / len(seen)
    names = ", ".join(dict.fromkeys(one.of for one in seen))
    return f"{len(seen)} episodes of step {seen[0].step} ({names}){mean}, {turns:.1f} turns: {how}"


def _offered(row: str, seen: Sequence[LoggedEpisode]) -> str:
    rows = [str(one.record.get("row_id")) for one in seen]
    return offer(row, rows, "there are") if len(rows) <= 8 else f"there are {_few(rows)}."


def _few(values: Sequence[Any]) -> str:
    """All values, or the first and the last of many."""
    texts = [*map(str, values)]
    return ", ".join(texts if len(texts) <= 8 else [*texts[:4], "...", *texts[-3:]])


def _refuse_damaged(one: LoggedEpisode, folder: Path) -> None:
    """Refuse a record of which no episode can be shown."""
    try:
        shown(one, "")
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        file = "rollouts.jsonl" if one.of == TRAINING else "predictions.jsonl"
        raise DataError(
            f"{folder / file} has a damaged episode of row {one.record.get('row_id')!r} in step {one.step} "
            f"({type(error).__name__}: {error}). Restore a copy of the file.",
            code="run.damaged",
            path=folder / file,
            row=one.record.get("row_id"),
            step=one.step,
        ) from error
