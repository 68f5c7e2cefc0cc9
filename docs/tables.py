"""Write the tables of the docs and the entry points from the code: ``make tables``, or ``python docs/tables.py``.

Each table follows ``<!-- its name -->`` in its page; pyproject.toml lists every operator as an entry point.
"""

from __future__ import annotations

import ast
import functools
import inspect
import runpy
import sys
import textwrap
from collections.abc import Callable, Iterator
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Any

import flowrl.graphs
import flowrl.operators
import flowrl.rewards
from flowrl.core.operators.effects import Effect
from flowrl.core.operators.entry_points import GROUP
from flowrl.core.operators.loss import Loss
from flowrl.core.operators.operator import Operator
from flowrl.episodes.parsers import PARSERS
from flowrl.importers.settings import groups_of
from flowrl.rewards import RewardFunction, Sandbox
from flowrl.spec import Spec

ROOT = Path(__file__).resolve().parents[1]
BAR = r"\|"
"""A bar within a table."""


def _classes(base: type) -> Iterator[tuple[str, Any]]:
    """The classes of `flowrl.operators` that derive from `base`, in the order of ``__all__``."""
    for name in flowrl.operators.__all__:
        cls = getattr(flowrl.operators, name)
        if isinstance(cls, type) and issubclass(cls, base):
            yield name, cls


def _summary(of: Any) -> str:
    return (of.__doc__ or "").split("\n\n")[0].replace("\n    ", " ").replace("|", "\\|")


def _code(names: Any) -> str:
    return ", ".join(f"`{name}`" for name in names)


OPERATORS = {
    "sampling": ("Repeat", "Generate", "Interact", "Sampled"),
    "log-probs": (
        *("OldLogProb", "RefLogProb", "Value", "LogitNorm", "Mismatch", "TeacherTopK", "TeacherHiddenStates"),
        "MismatchResponses",
    ),
    "rewards": (
        *("Reward", "ModelReward", "TextModelReward", "Judge", "Matches", "WeighRewards", "ClipReward"),
        *("NormalizeReward", "OverlongPenalty", "KLShape", "RowScore", "Feedback"),
    ),
    "advantages": (
        *("GAE", "DecoupledGAE", "TurnGAE", "ReturnToGo", "GroupAdvantage", "TurnGroupAdvantage", "RLOOAdvantage"),
        *("OPOAdvantage", "GPGAdvantage", "GDPOAdvantage", "PassAtKAdvantage", "OptimalTokenBaseline", "ReverseKL"),
        *("SubtractBaseline", "KTOBaseline", "Whiten"),
    ),
    "corrections": ("RolloutCorrection", "CorrectLogitNorms", "MaskMismatch"),
    "rows": ("Filter", "Collect", "Spread", "Length", "Ranked", "MaskOverlong", "Replay", "Retokenize"),
    "updates": ("UpdateActor", "UpdateCritic", "UpdateRewardModel", "Sync", "SyncReference"),
    "validations": ("PassAtK", "MajorityAtK", "PreferenceAccuracy"),
}
"""The operators by what they are for, in the order of a step."""


def operators(group: str) -> list[str]:
    classes = dict(_classes(Operator))
    if classes.keys() != (grouped := {name for names in OPERATORS.values() for name in names}):
        raise ValueError(f"OPERATORS of docs/tables.py is not complete: {sorted(classes.keys() ^ grouped)}")
    rows = ["| operator | reads | writes | |", "|---|---|---|---|"]
    for name in OPERATORS[group]:
        cls = classes[name]
        signature = cls.usual_signature()
        writes = _code(signature.outputs)
        if signature.output_record is not None and len(signature.outputs) > 2:
            writes = f"`{signature.output_record.__name__}`"
        ports = (_code(signature.ports), writes) if cls._signature.ports else ("what passes",) * 2  # of a gate
        rows.append(f"| `{name}` | {ports[0]} | {ports[1]} | {_summary(cls)} |")
    return rows


def effects() -> list[str]:
    return ["| effect | |", "|---|---|", *(f'| `"{one}"` | {text} |' for one, text in _members(Effect))]


