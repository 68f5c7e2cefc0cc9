"""The single vLLM of the test process, and small settings for it."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

from flowrl.backends import VLLM
from flowrl.backends.vllm.engine import VLLMEngine
from tests.engines.contract.answers import CONTEXT

VLLM_SETTINGS: dict[str, Any] = {"dtype": "float32", "kv_cache_bytes": 64 << 20, "max_num_seqs": 64}


class VLLMSlot:
    """A process can have one vLLM at a time: starting or claiming one ends all others."""

    def __init__(self) -> None:
        self._engines = WeakSet[VLLMEngine]()

    def start(self, spec: VLLM) -> VLLMEngine:
        """Build an engine in the slot."""
        self.free()
        engine = spec.build(CONTEXT)
        self._engines.add(engine)
        return engine

    def claim(self, engine: VLLMEngine) -> VLLMEngine:
        """End all other engines, so that a sync may restart this one."""
        for other in self._engines:
            if other is not engine:
                other.close()
        return engine

    def free(self) -> None:
        """End all engines."""
        for engine in self._engines:
            engine.close()
