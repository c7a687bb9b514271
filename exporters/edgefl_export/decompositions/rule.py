"""What a rule of the compiler is: a function in place of an op, which may leave some of the op's cases to PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Never, cast

from torch._ops import OpOverload

Rules = dict[OpOverload, Callable[..., object]]
"""By op: what takes the op's arguments and returns what the op returns."""

DECLINED: Never = cast(Never, NotImplemented)
"""What a rule returns in a case that it leaves to PyTorch: torch's own sign for that, of no type that a result has."""
