"""Write the tables of the docs and the entry points from the code: ``make tables``, or ``python docs/tables.py``.

Each table follows ``<!-- its name -->`` in its page; pyproject.toml lists every operator as an entry point.
"""

from __future__ import annotations

import functools
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import flowrl.graphs
import flowrl.operators
import flowrl.rewards
from flowrl.core.operators.entry_points import GROUP
from flowrl.core.operators.loss import Loss
from flowrl.core.operators.operator import Operator
from flowrl.episodes.parsers import PARSERS
from flowrl.importers.settings import groups_of
from flowrl.rewards import RewardFunction, Sandbox
from flowrl.rules.check import RULES
from flowrl.rules.rule import RETIRED
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
    return (of.__doc__ or "").split("\n\n")[0].replace("\n    ", " ")


def _code(names: Any) -> str:
    return ", ".join(f"`{name}`" for name in names)


def operators() -> list[str]:
    rows = ["| operator | reads | writes | |", "|---|---|---|---|"]
    for name, cls in _classes(Operator):
        signature = cls.usual_signature()
        writes = _code(signature.outputs)
        if signature.output_record is not None and len(signature.outputs) > 2:
            writes = f"`{signature.output_record.__name__}`"
        ports = (_code(signature.ports), writes) if cls._signature.ports else ("what passes",) * 2  # of a gate
        rows.append(f"| `{name}` | {ports[0]} | {ports[1]} | {_summary(cls)} |")
    return rows


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


def rules() -> list[str]:
    rows = ["| rule | reason | learned from |", "|---|---|---|"]
    rows += [f"| {rule.id} | {rule.reason} | {rule.source} |" for rule in RULES]
    return rows + [f"| {id} | *Retired.* {reason} | |" for id, reason in RETIRED.items()]


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
    "docs/rewards.md": {"<!-- rewards -->\n\n": rewards, "<!-- sandboxes -->\n\n": sandboxes},
    "docs/operators.md": {"<!-- operators -->\n\n": operators},
    "docs/losses.md": {"<!-- losses -->\n\n": losses},
    "docs/algorithms.md": {"<!-- algorithms -->\n\n": algorithms},
    "docs/episodes.md": {"<!-- parsers -->\n\n": parsers, "<!-- chat templates -->\n\n": chat_templates},
    "docs/graphs.md": {"<!-- rules -->\n\n": rules},
    "pyproject.toml": {f'[project.entry-points."{GROUP}"]\n': entry_points},
    **{
        f"docs/from-{name}.md": {f"<!-- keys of {name} -->\n\n": functools.partial(keys_of, name)}
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
    return text


if __name__ == "__main__":
    for name in FILES:
        (ROOT / name).write_text(generated(name), encoding="utf-8")
