"""Merge the reports of the ranks of an instance."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flowrl.core.graphs.graph import Node
from flowrl.distributed.hosts.host import Report
from flowrl.errors import SyncError
from flowrl.records import Receipt
from flowrl.run.engine.runner import Lengths


def joined(reports: Sequence[Report]) -> Lengths | None:
    """The lengths of the rows that several ranks wrote, in the order of the rows."""
    found = [report for report in reports if report.lengths is not None]
    if not found:
        return None
    rows = np.concatenate([next(iter(report.columns.values())).rows for report in found])
    order = np.argsort(rows)
    tokens = np.concatenate([report.lengths.tokens for report in found if report.lengths])
    responses = [report.lengths.response for report in found if report.lengths]
    known = [response for response in responses if response is not None]
    return Lengths(tokens[order], np.concatenate(known)[order] if len(known) == len(found) else None)


def refuse_unequal(reports: Sequence[Report], node: Node) -> None:
    """Refuse a sync in which the ranks of an engine got different weights."""
    receipts = [value for report in reports for value in report.values.values() if isinstance(value, Receipt)]
    if len({(receipt.version, receipt.digest) for receipt in receipts}) > 1:
        raise SyncError(
            f"{node.name}: the ranks of the engine received different weights: {receipts}. Sync again.",
            code="sync.unequal-ranks",
            node=node.name,
            found=[f"version {receipt.version}, digest {receipt.digest}" for receipt in receipts],
        )
