"""The errors of flowrl.

Every message is one short paragraph: what was found, where, what was expected, and the call that mends it.
Each class derives from `FlowrlError` and from the builtin it refines. A message is the only argument, so
every error survives pickling (it must cross process boundaries).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import FrozenInstanceError


class FlowrlError(Exception):
    """Base of every error that flowrl raises on purpose."""

    def __str__(self) -> str:  # KeyError would show the repr of its message
        return str(self.args[0]) if self.args else ""


def offer(name: object, known: Iterable[str], has: str = "it has") -> str:
    """The end of a message about a name that is not there: all that are, and the one that it resembles, if any.

    ``"it has reward, gae; did you mean 'gae'?"``, or ``"it has reward, gae."``.
    """
    names = list(known)
    near = difflib.get_close_matches(str(name), names, n=1)
    return f"{has} {', '.join(names) or 'none'}{f'; did you mean {near[0]!r}?' if near else '.'}"


def article(noun: str) -> str:
    """The noun with its article."""
    return f"{'an' if noun[0] in 'AEIOUaeiou' or noun == 'ndarray' else 'a'} {noun}"


def type_of(value: object) -> str:
    """What a value is, by its type, with the article: ``"an int"`` for 3."""
    return article(type(value).__name__)


class DefinitionError(FlowrlError, TypeError):
    """An operator, record or column class is not well formed; raised where the class is defined."""


class ParameterError(FlowrlError, ValueError):
    """A hyper-parameter or setting has a value that is not allowed."""


class FrozenError(FlowrlError, FrozenInstanceError):
    """A parameter of something frozen was assigned to."""


class PortError(FlowrlError, TypeError):
    """What was connected to a port is not what the port wants."""


class GraphError(FlowrlError, ValueError):
    """A graph, an edit of one, or a file of one is not well formed."""


class RuleError(GraphError):
    """`graph.check()` found something that must not be launched."""


class BindError(FlowrlError, ValueError):
    """A role is not bound, or bound to a backend that cannot serve it."""


class DataError(FlowrlError, ValueError):
    """Data (columns, a file, a prompt) is not what it should be."""


class ColumnNotFoundError(DataError, KeyError, AttributeError):
    """A column that was asked for, by index or as an attribute of a record, is not there."""


class MethodError(FlowrlError, AttributeError):
    """A method that another library has under this name is not there; the message names what replaces it."""


class InPlaceError(FlowrlError, RuntimeError):
    """An operator wrote into a column that it was given, and that others read."""


class StorageError(FlowrlError, OSError):
    """Something could not be written to the disk, which may be full."""


class SyncError(FlowrlError, RuntimeError):
    """Weights did not arrive as they were sent, or an engine holds no valid receipt."""


class SwapError(SyncError):
    """Weights that were to change under answers that are under way did not arrive."""


class StalePolicyError(FlowrlError, RuntimeError):
    """Rows were sampled by another version of the policy than the one that would be trained on them."""


class RewardError(FlowrlError, RuntimeError):
    """A reward function raised, hung, or returned something that is not a score."""


class EpisodeError(FlowrlError, RuntimeError):
    """An episode cannot go on: its environment failed, or its template writes earlier turns otherwise."""


class NodeError(FlowrlError, RuntimeError):
    """A node of a running graph raised; names node, step and input shapes."""


class AuditError(FlowrlError, ValueError):
    """A graph cannot be audited: what it does, or what it should maximize, is not known on an `AuditTask`."""


class AsleepError(FlowrlError, RuntimeError):
    """An engine was asked to compute while it sleeps."""


class EngineError(FlowrlError, RuntimeError):
    """An engine that runs code of others (vLLM, SGLang) died, or failed; the next sync starts it anew."""


class RankError(FlowrlError, RuntimeError):
    """Another rank of the same engine failed, so this one cannot go on."""
