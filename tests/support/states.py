"""Generator of modules with Python state: its type, place, direction and period, and when it decides what is computed."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from enum import Enum
from fractions import Fraction
from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn


class Phase(Enum):
    """A state of few values, beside the number that decides about it."""

    EARLY, LATE = range(2)


class Form(NamedTuple):
    """A state, how a call moves it, and the number of calls that it has seen."""

    begin: Callable[[], Any]
    move: Callable[[Any], Any]
    calls: Callable[[Any], int]


def _moved_in_place(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def move(state: Any) -> Any:
        change(state)
        return state

    return move


def _add(state: Any) -> None:
    state[0] += 1


def _count(state: Any) -> None:
    state.step = getattr(state, "step", 0) + 1


_OBJECTS = (SimpleNamespace, argparse.Namespace)
FORMS: dict[str, Form] = {
    "int": Form(int, lambda state: state + 1, int),
    "down": Form(lambda: 0, lambda state: state - 1, lambda state: -state),
    "decay": Form(lambda: 1.0, lambda state: state * 0.5, lambda state: round(-np.log2(state))),
    "fraction": Form(Fraction, lambda state: state + 1, int),
    "numpy": Form(lambda: np.int64(0), lambda state: state + 1, int),
    "array": Form(lambda: np.zeros(2), _moved_in_place(_add), lambda state: int(state[0])),
    "list": Form(list, lambda state: [*state, 1], len),
    "appended": Form(list, _moved_in_place(lambda state: state.append(1)), len),
    "number in a list": Form(lambda: [0], _moved_in_place(_add), lambda state: state[0]),
    "tuple": Form(lambda: (0, "x"), lambda state: (state[0] + 1, "x"), lambda state: state[0]),
    "set": Form(set, _moved_in_place(lambda state: state.add(len(state))), len),
    "dict": Form(dict, _moved_in_place(lambda state: state.update({len(state): 1})), len),
    "text": Form(str, lambda state: f"{state}x", len),
    "bytearray": Form(bytearray, _moved_in_place(lambda state: state.append(1)), len),
    "phase": Form(
        lambda: (Phase.EARLY, 0),
        lambda state: (Phase.LATE, state[1] + 1),
        lambda state: state[1] if state[0] is Phase.LATE else 0,
    ),
    "iterator": Form(itertools.count, _moved_in_place(next), lambda state: state.__reduce__()[1][0]),
    **{
        kind.__name__: Form(kind, _moved_in_place(_count), lambda state: getattr(state, "step", 0))
        for kind in _OBJECTS
    },
}
HOLDERS = ("attribute", "class", "object", "closure")
PLACES = ("forward", "backward hook", "gradient hook", "function")


class Holder:
    """Object of the user's that holds a state."""

    held: Any = None


def _closed(form: Form) -> Callable[[], int]:
    held = form.begin()

    def calls() -> int:
        nonlocal held
        held = form.move(held)
        return form.calls(held)

    return calls


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, module: Stateful) -> Tensor:
        ctx.module = module
        return h.view_as(h)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.module.advance(), None


class Stateful(nn.Module):
    """Two layers, and a state that moves in each call and scales the hidden layer or a gradient.

    Args:
        form: the state.
        holder: what holds it.
        place: code that moves and reads it.
        late: returns the factor after a number of calls.
    """

    held: Any = None

    def __init__(self, form: Form, holder: str, place: str, late: Callable[[int], float]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)
        self.form, self.holder, self.place, self.late = form, holder, place, late
        self.box, self.factor = Holder(), 1.0
        if holder == "closure":
            self.closed = _closed(form)
        else:
            self._target().held = form.begin()
        if place == "backward hook":
            self.first.register_full_backward_hook(lambda *_: setattr(self, "factor", self.advance()))
        elif place == "gradient hook":
            self.first.weight.register_hook(lambda gradient: gradient * self.advance())

    def _target(self) -> Any:
        return {"attribute": self, "class": type(self), "object": self.box}[self.holder]

    def advance(self) -> float:
        """Move the state and return the factor."""
        if self.holder == "closure":
            return self.late(self.closed())
        target = self._target()
        target.held = self.form.move(target.held)
        return self.late(self.form.calls(target.held))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        if self.place == "function":
            h = _Scaled.apply(h, self)  # type: ignore[no-untyped-call]
        elif self.place != "gradient hook":
            h = h * (self.advance() if self.place == "forward" else self.factor)
        out: Tensor = self.second(h)
        return out


def stateful(seed: int) -> tuple[str, Stateful, bool]:
    """Return what is drawn for ``seed``, its module, and whether the state decides; that of odd seeds is only logged."""
    random = Random(seed)
    name = random.choice([*FORMS])
    holder, place, when = (
        random.choice(HOLDERS),
        random.choice(PLACES),
        random.choice(["from", "window", "every"]),
    )
    at, length = random.randrange(4, 61), random.randrange(1, 20)
    begins: dict[str, Callable[[int], bool]] = {
        "from": lambda calls: calls >= at,
        "window": lambda calls: at <= calls < at + length,
        "every": lambda calls: calls % at == 0 and calls > 0,
    }
    is_late = begins[when] if seed % 2 == 0 else lambda calls: False
    torch.manual_seed(seed)
    module = Stateful(FORMS[name], holder, place, lambda calls: 0.1 if is_late(calls) else 1.0)
    return f"{name} in {holder}, {place}, {when} {at}", module, seed % 2 == 0
