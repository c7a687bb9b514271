"""Rules of the compiler: a rule is a function that replaces an op, and may leave some cases of it to PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Never, cast

from torch._ops import OpOverload

Rules = dict[OpOverload, Callable[..., object]]
"""By op: what takes the op's arguments and returns what the op returns."""

DECLINED: Never = cast(Never, NotImplemented)
"""What a rule returns in a case that it leaves to PyTorch: torch's own sign for that, of no type that a result has."""
