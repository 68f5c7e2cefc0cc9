"""The errors of flowrl.

A message states what happened, where, what was expected, and how to fix it. Each refused situation has a stable code,
such as ``graph.unknown-node``; `docs/reference/errors.md` lists all of them, each with an example and its fix. Each
class derives from `FlowrlError` and from the builtin that it refines.
"""

from __future__ import annotations

import difflib
import os
import sysconfig
from collections.abc import Container, Iterable, Mapping
from dataclasses import FrozenInstanceError
from typing import Any


class FlowrlError(Exception):
    """Base of all errors that flowrl raises.

    Args:
        message: what happened, where, what was expected, and how to fix it.
        code: the situation, such as ``"graph.unknown-node"``; programs and tests match it rather than the wording.
        facts: the names and numbers of the message, such as ``node="gae"`` or ``row=3``. What is not a plain value or a
            collection of plain values becomes its text, so that every error can be pickled.
    """

    code: str
    facts: Mapping[str, Any]

    def __init__(self, message: str = "", *, code: str = "", **facts: object) -> None:
        super().__init__(message)
        self.code = code
        self.facts = {name: _plain(value) for name, value in facts.items()}

    @property
    def message(self) -> str:
        """The message without the code."""
        return str(self.args[0]) if self.args else ""

    def __str__(self) -> str:
        return f"{self.message} [{self.code}]" if self.code else self.message


def _plain(value: object) -> object:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple | set | frozenset):
        return tuple(map(_plain, sorted(value, key=str) if isinstance(value, set | frozenset) else value))
    return str(value)


def offer(name: object, known: Iterable[str], has: str = "it has") -> str:
    """The end of a message about an unknown name: all known names, and the most similar one, if any.

    ``"it has reward, gae; did you mean 'gae'?"``, or ``"it has reward, gae."``.
    """
    names = list(known)
    near = difflib.get_close_matches(str(name), names, n=1)
    return f"{has} {', '.join(names) or 'none'}{f'; did you mean {near[0]!r}?' if near else '.'}"


# folders of flowrl, Python and installed packages
_OTHERS = (os.path.dirname(__file__), *(sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")))


def is_of_a_user(file: str) -> bool:
    """Whether a file of a traceback is neither flowrl's nor Python's nor of an installed package."""
    return not file.startswith(("<frozen", *(f"{folder}{os.sep}" for folder in _OTHERS)))


def article(noun: str) -> str:
    """The noun with its article."""
    return f"{'an' if noun[0] in 'AEIOUaeiou' or noun == 'ndarray' else 'a'} {noun}"


def type_of(value: object) -> str:
    """The type of a value, with the article: ``"an int"`` for 3."""
    return article(type(value).__name__)


def short(value: object) -> str:
    """The repr, at most 200 characters of it; only the type where the repr raises."""
    try:
        text = repr(value)
    except BaseException as error:  # of a user's __repr__, or of a value that nests too deeply
        return f"<{type(value).__name__}, whose repr raises {type(error).__name__}>"
    return text if len(text) <= 200 else f"{text[:200]}... ({len(text)} characters)"


class DefinitionError(FlowrlError, TypeError):
    """An operator, record or column class is not well formed; raised where the class is defined."""


class ParameterError(FlowrlError, ValueError):
    """A hyper-parameter or setting has a value that is not allowed."""


class FrozenError(FlowrlError, FrozenInstanceError):
    """A parameter of a frozen object was assigned to."""


class PortError(FlowrlError, TypeError):
    """The output that was connected to a port does not fit it."""


class GraphError(FlowrlError, ValueError):
    """A graph, an edit of one, or a file of one is not well formed."""


class RuleError(GraphError):
    """`Graph.check` found a violation of a rule."""


class BindError(FlowrlError, ValueError):
    """A role is not bound, or bound to a backend that cannot serve it."""


class DataError(FlowrlError, ValueError):
    """Data (columns, a file, a prompt) is malformed or invalid."""


class ColumnNotFoundError(DataError, KeyError, AttributeError):
    """A requested column (by index, or as an attribute of a record) does not exist."""


class ImporterError(FlowrlError, ValueError):
    """A configuration of another framework cannot be read, or says what flowrl cannot do."""


class MethodError(FlowrlError, AttributeError):
    """A method of another library does not exist here under this name; the message names its replacement."""


class InPlaceError(FlowrlError, RuntimeError):
    """An operator wrote into an input column, which other nodes read, too."""


class StorageError(FlowrlError, OSError):
    """A file cannot be written, for example because the disk is full."""


class HubError(FlowrlError, OSError):
    """The Hugging Face Hub does not have or refuses a repository, or cannot be reached."""


class SyncError(FlowrlError, RuntimeError):
    """The received weights differ from those sent, or an engine holds no valid receipt."""


class SwapError(SyncError):
    """A live weight update, with requests in flight, failed."""


class StalePolicyError(FlowrlError, RuntimeError):
    """Rows were sampled by another version of the policy than the one to be trained on them."""


class RewardError(FlowrlError, RuntimeError):
    """A reward function raised, timed out, or returned a value that is not a score."""


class EpisodeError(FlowrlError, RuntimeError):
    """An episode cannot continue: its environment failed, or its template rewrites earlier turns."""


class NodeError(FlowrlError, RuntimeError):
    """A node of a running graph raised; names node, step and input shapes."""


class AlarmError(FlowrlError, RuntimeError):
    """An alarm whose action is to stop the run fired."""


class AuditError(FlowrlError, ValueError):
    """A graph cannot be audited: its behavior or its objective is not defined on an `AuditTask`."""


class AsleepError(FlowrlError, RuntimeError):
    """An engine was called while it sleeps."""


class EngineError(FlowrlError, RuntimeError):
    """An engine of an external library (vLLM, SGLang) died or failed; the next sync restarts it."""


class RankError(FlowrlError, RuntimeError):
    """Another rank of the same engine failed, so this one cannot continue."""


STALENESS = ("max_staleness", "staleness_threshold", "max_head_offpolicyness")
"""The bound on staleness in other frameworks: verl's is ``staleness_threshold``, AReaL's ``max_head_offpolicyness``."""


def refuse_staleness(where: str, given: Mapping[str, object], known: Container[str]) -> None:
    """Refuse a bound on staleness among the arguments of `where`, unless it is one of its `known` parameters."""
    for name in (name for name in STALENESS if name in given and name not in known):
        value = given[name]
        versions = value if type(value) is int and value >= 0 else 1
        raise ParameterError(
            f"{where} has no parameter {name!r} (given {value!r}): the graph bounds staleness, in versions that "
            f"generation may run ahead. Pass it as `graph.edit(lag=Lag({versions}))`, with `from flowrl import Lag`.",
            code="lag.max-staleness",
            where=where,
            parameter=name,
            given=value,
        )


def why_not_loaded(error: Exception) -> str:
    """Why transformers does not load a folder, without its advice to run the folder's code, which flowrl never does."""
    if "trust_remote_code" in str(error):
        return "it needs its own Python code, which flowrl never runs; use an architecture of transformers"
    first, *_ = [*str(error).splitlines(), ""]
    return f"{type(error).__name__}: {first}"
