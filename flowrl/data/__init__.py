"""What flows: `DataProto` and its columns; data sources and samplers; tokenizers, keys, metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowrl.lazy import lazy

if TYPE_CHECKING:
    from flowrl.data.keys import Key
    from flowrl.data.metrics import Metrics
    from flowrl.data.proto.column_math import Objects, objects
    from flowrl.data.proto.dataproto import DataProto
    from flowrl.data.sources.samplers import Order, SampledRow, Sampler
    from flowrl.data.sources.source import Source, Stream
    from flowrl.data.text.tokenizer import ChatTokenizer
    from flowrl.data.text.transcript import Transcript

__all__ = [
    "ChatTokenizer",
    "DataProto",
    "Key",
    "Metrics",
    "Objects",
    "Order",
    "SampledRow",
    "Sampler",
    "Source",
    "Stream",
    "Transcript",
    "objects",
]

__getattr__ = lazy(
    __name__,
    {
        "ChatTokenizer": "text.tokenizer",
        "DataProto": "proto.dataproto",
        "SampledRow": "sources.samplers",
        "Key": "keys",
        "Metrics": "metrics",
        "Objects": "proto.column_math",
        "Order": "sources.samplers",
        "Sampler": "sources.samplers",
        "Source": "sources.source",
        "Stream": "sources.source",
        "Transcript": "text.transcript",
        "objects": "proto.column_math",
    },
)
