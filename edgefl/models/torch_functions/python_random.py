"""Replacement of Python's and numpy's random generators in the thread that traces a model.

A number that they draw would be a constant of the graph. In the tracing thread, a uniform number is therefore a
:class:`DrawnNumber`: the middle of its range. A comparison with it gives the more likely answer and warns, so a layer
that is skipped at random stays in the graph. Any other draw or use raises ModelError. Other threads draw as usual.
"""

from __future__ import annotations

import operator
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import BuiltinMethodType, MethodType
from typing import Any

import numpy as np
from torch import nn

from edgefl.errors import ModelError
from edgefl.models.python_state.references import StateSearch
from edgefl.models.torch_functions.patches import ThreadPatch
from edgefl.models.user_code import at_line

_GENERATORS = (random.Random, np.random.RandomState, np.random.Generator)
_UNIFORM = frozenset({"random", "rand", "random_sample", "sample", "ranf"})
_OTHER = frozenset({"getstate", "get_state", "spawn", "bit_generator"})
_SEEDING = frozenset({"seed", "setstate", "set_state"})
_NUMPY: Any = np.random.mtrand
_PYTHON: Any = random


def warn_of_path(answer: bool) -> None:
    """Warn that a random number decides a branch in Python.

    Args:
        answer: Value of the condition on the path that the graph takes.
    """
    warnings.warn(
        f"a random number steers Python{at_line()}, such as to leave out a layer now and then; a graph takes the same "
        f"path in every step, and this one takes that where the condition is {answer}",
        stacklevel=3,
    )


def number_error() -> ModelError:
    """Return the ModelError for code that computes with numbers drawn by Python or numpy."""
    return ModelError(
        f"the model draws by Python's or numpy's generator while it trains{at_line()}: a graph would have the same numbers "
        "in every step. Draw with torch, such as torch.rand",
        chance=True,
        refused=True,
    )


def _seed_error() -> ModelError:
    """Return the ModelError for code that seeds a generator in forward, so that each step draws the same numbers."""
    return ModelError(
        f"the model seeds Python's or numpy's generator while it trains{at_line()}, and so draws the same numbers in every "
        "step. Draw them once in __init__ and keep them by register_buffer, or draw new ones with torch, such as torch.rand",
        chance=True,
        refused=True,
        seeded=True,
    )


class DrawnNumber:
    """Placeholder of a random number. It supports comparison, +, -, * and / with numbers; any other use
    raises ModelError.
    """

    __slots__ = ("_value",)
    __array_ufunc__ = None  # so that numpy's numbers leave operations with it to it

    def __init__(self, value: float) -> None:
        self._value = value


def _refuse(self: DrawnNumber, *others: Any) -> Any:
    """Raise ModelError, because the code uses a drawn number in a way that is not supported."""
    raise number_error()


def _comparison(compare: Callable[[float, Any], bool]) -> Callable[[DrawnNumber, Any], Any]:
    """Return a comparison method of :class:`DrawnNumber`, which warns about the branch that it decides.

    ``compare`` compares the middle of the number's range with the other number.
    """

    def compared(self: DrawnNumber, other: Any) -> Any:
        if not _is_number(other):
            raise number_error()
        answer = bool(compare(self._value, other))
        warn_of_path(answer)
        return answer

    return compared


def _arithmetic(
    compute: Callable[[Any, Any], float], *, reflected: bool = False
) -> Callable[[DrawnNumber, Any], Any]:
    """Return an arithmetic method of :class:`DrawnNumber`, whose result is a :class:`DrawnNumber`.

    Args:
        compute: Function of two numbers.
        reflected: True if the other number is the first operand, as in ``__radd__``.
    """

    def computed(self: DrawnNumber, other: Any) -> Any:
        if not _is_number(other):
            raise number_error()
        return DrawnNumber(compute(other, self._value) if reflected else compute(self._value, other))

    return computed


_REFUSED = (
    "float int index bool complex trunc round floor ceil neg pos abs eq ne hash array format "
    "pow rpow mod rmod floordiv rfloordiv divmod rdivmod matmul rmatmul"
)
for _name in _REFUSED.split():
    setattr(DrawnNumber, f"__{_name}__", _refuse)
for _name in ("lt", "le", "gt", "ge"):
    setattr(DrawnNumber, f"__{_name}__", _comparison(getattr(operator, _name)))
for _name in ("add", "sub", "mul", "truediv"):
    setattr(DrawnNumber, f"__{_name}__", _arithmetic(getattr(operator, _name)))
    setattr(DrawnNumber, f"__r{_name}__", _arithmetic(getattr(operator, _name), reflected=True))

functions_patch = ThreadPatch()
"""In this context, draws of the thread by functions of ``random`` and ``numpy.random`` return a DrawnNumber or raise
ModelError."""


