"""`Value`: the critic's estimate before every response token."""

from __future__ import annotations

from typing import ClassVar

from flowrl import columns as c
from flowrl.core.operator import Granularity, Operator
from flowrl.core.protocols import Critic
from flowrl.core.roles import Reads, Role
from flowrl.records import Tokens


class Value(Operator):
    """State values, float32 ``[batch response]``: entry ``t`` is of the state in which token ``t`` was sampled."""

    granularity: ClassVar[Granularity] = "row"
    critic: Reads[Critic] = Role("critic")

    def __call__(self, rollout: Tokens) -> c.Values:
        return self.critic.values(rollout)
