"""An owner's policy, and the facts that it depends on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from edgefl_device.policy import Condition, OwnerPolicy, OwnerRules, SystemQueries


@dataclass
class Facts(SystemQueries):
    """Conditions that hold (None: unknown), and the traffic of every day."""

    conditions: Mapping[str, bool | None] = field(default_factory=dict)
    nbytes: int = 0
    days: list[str] = field(default_factory=list)

    def holds(self, condition: Condition) -> bool | None:
        return self.conditions.get(condition)

    def traffic(self, day: str) -> int:
        self.days.append(day)
        return self.nbytes


NO_TRAFFIC = Facts()
ALL_HOLD = {"charging": True, "unmetered": True}


def rules(facts: Facts | None = None, **policy: Any) -> OwnerRules:
    """The rules of a policy with these keys; by default no condition is known, and there was no traffic."""
    facts = facts or Facts()
    return OwnerRules(OwnerPolicy(**policy), facts, facts)
