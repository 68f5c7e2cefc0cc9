"""Read plain data (JSON's types) from untrusted files, or refuse it with the line.

Deep nesting, cycles, growth by aliases and duplicate keys are refused, so that the result is safe to traverse.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import yaml

from flowrl.data.files import unique
from flowrl.errors import GraphError, type_of

DEPTH = 64
"""The deepest nesting of lists and mappings."""

_NESTS = f"it nests more than {DEPTH} lists and mappings"

SIZE = 200_000
"""The most values in total; those of aliases count each time."""


def read(path: Path) -> Any:
    """The plain data in a ``.json``, ``.yaml`` or ``.yml`` file; errors name file and line."""
    parse = _json if is_json(path) else _yaml
    try:
        data = parse(path.read_text(encoding="utf-8"))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        at = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
        raise _broken(path, f"{at}{error.problem}") from error
    except json.JSONDecodeError as error:
        raise _broken(path, f"line {error.lineno}, column {error.colno}: {error.msg}") from error
    except yaml.reader.ReaderError as error:
        raise _broken(path, f"character {error.position + 1}: {error.reason}") from error
    except OSError as error:
        raise _broken(path, error.strerror or str(error)) from error
    except RecursionError as error:
        raise _broken(path, _NESTS) from error
    except (ValueError, LookupError, AttributeError, TypeError) as error:  # a scalar that does not fit its tag
        raise _broken(path, f"{type(error).__name__}: {error}") from error
    check(data, path)
    return data


def is_json(path: Path) -> bool:
    """Whether a file is JSON by its suffix; otherwise it is YAML."""
    if path.suffix not in (".json", ".yaml", ".yml"):
        raise GraphError(
            f"{path} has the suffix {path.suffix!r}; expected .json, .yaml or .yml.",
            code="file.wrong-suffix",
            path=path,
            found=path.suffix,
        )
    return path.suffix == ".json"


def check(data: Any, source: object) -> None:
    """Refuse data that is not plain, nests too deeply, or has too many values; messages name its `source`."""
    pending: list[tuple[Any, str, int]] = [(data, "", 0)]
    seen = 0
    while pending:
        value, at, depth = pending.pop()
        seen += 1
        if depth >= DEPTH and isinstance(value, Mapping | list | tuple):
            raise _broken(source, _NESTS)
        if seen > SIZE:
            raise _broken(source, f"it holds more than {SIZE} values, counting what aliases repeat")
        if isinstance(value, Mapping):
            if odd := [key for key in value if not isinstance(key, str)]:
                found = f"{odd[0]!r}, {type_of(odd[0])}"
                raise _broken(source, f"{at or 'it'} has the key {found}; keys must be text")
            pending += [(item, f"{at}.{key}".lstrip("."), depth + 1) for key, item in value.items()]
        elif isinstance(value, list | tuple):
            pending += [(item, f"{at}[{i}]", depth + 1) for i, item in enumerate(value)]
        elif value is not None and not isinstance(value, bool | int | float | str):
            raise _broken(source, f"{at or 'it'} is {type_of(value)}, which JSON does not have")


def _broken(source: object, what: str) -> GraphError:
    return GraphError(
        f"{source} cannot be read as a graph or a training: {what}; expected a file that flowrl.save(...) wrote.",
        code="file.unreadable",
        path=source,
        reason=what,
    )


def _json(text: str) -> Any:
    return json.loads(text, object_pairs_hook=unique)


def _yaml(text: str) -> Any:
    return yaml.load(text, _Loader)


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, which also refuses deep nesting and duplicate keys."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.depth > DEPTH:  # the scanner would take seconds for the rest
            raise yaml.composer.ComposerError(problem=_NESTS)
        self.depth += 1
        node: yaml.Node | None = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
        try:
            unique((key, None) for key in keys)
        except ValueError as error:
            raise yaml.constructor.ConstructorError(None, None, str(error), node.start_mark) from None
        return super().construct_mapping(node, deep)
