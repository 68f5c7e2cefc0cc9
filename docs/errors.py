"""Write docs/reference/errors.md, the page of all error codes, from docs/errors/*.toml: ``python docs/errors.py``.

A file holds the codes of one group, such as ``graph.toml``::

    ["graph.unknown-node"]
    cause = "An edit names a node that the graph does not have."
    example = '''grpo("my_reward.py:score").edit(drop=["whitten"])'''
    fix = '''grpo("my_reward.py:score").edit(drop=["whiten"])'''

Example and fix are Python that runs in the folder of the docs' examples; `tests/docs/reference/test_error_codes.py`
runs both: the example raises the error, the fix does not.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path

HERE = Path(__file__).resolve().parent
PAGE = HERE / "reference" / "errors.md"
HEAD = """# Error codes

Every error that flowrl raises has a code in brackets at the end of its message, also as `error.code`. The names and
numbers of the message are in `error.facts`, so programs match these and not the wording, which may change. Each code
below has its cause, an example that raises it, and the fix.

<!-- written by docs/errors.py from docs/errors/*.toml -->
"""


def codes() -> dict[str, Mapping[str, str]]:
    """Cause, example and fix by code, in the order of groups and codes."""
    found: dict[str, Mapping[str, str]] = {}
    for path in sorted((HERE / "errors").glob("*.toml")):
        found |= dict(sorted(tomllib.loads(path.read_text(encoding="utf-8")).items()))
    return found


def page() -> str:
    """The page as Markdown."""
    parts, group = [HEAD], ""
    for code, entry in codes().items():
        if code.partition(".")[0] != group:
            group = code.partition(".")[0]
            parts.append(f"## {group}\n")
        parts.append(f"### {code}\n\n{entry['cause']}\n")
        for name in ("example", "fix"):
            parts.append(f"{name.capitalize()}:\n\n```py\n{entry[name].strip()}\n```\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
