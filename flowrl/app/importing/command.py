"""``flowrl from-verl``, ``from-trl`` and ``from-openrlhf``: write a training of another framework as one of flowrl."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from flowrl.app.printing import printable
from flowrl.errors import ParameterError, offer

if TYPE_CHECKING:
    from flowrl.importers.importing import Source
    from flowrl.importers.settings import Report

File = Annotated[Path, typer.Argument(metavar="FILE", help="A script or a .yaml configuration.", show_default=False)]
Arguments = Annotated[
    list[str] | None, typer.Argument(metavar="[ARGUMENT]...", help="Arguments of the script.", show_default=False)
]
To = Annotated[
    Path | None, typer.Option(help="Python file to write. [default: FILE.py here, or FILE_flowrl.py of a script]")
]
Allow = Annotated[list[str] | None, typer.Option(help="Leave out this key, or keys such as 'a.*'. Repeatable.")]
Env = Annotated[list[str] | None, typer.Option(help="NAME=VALUE of an environment variable. Repeatable.")]
Check = Annotated[bool, typer.Option("--check", help="Write nothing; exit with 1 if there are problems.")]


_FRAMEWORKS = {
    "verl": "verl (a script or its configuration)",
    "trl": "TRL (a script or its configuration)",
    "openrlhf": "OpenRLHF (a script)",
}
"""By importer, what it reads."""


def add_to(app: typer.Typer, out: Console) -> None:
    """Add the commands to a command line that prints to `out`."""
    for framework, reads in _FRAMEWORKS.items():
        summary = f"Write a training of {reads} as a Python file of flowrl, and check it."
        app.command(f"from-{framework}", help=summary)(_command(framework, out))


def _command(framework: str, out: Console) -> Callable[..., None]:
    def run(
        file: File,
        arguments: Arguments = None,
        to: To = None,
        allow: Allow = None,
        env: Env = None,
        check: Check = False,
    ) -> None:
        from flowrl.importers.importing import Source

        _import(framework, out, Source(file, dict(map(_variable, env or ())), arguments or ()), to, allow or (), check)

    return run


def _import(
    framework: str, out: Console, source: Source, to: Path | None, allow: Sequence[str], only_check: bool
) -> None:
    from flowrl.importers.checking import check as check_imported
    from flowrl.importers.importing import import_file

    found, notes = import_file(framework, source)
    report = found.settings.report(allow)
    for title, remarks in {
        "taken": report.taken,
        "defaults that differ": report.differing,
        "pointless here": report.pointless,
        "left out, as --allow says": report.allowed,
        "cannot be said": report.refused,
    }.items():
        _print(out, f"{title} ({len(remarks)})", remarks)
    _print(out, "decided without a run", notes)
    _print(out, "perhaps of another version", found.warnings)
    findings = check_imported(found)
    _print(out, "not on this machine, so not checked", findings.absent)
    _print(out, "problems", findings.problems)
    _refuse_unused(allow, report)
    if report.refused:
        out.print("Nothing is written. Leave settings out by --allow KEY.", markup=False)
        raise typer.Exit(1)
    if only_check:
        if findings.problems:
            raise typer.Exit(1)
        out.print(f"{found.graph.algorithm}: no rule is violated.", markup=False)
        return
    target = to or Path(f"{source.path.stem}{'_flowrl' * (source.path.suffix == '.py')}.py")
    if target.exists():
        raise ParameterError(
            f"{target} exists. Pass another file to write: --to FILE.py.",
            code="cli.bad-option",
            option="--to",
            found=target,
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(found.program().source(), encoding="utf-8")
    except OSError as error:
        raise ParameterError(
            f"--to {target} cannot be written: {error.strerror}. Pass another file.",
            code="cli.bad-option",
            option="--to",
            found=target,
        ) from error
    out.print(f"Written to {target}. Run it: flowrl run {target}:training", markup=False)


def _refuse_unused(allow: Sequence[str], report: Report) -> None:
    """Refuse an option ``--allow`` that leaves nothing out."""
    left_out = [remark.key for remark in report.allowed]
    if unused := [pattern for pattern in allow if not any(fnmatchcase(key, pattern) for key in left_out)]:
        refused = [remark.key for remark in report.refused]
        raise ParameterError(
            f"--allow {unused[0]} leaves nothing out, because no setting of that name is refused; "
            f"{offer(unused[0], refused, 'refused are')} Remove the option, or name a setting that is refused.",
            code="cli.bad-option",
            option="--allow",
            found=unused[0],
            refused=refused,
        )


def _print(out: Console, title: str, lines: Any) -> None:
    if lines:
        out.print(f"{title}:", markup=False)
        for line in lines:
            out.print(f"  {printable(str(line))}", markup=False)


def _variable(text: str) -> tuple[str, str]:
    """Name and value of ``NAME=VALUE``."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise ParameterError(
            f"--env {text} sets no variable; expected such as --env DEVICE=gpu.",
            code="cli.bad-option",
            option="--env",
            found=text,
        )
    return name, value
