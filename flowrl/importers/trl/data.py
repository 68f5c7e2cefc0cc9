"""Prompts of TRL's configurations: a data set with the functions that a script maps it by."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import Any

from flowrl.importers.plan import Call, Function, Name, call
from flowrl.importers.settings import Settings, is_file
from flowrl.importers.trl.functions import Copies, NotCopied
from flowrl.importers.trl.rewards import truth_of
from flowrl.importers.trl.values import Data, Local
from flowrl.importers.writer import written

_SAME = frozenset({"cast", "flatten_indices", "remove_columns", "select_columns", "shuffle", "with_format"})
"""Methods that change no column that is read; the order of prompts is flowrl's own."""
_OPTIONS = frozenset({"desc", "fn_kwargs", "keep_in_memory", "load_from_cache_file", "num_proc", "remove_columns"})
"""Arguments of ``map`` and ``filter`` that are read, or change no row."""


class Prompts:
    """The data of a training: `PromptData`, with a function of the written file where the script maps rows.

    Args:
        settings: the configuration.
        data: the data set of a script; None for that of the flags.
        columns: what the reward functions read; None for data without rewards, whose rows remain as they are.
        copies: functions of the script.
    """

    def __init__(
        self, settings: Settings, data: Data | None, columns: Sequence[str] | None, copies: Copies | None
    ) -> None:
        self._settings, self._columns, self._copies = settings, list(columns or ()), copies
        self._scored = columns is not None
        self._data = Data(settings.name("dataset_name"), settings.get("dataset_config")) if data is None else data
        self._reader = "" if self._copies is None else self._row(self._data)

    def of(self, data: Data) -> Prompts:
        """Other data, for which the function of these prompts makes rows."""
        other = Prompts(self._settings, self._data, self._columns if self._scored else None, None)
        other._data, other._reader = data, self._reader
        return other

    def split(self, default: str) -> str:
        """The split of the data, or the part of it that is selected."""
        return f"{self._data.split if isinstance(self._data.split, str) else default}{self._share()}"

    @property
    def conversational(self) -> bool:
        """Whether prompts are messages; else they are texts."""
        kinds = [kind for step in self._data.steps if step[0] == "map" and (kind := _kind(step[1])) is not None]
        if not kinds or kinds[-1]:
            if not kinds:
                self._settings.differ("dataset_name", "prompts are messages; of texts, flowrl makes a user's message")
            return True
        self._settings.differ("dataset_name", "its prompts are texts, of which flowrl makes a user's message")
        return False

    def source(self, split: str | None) -> Call:
        """The prompts of a split."""
        settings, data = self._settings, self._data
        template = settings.entries("chat_template_kwargs")
        settings.get("dataset_config")
        name = str(data.name) if isinstance(data.name, str) else ""
        truth = truth_of(self._columns)
        columns = {} if self._columns == ["solution"] else {"ground_truth": truth if self._columns else None}
        return call(
            "PromptData",
            name,
            **({} if is_file(name) else {"split": split, "name": data.config}),
            shuffle=bool(settings.get("shuffle_dataset")),
            **({"chat_template_kwargs": dict(template)} if template else {}),
            **(self.map or ({"columns": columns} if columns else {})),
        )

    @property
    def map(self) -> dict[str, Any]:
        """The function that maps rows, as an argument of a source."""
        return {"map": Function(Name("row"))} if self._reader else {}

    def _share(self) -> str:
        """The part of a split that ``select(range(n))`` or ``take(n)`` leaves."""
        method, args, _, _ = self._data.steps[0] if self._data.steps else ("", [], {}, 0)
        if method in ("select", "take") and len(args) == 1:
            if isinstance(args[0], range) and args[0].step == 1:
                return f"[{args[0].start or ''}:{args[0].stop}]"
            if isinstance(args[0], int):
                return f"[:{args[0]}]"
        return ""

    def _row(self, data: Data) -> str:
        """The source of the function that maps a row; "" if none is needed."""
        body = [f"    {line}" for line in self._steps(data)]
        if not body and len(self._columns) < 2:
            return ""
        return self._add_row(body, self._made() if self._scored else "example")

    def _made(self) -> str:
        """The row of flowrl: its prompt, and what the rewards read."""

        def column(name: str) -> Name:
            return Name(f"example[{written(name)}]")

        truth = truth_of(self._columns)
        rest = {name: column(name) for name in self._columns if name != truth}
        made = {"prompt": column("prompt"), "ground_truth": column(truth) if self._columns else None}
        return written({**made, **({"extra_info": rest} if rest else {})}, 4)

    def _add_row(self, body: Sequence[str], made: str) -> str:
        assert self._copies is not None
        head = ["def row(example):", f'    """A row of flowrl, as {self._copies.script.path.name} makes it."""']
        source = "\n".join([*head, *body, f"    return {made}"])
        self._copies.sources["row"] = source
        return source

    def _steps(self, data: Data) -> Iterator[str]:
        for number, (method, args, kwargs, line) in enumerate(data.steps):
            odd = sorted(kwargs.keys() - _OPTIONS - {"function"})
            function = kwargs.get("function", args[0] if args else None)
            if method in ("map", "filter") and isinstance(function, Local) and not odd and len(args) < 2:
                yield from self._mapped(method, function, kwargs.get("fn_kwargs") or {})
            elif method == "rename_column" and len(args) == 2:
                yield f"example[{written(args[1])}] = example.pop({written(args[0])})"
            elif method == "rename_columns" and args and isinstance(args[0], dict):
                for old, new in args[0].items():
                    yield f"example[{written(new)}] = example.pop({written(old)})"
            elif method not in _SAME and not (number == 0 and self._share()):
                what = f"{method}({', '.join(f'{name}=...' for name in odd)})" if odd else f"{method}()"
                self._settings.refuse("train_dataset", f"line {line}: {what} is not read; save the rows as a file")

    def _mapped(self, method: str, function: Local, more: dict[str, Any]) -> Iterator[str]:
        assert self._copies is not None
        try:
            name = self._copies.add(function)
        except NotCopied as error:
            self._settings.refuse("train_dataset", f"{error}; save the rows as a file")
            return
        rest = "".join(f", {key}={written(value)}" for key, value in more.items())
        if method == "map":
            yield f"example = {{**example, **{name}(example{rest})}}"
        else:
            yield f"if not {name}(example{rest}):"
            yield "    return None"


def _kind(args: Sequence[Any]) -> bool | None:
    """Whether a function gives messages as the prompt; False for a text, None if it gives none, or that is unclear."""
    if not args or not isinstance(args[0], Local):
        return None
    node = args[0].node
    assigned = {
        target.id: one.value
        for one in ast.walk(node)
        if isinstance(one, ast.Assign)
        for target in one.targets
        if isinstance(target, ast.Name)
    }
    for one in ast.walk(node):
        if not isinstance(one, ast.Dict):
            continue
        for key, value in zip(one.keys, one.values, strict=True):
            if isinstance(key, ast.Constant) and key.value == "prompt":
                found = assigned.get(value.id, value) if isinstance(value, ast.Name) else value
                if isinstance(found, ast.List | ast.ListComp):
                    return True
                if isinstance(found, ast.JoinedStr | ast.BinOp) or isinstance(getattr(found, "value", None), str):
                    return False
    return None
