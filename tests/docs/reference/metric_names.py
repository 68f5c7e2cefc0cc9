"""The names of metrics that the page of metrics has, and those that the code reports, from its source."""

from __future__ import annotations

import ast
import re
import runpy
from collections.abc import Iterable, Iterator
from itertools import product

from tests import ROOT
from tests.repository.test_imports import module_files

GENERATOR = runpy.run_path(str(ROOT / "docs" / "metrics.py"))
_ENTRIES = [one for group in GENERATOR["metrics"]().values() for one in group.items()]
PAGE = {name: entry for key, entry in _ENTRIES for name in key.split()}
"""The entries of the page by name."""

_REPORTS = {"mean", "sum", "min", "max", "tokens", "groups"}
_VALUES = {
    "key": ("<key>",),
    "limit": ("turns", "context", "segments"),
    "log": ("reward",),
    "name": ("overridden", "retries", "abandoned", "refused"),
    "node": ("<node>",),
    "other": ("<name>",),
    "quantity": ("ratio", "<estimator>"),
    "self._prefix": ("actor", "critic", "reward_model"),
    "self.k": ("<k>",),
    "self.name": ("<node>",),
    "transport.replace(' ', '_')": ("<transport>",),
}
"""What an expression in a name stands for."""
_OF_TEMPLATES = {
    "actor/kto_{name}": {"actor/kto_desirable", "actor/kto_undesirable"},
    "data/{name}/last_scored_step": {"data/<input>/last_scored_step"},
    "reward/{name}": {"reward/<key>"},
}
_NOT_OF_MODELS = {"critic/aux_loss", "reward_model/aux_loss"}
"""Only a policy has a load-balancing loss."""
_LINES = ("run.engine.result", "run.training.loop", "run.training.sources", "run.recording.statistics")
"""The modules that add to a line of ``metrics.jsonl`` what no operator reports."""
_IN_LINES = re.compile(r"(timing|throughput|queue|total|groups|advantage|reward|data)/[\w{}]+(/\w+)?")


def reported() -> set[str]:
    """The names that operators, losses, engines and the training loop report."""
    templates: set[str] = set()
    parts: set[str] = set()  # of names that a call completes
    for name, path in module_files().items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        classes = {id(node): cls for cls in ast.walk(tree) if isinstance(cls, ast.ClassDef) for node in ast.walk(cls)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                found = [_with_log(text, classes.get(id(node))) for text in _texts(node)]
                templates |= {text for text in found if text[-1] not in "/_"}
                parts |= {text for text in found if text[-1] in "/_"}
            elif name.removeprefix("flowrl.") in _LINES and (text := _text(node)) and _IN_LINES.fullmatch(text):
                templates.add(text)
            elif isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == "_REPORTED":
                templates |= set(ast.literal_eval(node.value).values())  # type: ignore[arg-type]
    expanded = {name for text in templates for name in _expand(text, sorted(parts))}
    return {name for name in expanded if "/" in name or "@" in name} - _NOT_OF_MODELS


def _texts(call: ast.Call) -> Iterator[str]:
    """The texts that a call passes to a collector of metrics, or to a function together with one."""
    own = isinstance(call.func, ast.Attribute) and getattr(call.func.value, "id", "") == "metrics"
    if own and call.func.attr in _REPORTS:  # type: ignore[attr-defined]
        yield from filter(None, [_text(call.args[0])])
    elif not own and any(getattr(argument, "id", "") == "metrics" for argument in call.args):
        yield from filter(None, map(_text, call.args))


def _text(node: ast.AST) -> str | None:
    """A text as written, with the expressions of an f-string in braces."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        values = node.values
        return "".join(f"{{{ast.unparse(v.value)}}}" if isinstance(v, ast.FormattedValue) else v.value for v in values)  # type: ignore[attr-defined]
    return None


def _with_log(text: str, cls: ast.ClassDef | None) -> str:
    """The name with the default of the class's field `log`."""
    for field in cls.body if cls else ():
        if isinstance(field, ast.AnnAssign) and getattr(field.target, "id", "") == "log" and field.value:
            default = field.value.keywords[0].value if isinstance(field.value, ast.Call) else field.value
            text = text.replace("{self.log}", ast.literal_eval(default))
    return text


def _expand(text: str, parts: Iterable[str]) -> set[str]:
    """The names that a template stands for."""
    if text in _OF_TEMPLATES:
        return _OF_TEMPLATES[text]
    literals = re.split(r"\{([^}]*)\}", text)
    choices = [{"prefix": tuple(parts), **_VALUES}[one] if i % 2 else (one,) for i, one in enumerate(literals)]
    return {"".join(chosen) for chosen in product(*choices)}


def undocumented(names: Iterable[str]) -> list[str]:
    """The names of a run's metrics that the page does not have; the node may be in front of a name."""
    known = [name for name in PAGE if name != "<validation>/<metric>"]
    patterns = "|".join(re.sub(r"<\w+>", "[^/]+", re.escape(name)) for name in known)
    return [name for name in names if not re.fullmatch(rf"(\w+/)?({patterns})", name)]
