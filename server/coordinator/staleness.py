"""How much of an update counts that comes some versions late. Pure functions of a whole number.

Of an update that begins from version v and is counted in the step from version u, the staleness is s = u - v: the number of
server steps between. Its change is multiplied by the share, and it weighs what it weighs anyway: a buffer of late updates
makes a shorter step (FedBuff, Nguyen et al. 2022, section 3: the sum of scaled changes over K).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal

Rule = Literal["sqrt", "inverse", "constant", "hinge"]

HINGE = 4
"""Versions without a loss, under the rule ``hinge``."""


def _hinge(versions: int) -> float:
    """FedAsync's (Xie et al. 2019, section 5.2), with a = 1: fresh enough counts whole."""
    return 1.0 if versions <= HINGE else 1.0 / (1.0 + versions - HINGE)


RULES: Mapping[Rule, Callable[[int], float]] = {
    "sqrt": lambda versions: 1.0 / math.sqrt(1.0 + versions),
    "inverse": lambda versions: 1.0 / (1.0 + versions),
    "constant": lambda _: 1.0,
    "hinge": _hinge,
}
"""By the name that a federation file has. Another one is a line here, and a name in :data:`Rule`: the journal keeps the
share of each update, so that a replay needs no rule."""


def share(rule: Rule, versions: int) -> float:
    """In (0, 1], 1 for 0 versions; ValueError for less than 0."""
    if versions < 0:
        raise ValueError(f"an update cannot be {versions} versions late")
    return RULES[rule](versions)