def _members(cls: type[StrEnum]) -> Iterator[tuple[str, str]]:
    """The values of an enumeration, with the docstring after each."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body  # type: ignore[attr-defined]
    for member, doc in pairwise(body):
        if isinstance(member, ast.Assign) and isinstance(doc, ast.Expr):
            yield ast.literal_eval(member.value), doc.value.value.rstrip(".").replace("\n    ", " ")  # type: ignore[attr-defined]


def losses() -> list[str]:
    rows = ["| loss | reads | sees | |", "|---|---|---|---|"]
    for name, cls in _classes(Loss):
        reads = _code((*cls.model_ports.values(), *cls._signature.ports))
        rows.append(f"| `{name}` | {reads} | {cls.unit} | {_summary(cls)} |")
    return rows


def algorithms() -> list[str]:
    rows = ["| algorithm | |", "|---|---|"]
    return rows + [f"| `{name}` | {_summary(getattr(flowrl.graphs, name))} |" for name in flowrl.graphs.__all__]


def rewards() -> list[str]:
    rows = ["| reward function | parameters | |", "|---|---|---|"]
    return rows + [_of_spec(name, cls) for name, cls in _specs(RewardFunction) if not name[0].isupper()]


def sandboxes() -> list[str]:
    rows = ["| sandbox | parameters | |", "|---|---|---|"]
    return rows + [_of_spec(name, cls) for name, cls in _specs(Sandbox) if cls is not Sandbox]


def _specs(base: type[Spec]) -> Iterator[tuple[str, Any]]:
    """The names of `flowrl.rewards` for a class that derives from `base`, or for an instance, with the class."""
    for name in flowrl.rewards.__all__:
        found = getattr(flowrl.rewards, name)
        cls = found if isinstance(found, type) else type(found)
        if issubclass(cls, base):
            yield name, cls


def _of_spec(name: str, cls: Any) -> str:
    return f"| `{name}` | {_code(cls.__pydantic_fields__)} | {_summary(cls)} |"


def keys_of(framework: str) -> list[str]:
    """The keys of another framework, by what flowrl has in their place."""
    rows = ["| | flowrl | keys |", "|---|---|---|"]
    for group in groups_of(framework):
        here = group["here"].replace("|", "\\|")
        rows.append(f"| {group['status']} | {here} | {_code(key.replace('|', '') for key in group['keys'])} |")
    return rows


def parsers() -> list[str]:
    rows = ["| parser | |", "|---|---|"]
    for name, form in PARSERS.items():
        summary = (sys.modules[form.parse.__module__].__doc__ or "").partition("\n\n")[0]
        rows.append(f"| `{name}` | {summary.replace('``', '`').replace('|', BAR)} |")
    return rows


def chat_templates() -> list[str]:
    found: list[str] = runpy.run_path(str(ROOT / "docs" / "chat_templates.py"))["table"]()
    return found


def entry_points() -> list[str]:
    return [f'{name} = "flowrl.operators:{name}"' for name, _ in sorted(_classes(Operator))]


FILES: dict[str, dict[str, Callable[[], list[str]]]] = {
    "docs/how-to/rewards.md": {"<!-- rewards -->\n\n": rewards},
    "docs/how-to/sandboxes.md": {"<!-- sandboxes -->\n\n": sandboxes},
    "docs/reference/operators.md": {
        **{f"<!-- operators: {group} -->\n\n": functools.partial(operators, group) for group in OPERATORS},
        "<!-- effects -->\n\n": effects,
    },
    "docs/reference/losses.md": {"<!-- losses -->\n\n": losses},
    "docs/reference/algorithms.md": {"<!-- algorithms -->\n\n": algorithms},
    "docs/how-to/tools.md": {"<!-- parsers -->\n\n": parsers},
    "docs/reference/chat-templates.md": {"<!-- chat templates -->\n\n": chat_templates},
    "pyproject.toml": {f'[project.entry-points."{GROUP}"]\n': entry_points},
    **{
        f"docs/how-to/from-{name}.md": {f"<!-- keys of {name} -->\n\n": functools.partial(keys_of, name)}
        for name in ("openrlhf", "trl", "verl")
    },
}
"""By file and marker line: the function that generates the lines after it; an empty line ends them."""


def generated(file: str) -> str:
    """The expected content of a file."""
    text = (ROOT / file).read_text(encoding="utf-8")
    for mark, lines in FILES[file].items():
        before, found, after = text.partition(mark)
        assert found, f"{file} has no {mark!r}"
        text = "".join((before, mark, "\n".join(lines()), *after.partition("\n\n")[1:]))
    return text.rstrip("\n") + "\n"


if __name__ == "__main__":
    for name in FILES:
        (ROOT / name).write_text(generated(name), encoding="utf-8")
