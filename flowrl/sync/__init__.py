"""Weight transfer from a trainer to an engine, and the proof that both hold the same weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowrl.lazy import lazy

if TYPE_CHECKING:
    from flowrl.sync.digest import tensor_digest, weights_digest
    from flowrl.sync.group import connect
    from flowrl.sync.probe import Probe, Scores, refuse_old_weights, refuse_other_weights
    from flowrl.sync.received import Manifest, Origin, ReceivedWeights
    from flowrl.sync.route import Location, choose
    from flowrl.sync.shadow import Shadow
    from flowrl.sync.stream import Stream

__all__ = [
    "Location",
    "Manifest",
    "Origin",
    "Probe",
    "ReceivedWeights",
    "Scores",
    "Shadow",
    "Stream",
    "choose",
    "connect",
    "refuse_old_weights",
    "refuse_other_weights",
    "tensor_digest",
    "weights_digest",
]

__getattr__ = lazy(
    __name__,
    {
        "Manifest": "received",
        "Origin": "received",
        "Probe": "probe",
        "ReceivedWeights": "received",
        "Scores": "probe",
        "Location": "route",
        "Shadow": "shadow",
        "Stream": "stream",
        "choose": "route",
        "connect": "group",
        "refuse_old_weights": "probe",
        "refuse_other_weights": "probe",
        "tensor_digest": "digest",
        "weights_digest": "digest",
    },
)