class TracedGenerator:
    """Wrapper of a generator of Python or numpy. ``isinstance`` treats it as the original.

    In the thread that traces a model, a uniform draw returns a :class:`DrawnNumber`, and any other draw raises ModelError.
    """

    def __init__(self, original: Any) -> None:
        self._original = original

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        kind: type = type(self._original)
        return kind

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._original, name)
        if name.startswith("_") or name in _OTHER or not callable(value):
            return value
        return _traced_draw(value, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._original.__reduce_ex__(protocol)


def _traced_draw(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a function that calls ``original`` in other threads.

    In the tracing thread it returns a :class:`DrawnNumber` for a uniform number, and raises ModelError for anything
    else.

    Args:
        original: Function or method that draws.
        name: Its name.
    """

    def draw(*arguments: Any, **named: Any) -> Any:
        if not named and not arguments and name in (*_UNIFORM, "uniform"):
            return DrawnNumber(0.5)
        if not named and name == "uniform" and len(arguments) == 2 and all(map(_is_number, arguments)):
            return DrawnNumber(sum(arguments) / 2)
        raise _seed_error() if name in _SEEDING else number_error()

    return functions_patch.dispatch(original, draw)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | np.number)


_default_rng = np.random.default_rng


def _traced_default_rng(seed: Any = None) -> Any:
    """Return the result of ``numpy.random.default_rng``, wrapped in a :class:`TracedGenerator` if there is no seed."""
    # A generator with a seed repeats its numbers in each step, as a graph does; one without draws new ones.
    return TracedGenerator(_default_rng()) if seed is None else _default_rng(seed)


def _replacements() -> Iterator[tuple[Any, str, Any]]:
    """Yield (owner, name, replacement) of each function and generator of ``random`` and ``numpy.random`` that draws."""
    for package, generator in ((_PYTHON, _PYTHON._inst), (np.random, _NUMPY._rand)):
        for name, value in vars(package).items():
            if getattr(value, "__self__", None) is generator and name not in _OTHER:
                yield package, name, _traced_draw(value, name)
    for name in ("sample", "ranf"):
        yield np.random, name, _traced_draw(getattr(np.random, name), name)
    yield np.random, "default_rng", functions_patch.dispatch(_default_rng, _traced_default_rng)
    # Objects that other libraries draw from, such as scipy.
    yield _PYTHON, "_inst", TracedGenerator(_PYTHON._inst)
    yield _NUMPY, "_rand", TracedGenerator(_NUMPY._rand)


# By the identity of the originals, which code may have imported by name.
_REPLACED_FUNCTIONS: dict[int, Any] = {}
for _owner, _name, _value in list(_replacements()):
    _REPLACED_FUNCTIONS[id(getattr(_owner, _name))] = _value
    functions_patch.replace(_owner, _name, _value)


@contextmanager
def patched_generators(module: nn.Module) -> Iterator[None]:
    """Replace Python's and numpy's random generators for the ``with`` block, in this thread.

    It enters :data:`functions_patch`, and also replaces the generators and functions that the code of ``module``
    refers to.
    """
    with functions_patch():
        replaced = [
            (container, key, value, replacement)
            for container in StateSearch(module).containers
            for key, value in container.read().items()
            if (replacement := _replacement_of(value)) is not value
        ]
        try:
            for container, key, _, replacement in replaced:
                container.write(key, replacement)
            yield
        finally:
            for container, key, value, replacement in replaced:
                if container.read().get(key) is replacement:
                    container.write(key, value)


def _replacement_of(value: Any) -> Any:
    """Return the replacement of a generator, or of a function that draws, also inside of a partial, staticmethod or tuple.

    Any other value is returned itself.
    """
    kind: Any = type(value)
    if issubclass(kind, _GENERATORS):
        return TracedGenerator(value)
    if issubclass(kind, MethodType | BuiltinMethodType) and issubclass(type(value.__self__), _GENERATORS):
        return _REPLACED_FUNCTIONS.get(id(value)) or (
            value if value.__name__ in _OTHER else _traced_draw(value, value.__name__)
        )
    parts: tuple[Any, ...] = ()
    if kind is partial:
        parts = (value.func, *value.args)
    elif kind is staticmethod:
        parts = (value.__func__,)
    elif kind is tuple:
        parts = value
    replaced: list[Any] = [*map(_replacement_of, parts)]
    if all(a is b for a, b in zip(replaced, parts, strict=True)):
        return _REPLACED_FUNCTIONS.get(id(value), value)
    if kind is partial:
        return partial(replaced[0], *replaced[1:], **value.keywords)
    return tuple(replaced) if kind is tuple else staticmethod(replaced[0])
