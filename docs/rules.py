"""Write docs/reference/rules.md, the page of all rules, from the table of rules and docs/rules.toml:
``python docs/rules.py``.

Example and fix of a rule run after `HEAD`; `tests/docs/reference/test_rules.py` runs both: the example breaks the rule,
the fix breaks none. The message on the page is that of the example.
"""

from __future__ import annotations

import linecache
import textwrap
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowrl.rules.check import RULES
from flowrl.rules.rule import RETIRED, Finding

HERE = Path(__file__).resolve().parent
PAGE = HERE / "reference" / "rules.md"
HEAD = """from flowrl import After, Operator, PromptBatch, Role, When, algorithm
from flowrl import columns as c
from flowrl.graphs import *
from flowrl.operators import *


def exact(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str == ground_truth)
"""
TEXT = """# Rules

`graph.check(prompts=...)` finds mistakes in graphs whose types are correct, and a job whose graph breaks a rule
does not start. Rules see what operators declare, so they cover your own operators, too;
[Graphs](graphs.md#rules) says how to allow an exception. Each rule below has its reason, the public issue that
it was learned from, a graph that breaks it, what the check prints for it, and a fix. The examples run after
these lines:

```py
{head}
```

Without another number, a step has 4 prompts.

<!-- written by docs/rules.py from flowrl/rules and docs/rules.toml -->
"""
WIDTH = 120
"""Messages are wrapped to so many characters."""


def examples() -> dict[str, Mapping[str, Any]]:
    """Example, fix and prompts by rule."""
    return tomllib.loads((HERE / "rules.toml").read_text(encoding="utf-8"))


def findings(id: str, *parts: str) -> list[Finding]:
    """What the check finds in the graph that the example defines, or example and fix."""
    entry = examples()[id]
    names: dict[str, Any] = {"__name__": "rules"}
    source, file = "\n".join([HEAD, *(entry[part] for part in parts)]), f"{id} of docs/rules.toml"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file  # rules read environments
    exec(compile(source, file, "exec", dont_inherit=True), names)
    found: list[Finding] = names["graph"].check(prompts=entry.get("prompts", 4))
    return found


def page() -> str:
    """The page as Markdown."""
    parts = [TEXT.format(head=HEAD.rstrip("\n"))]
    for rule in RULES:
        entry = examples()[rule.id]
        prompts = f", with {entry['prompts']} prompts" if "prompts" in entry else ""
        found = [finding for finding in findings(rule.id, "example") if finding.rule == rule.id]
        message = "\n".join(textwrap.fill(str(one), WIDTH, break_long_words=False) for one in found)
        repository, _, number = rule.source.partition("#")
        learned = f"Learned from [{rule.source}](https://github.com/{repository}/issues/{number})."
        blocks = (("py", entry["example"]), ("text", message), ("py", entry["fix"]))
        example, text, fix = (f"```{language}\n{code.strip()}\n```\n" for language, code in blocks)
        parts.append(
            f"## {rule.id}\n\n{rule.reason} {learned}\n\nExample{prompts}:\n\n{example}\n{text}\nFix:\n\n{fix}"
        )
    parts.append("## Retired rules\n\nTheir ids are never used again.\n")
    parts.append("\n".join(f"- {id}: {reason}" for id, reason in RETIRED.items()) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
