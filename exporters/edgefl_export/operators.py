"""Operators: those of torch by name, our own, and the type of rules that rewrite them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Never, cast

import torch
from torch import Tensor
from torch._ops import OpOverload

# Ops by their names, for tables.


def aten_ops(names: str) -> frozenset[OpOverload]:
    """Return the ops of ``torch.ops.aten`` for names separated by blanks.

    ``mm`` names the default overload of an op, ``add.Tensor`` the overload ``Tensor``.
    """
    parts = (name.partition(".") for name in names.split())
    return frozenset(getattr(getattr(torch.ops.aten, op), overload or "default") for op, _, overload in parts)


# Operators of our own.
#
# ``edgefl::after(x, trigger)`` is x, but not before ``trigger`` has been computed. Runtimes reorder and merge what has no
# data dependence; :mod:`edgefl_export.onnx.ops` writes it as a Reshape whose shape is known only once the trigger is, which
# copies nothing.
#
# ``edgefl::positive(x)`` is 1 where x > 0, else 0, of any shape, in the dtype of x. A comparison and a cast would be two
# ops, which runtimes run on one thread; :mod:`edgefl_export.onnx.ops` writes it as one that they divide.

_library = torch.library.Library("edgefl", "FRAGMENT")
_library.define("after(Tensor x, Tensor trigger) -> Tensor")
_library.define("positive(Tensor x) -> Tensor", tags=(torch.Tag.pointwise,))


def _after(x: Tensor, trigger: Tensor) -> Tensor:
    return x.clone()


def _positive(x: Tensor) -> Tensor:
    return x.gt(0).to(x.dtype)


_library.impl("after", _after, "CompositeExplicitAutograd")
_library.impl("positive", _positive, "CompositeExplicitAutograd")
AFTER = torch.ops.edgefl.after.default
POSITIVE = torch.ops.edgefl.positive.default


# Rules of the compiler: a rule is a function that replaces an op, and may leave some cases of it to PyTorch.

Rules = dict[OpOverload, Callable[..., object]]
"""Replacement function of each op: it takes the arguments of the op and returns the results of the op."""

DECLINED: Never = cast(Never, NotImplemented)
"""Result of a rule in a case that it leaves to PyTorch. It is NotImplemented, as torch expects of decompositions."""
