"""``flowrl rows``: the rows of a run: responses, episodes turn by turn, and prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flowrl.app.episodes import about, turns
from flowrl.app.printing import excerpt, number, print_json, print_table, printable
from flowrl.errors import DataError, ParameterError, offer

Row = Mapping[str, Any]

_MOST = 20
_COLUMNS = ("row_id", "prompt", "score", "response_tokens", "truncated", "advantage", "kl", "fate")


def add_to(app: typer.Typer, out: Console) -> None:
    """Add the command to a command line that prints to `out`."""

    @app.command()
    def rows(
        run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.", show_default=False)],
        step: Annotated[int | None, typer.Option(help="Step. [default: the newest]")] = None,
        of: Annotated[str | None, typer.Option(help="Name of a validation, or 'training'. [default: training]")] = None,
        prompt: Annotated[int | None, typer.Option(help="Rows of this prompt, by its position in the data.")] = None,
        row: Annotated[str | None, typer.Option(help="Row id, or uid of a group of rows; shows the text.")] = None,
        best: Annotated[int | None, typer.Option(help="So many rows with the largest --by.", min=1)] = None,
        worst: Annotated[int | None, typer.Option(help="So many rows with the smallest --by.", min=1)] = None,
        by: Annotated[str, typer.Option(help="Column to sort by, such as kl or reward/format.")] = "score",
        failed: Annotated[bool, typer.Option("--failed", help="Only episodes whose environment failed.")] = False,
        against: Annotated[int | None, typer.Option(help="Another step: both, side by side, by prompt.")] = None,
        never: Annotated[bool, typer.Option("--never", help="The prompts that no row has solved.")] = False,
        text: Annotated[bool, typer.Option("--text", help="Show prompts, responses and episodes in full.")] = False,
        count: Annotated[int | None, typer.Option(help="Most rows. [default: 20, or 1 in full]", min=1)] = None,
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    ) -> None:
        """Show the rows of a step: scores, responses and episodes, text of the policy (>) and of environments (|)."""
        from flowrl.look.rows.rollouts import rollouts
        from flowrl.look.run_files import open_files

        opened = open_files(run)
        if best is not None and worst is not None:
            raise ParameterError(
                "--best and --worst exclude each other. Pass one of the two.", code="cli.bad-option", option="--best"
            )
        if never:
            _print_never(out, opened.prompts().to_pylist(), count or _MOST, as_json)
            return
        everything = rollouts(opened, of, step)
        refuse_damaged(everything, run)
        chosen = select(everything, run, prompt=prompt, row=row, failed=failed)
        in_full = text or row is not None or bool(chosen and chosen[0].get("episode"))
        most = count or (len(chosen) if as_json else 1 if in_full else _MOST)
        chosen = sort(chosen, run, by, best, worst)[:most]
        if against is not None:
            pairs = side_by_side(chosen, select(rollouts(opened, everything[0]["of"], against), run, prompt=prompt))
            if as_json:
                print_json(out, pairs)
            else:
                _print_pairs(out, pairs[: count or _MOST], str(against), str(everything[0]["step"]))
        elif as_json:
            print_json(out, chosen)
        else:
            out.print(summary(everything), markup=False)
            _print_rows(out, chosen, in_full)


def select(
    rows: Sequence[Row], run: Path, prompt: int | None = None, row: str | None = None, failed: bool = False
) -> list[Row]:
    """The rows of a prompt, of an id, and with a failed episode."""
    found = [one for one in rows if row is None or row in (one.get("row_id"), one.get("uid"))]
    if row is not None and not found:
        ids = [str(one.get("row_id")) for one in rows]
        raise DataError(
            f"Step {rows[0]['step']} of {run} has no row {row!r}; {offer(row, ids[:8], 'there are')}",
            code="look.not-recorded",
            path=run,
            found=row,
        )
    if failed:
        found = [one for one in found if (one.get("episode") or {}).get("ended") == "failed"]
    return found if prompt is None else [one for one in found if _position(one) == prompt]


def sort(rows: Sequence[Row], run: Path, by: str, best: int | None, worst: int | None) -> list[Row]:
    """The rows with the largest or smallest numbers in a column; all, as they are, without `best` and `worst`."""
    if best is None and worst is None:
        return list(rows)
    known = [row for row in rows if isinstance(row.get(by), int | float)]
    if not known and rows:
        names = [name for name, value in rows[0].items() if isinstance(value, int | float)]
        raise ParameterError(
            f"The rows of {run} have no numbers in {by!r}; {offer(by, names)}",
            code="look.invalid-query",
            argument="by",
            found=by,
            known=names,
        )
    return sorted(known, key=lambda row: row[by], reverse=best is not None)[: best or worst]


def side_by_side(after: Sequence[Row], before: Sequence[Row]) -> list[dict[str, Any]]:
    """By prompt, the mean score in both steps and a row of each."""
    groups: list[dict[Any, list[Row]]] = [{}, {}]
    for group, rows in zip(groups, (before, after), strict=True):
        for row in rows:
            group.setdefault(_position(row) if _position(row) is not None else repr(row.get("messages")), []).append(
                row
            )
    return [
        {"prompt": key, "before": _mean(groups[0][key]), "after": _mean(rows), "rows": [groups[0][key][0], rows[0]]}
        for key, rows in groups[1].items()
        if key in groups[0]
    ]


def summary(rows: Sequence[Row]) -> str:
    """A line about the rows of a step."""
    mean, episodes = _mean(rows), [row["episode"] for row in rows if row.get("episode")]
    score = "" if mean is None else f", mean score {mean:.3f}"
    how = f", {about(episodes)}" if episodes else ""
    return f"{len(rows)} rows of step {rows[0]['step']} ({rows[0]['of']}){score}{how}"


def shown(row: Row) -> Text:
    """A row in full: its prompt and response, or its episode."""
    score = "" if row.get("score") is None else f", score {row['score']:g}"
    if terms := {name: value for name, value in _terms(row).items() if value is not None}:
        score += " = " + " + ".join(f"{value:g} ({name})" for name, value in terms.items())
    text = Text()
    text.append(f"\n{row['of']}, step {row['step']}, row {printable(str(row.get('row_id')))}{score}\n", style="bold")
    if row.get("episode"):
        return text.append_text(turns(row["episode"]))
    for message in row.get("messages") or ():
        text.append(f"{printable(str(message.get('role')))}\n", style="dim")
        for line in printable(str(message.get("content"))).split("\n"):
            text.append(f"| {line}\n", style="cyan")
    for line in printable(str(row.get("response", "(not recorded)"))).split("\n"):
        text.append(f"> {line}\n", style="bold green")
    if row.get("ground_truth") is not None:
        text.append(f"ground truth: {printable(str(row['ground_truth']))}", style="dim")
    return text


def refuse_damaged(rows: Sequence[Row], run: Path) -> None:
    """Refuse rows of which one has an episode that cannot be shown."""
    for row in (row for row in rows if row.get("episode")):
        try:
            shown(row)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise DataError(
                f"{run} has a damaged episode of row {row.get('row_id')!r} in step {row['step']} of {row['of']} "
                f"({type(error).__name__}: {error}). Restore a copy of its files.",
                code="run.damaged",
                path=run,
                row=row.get("row_id"),
                step=row["step"],
            ) from error


def _print_never(out: Console, prompts: Sequence[Row], count: int, as_json: bool) -> None:
    found = [one for one in prompts if not one["solved"]]
    if as_json:
        print_json(out, found)
        return
    out.print(f"{len(found)} of {len(prompts)} prompts were never solved", markup=False)
    names = ("prompt", "attempts", "score")
    print_table(out, names, ([number(one[name]) for name in names] for one in found[:count]))


def _print_rows(out: Console, rows: Sequence[Row], in_full: bool) -> None:
    if not rows:
        out.print("No row matches.", markup=False)
    elif in_full:
        for row in rows:
            out.print(shown(row))
    else:
        terms = [_terms(row) for row in rows]
        names = [name for name in _COLUMNS if any(row.get(name) is not None for row in rows)]
        table = [
            [
                *(number(row.get(name)) for name in names),
                *map(number, of.values()),
                excerpt(str(row.get("response", ""))),
            ]
            for row, of in zip(rows, terms, strict=True)
        ]
        print_table(out, [*names, *terms[0], "response"], table)


def _terms(row: Row) -> dict[str, float | None]:
    """What each term of a weighed reward adds to the score of a row."""
    from flowrl.run.recording.statistics import WEIGHTED

    return {name: row[name + WEIGHTED] for name in row if name + WEIGHTED in row}


def _print_pairs(out: Console, pairs: Sequence[Row], before: str, after: str) -> None:
    if not pairs:
        out.print("The two steps share no prompt. Pass --prompt and two steps that sampled it.", markup=False)
    for pair in pairs:
        first, second = pair["rows"]
        question = (first.get("messages") or [{}])[-1].get("content", "")
        scores = f"{number(pair['before'])} -> {number(pair['after'])}"
        out.print(f"\nprompt {pair['prompt']}: {printable(excerpt(str(question)))}  score {scores}", markup=False)
        table = Table(f"step {before}", f"step {after}", expand=out.is_terminal)
        table.add_row(*(Text(printable(str(row.get("response", "(not recorded)")))) for row in (first, second)))
        out.print(table)


def _position(row: Row) -> int | None:
    """The position of a row's prompt in its data."""
    position = row.get("prompt")
    return position if isinstance(position, int) else None


def _mean(rows: Sequence[Row]) -> float | None:
    scores = [row["score"] for row in rows if row.get("score") is not None]
    return sum(scores) / len(scores) if scores else None
