"""The rule that no engine samples without a receipt for its weights."""

from __future__ import annotations

from flowrl.errors import SyncError
from flowrl.records import Receipt


def require_receipt(receipt: Receipt | None) -> Receipt:
    """The receipt of an engine's last sync, which it must have before it generates.

    Raises:
        SyncError: there is none.
    """
    if receipt is None:
        raise SyncError(
            "this rollout engine holds no receipt, so nobody knows which version of the policy it would sample "
            "from; call engine.sync(trainer) first (in a graph: end the step with Sync()(actor))."
        )
    return receipt
