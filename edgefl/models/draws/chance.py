"""Numbers that a model's code draws by Python's or numpy's generator, to steer itself: a layer left out now and then.

A graph takes the same path in every step, so in the thread that traces such a number is the middle of what it may be, and a
comparison with it takes the likelier side and says so. Anything else that is done with it is refused: a graph would hold the
same number forever.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from edgefl.errors import ModelError
from edgefl.models.user_code import place


def tell_path(answer: bool) -> None:
    """Warn that a random number steers Python, and that the graph has what follows if the condition is ``answer``."""
    warnings.warn(
        f"a random number steers Python{place()}, such as to leave out a layer now and then; a graph takes the same "
        f"path in every step, and this one takes that where the condition is {answer}",
        stacklevel=3,
    )


def refused() -> ModelError:
    """The error for a number of Python's or numpy's that is computed with."""
    return ModelError(
        f"the model draws by Python's or numpy's generator while it trains{place()}: a graph would have the same numbers in "
        "every step. Draw with torch, such as torch.rand",
        chance=True,
        refused=True,
    )


def seeded() -> ModelError:
    """Return the error for a generator of Python's or numpy's that forward seeds, so that it repeats its numbers."""
    return ModelError(
        f"the model seeds Python's or numpy's generator while it trains{place()}, and so draws the same numbers in every "
        "step. Draw them once in __init__ and keep them by register_buffer, or draw new ones with torch, such as torch.rand",
        chance=True,
        refused=True,
    )


class Chance:
    """A drawn number: to compare, also after sums and products with numbers, and to be refused as anything else."""

    __slots__ = ("_value",)
    __array_ufunc__ = None  # numpy's numbers leave what is done with it to it

    def __init__(self, value: float) -> None:
        self._value = value


def _never(self: Chance, *others: Any) -> Any:
    raise refused()


def _comparison(compare: Callable[[float, Any], bool]) -> Callable[[Chance, Any], Any]:
    def compared(self: Chance, other: Any) -> Any:
        if not isinstance(other, int | float | np.number):
            raise refused()
        answer = bool(compare(self._value, other))
        tell_path(answer)
        return answer

    return compared


def _arithmetic(
    compute: Callable[[Any, Any], float], *, turned: bool = False
) -> Callable[[Chance, Any], Any]:
    def computed(self: Chance, other: Any) -> Any:
        if not isinstance(other, int | float | np.number):
            raise refused()
        return Chance(compute(other, self._value) if turned else compute(self._value, other))

    return computed


_NEVER = (
    "float int index bool complex trunc round floor ceil neg pos abs eq ne hash array format "
    "pow rpow mod rmod floordiv rfloordiv divmod rdivmod matmul rmatmul"
)
for _name in _NEVER.split():
    setattr(Chance, f"__{_name}__", _never)
for _name in ("lt", "le", "gt", "ge"):
    setattr(Chance, f"__{_name}__", _comparison(getattr(operator, _name)))
for _name in ("add", "sub", "mul", "truediv"):
    setattr(Chance, f"__{_name}__", _arithmetic(getattr(operator, _name)))
    setattr(Chance, f"__r{_name}__", _arithmetic(getattr(operator, _name), turned=True))
