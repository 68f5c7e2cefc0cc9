"""`SpanLog`: writes spans to ``spans.jsonl`` as they end, and which node runs, so that a killed run leaves a trace."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from flowrl.run.engine.timeline import Span
from flowrl.run.training.run_folder import SPANS, RunFolder


class SpanLog:
    """Appends to the ``spans.jsonl`` of a run, without the lengths of rows."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._written: dict[str, int] = {}

    def open(self, node: str) -> None:
        """A node, or a validation, starts."""
        self._folder.append(SPANS, [{"open": node, "time": time.time()}])

    def write(self, of: str, spans: Sequence[Span]) -> None:
        """Write those of a growing list of spans, named `of`, that were added since the last call."""
        new = spans[self._written.get(of, 0) :]
        self._written[of] = len(spans)
        self._folder.append(SPANS, [_record(span) for span in new])


def _record(span: Span) -> dict[str, Any]:
    load = {"rows": span.rows, "tokens": span.tokens, "bytes": span.bytes}
    step = {} if span.step is None else {"step": span.step + 1}
    known = {key: value for key, value in load.items() if value}
    ends = {"start": span.start, "end": span.end}
    return {"name": span.name, "place": span.place, "kind": span.kind, **ends, **step, **known}
