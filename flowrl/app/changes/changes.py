"""`Changes`: the options that change a training, of ``flowrl run`` and ``flowrl sweep``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer

from flowrl.app.changes.arguments import parsed
from flowrl.app.targets import load_target
from flowrl.errors import ParameterError, type_of

Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="PATH=VALUE, such as actor.optimizer.lr=1e-6. Repeatable.", show_default=False),
]
EngineName = Annotated[str | None, typer.Option(help="Rollout engine: vllm, sglang or torch.", show_default=False)]
Import = Annotated[bool, typer.Option("--import", help="Import (execute) the code that a .yaml or .json file names.")]


@dataclass(frozen=True)
class Changes:
    """What options change in a training.

    Args:
        arguments: of the target's function.
        imports: import the code that a file names.
        engine: the rollout engine.
        settings: text by path, of ``--set``.
        fields: other fields of `Training`; None leaves one as it is.
    """

    arguments: Mapping[str, str] = field(default_factory=dict)
    imports: bool = False
    engine: str | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(
        context: typer.Context, imports: bool, engine: str | None, settings: Sequence[str] | None, **fields: Any
    ) -> Changes:
        """The changes that a command was given.

        Raises:
            ParameterError: an option that is malformed.
        """
        return Changes(parsed(context.args), imports, engine, split(settings or ()), fields)

    def training(self, target: str, options: Sequence[str]) -> tuple[Any, list[str]]:
        """The changed training of a target, and what to print about the changes.

        Args:
            options: of the command, for messages.

        Raises:
            ParameterError: the target is not a training, or does not have what is changed.
        """
        from flowrl.app.changes.engine import with_engine
        from flowrl.run.settings.changes import with_settings
        from flowrl.run.training.training import Training

        found = load_target(target, imports=self.imports or None, arguments=self.arguments, options=options)
        if not isinstance(found, Training):
            raise ParameterError(
                f"{target} is {type_of(found)}, which has neither data nor a number of steps; expected a training: "
                f"Training(graph.bind(...), data, steps=..., prompts=...).",
                code="cli.wrong-target",
                target=target,
                found=type(found).__name__,
                expected="Training",
            )
        lines: list[str] = []
        if self.engine is not None:
            found, lines = with_engine(found, engine_of(self.engine))
        if self.settings:
            found = with_settings(found, self.settings)
        fields = {name: value for name, value in self.fields.items() if value is not None}
        if len(length := {"steps", "epochs"} & fields.keys()) == 1:
            fields |= dict.fromkeys({"steps", "epochs"} - length)
        return dataclasses.replace(found, **fields), lines

    def words(self) -> list[str]:
        """These options as words of a command, without the fields."""
        words = [f"--{name}={text}" for name, text in self.arguments.items()]
        words += ["--import"] * self.imports + ([] if self.engine is None else [f"--engine={self.engine}"])
        return words + [f"--set={path}={text}" for path, text in self.settings.items()]


def load_changed(target: str, imports: bool, settings: Sequence[str] | None) -> Any:
    """A target, with the settings if it is a training; see `load_target` for `imports`.

    Raises:
        ParameterError: settings for a target that is not a training, or that it does not have.
    """
    from flowrl.run.settings.changes import with_settings
    from flowrl.run.training.training import Training

    found = load_target(target, imports)
    if not settings:
        return found
    if not isinstance(found, Training):
        raise ParameterError(
            f"--set {settings[0]} needs a training, and {target} is {type_of(found)}. Leave --set out, or pass a "
            f"training.",
            code="cli.bad-option",
            option="--set",
            found=type(found).__name__,
        )
    return with_settings(found, split(settings))


def split(settings: Sequence[str]) -> dict[str, str]:
    """Path and text of each ``PATH=VALUE``.

    Raises:
        ParameterError: one without a value, or one path twice.
    """
    found: dict[str, str] = {}
    for setting in settings:
        path, equals, text = setting.partition("=")
        if not equals or not path.strip() or path.strip() in found:
            what = "is set twice" if path.strip() in found else "has no value"
            raise ParameterError(
                f"--set {setting} {what}; expected such as --set actor.optimizer.lr=1e-6, once for each path.",
                code="cli.bad-option",
                option="--set",
                found=setting,
            )
        found[path.strip()] = text.strip()
    return found


def engine_of(name: str) -> Any:
    """The name of an engine, refused if there is none."""
    if name not in ("vllm", "sglang", "torch"):
        raise ParameterError(
            f"--engine {name} is no rollout engine; expected vllm, sglang or torch. Bind your own by --set "
            f"'rollout=...', or in Python.",
            code="cli.bad-option",
            option="--engine",
            found=name,
        )
    return name
