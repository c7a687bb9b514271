"""Running a model so that what it draws is read from elsewhere than from torch's generator.

Every random number of a forward comes out of a function of torch, called by the model's code or by a layer of torch's:
``F.dropout``, ``torch.rand_like``, attention with ``dropout_p``. While :class:`Reading` is on, these compute the same
from numbers that are given to it. So a draw may stand anywhere, in code that nobody here knows, and the model stays what
its author wrote::

    ports = drawn(module, weights, x)                     # what a training pass draws: {"head.dropout.uniform": (4, 8)}
    with Reading.of(tuple(ports), numbers):
        out = functional_call(module, tensors, (x,))      # from numbers["head.dropout.uniform"]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from edgefl.contract.tensors import TensorSpec
from edgefl.errors import ModelError
from edgefl.models.caches import forgotten, move_to_meta
from edgefl.models.counters import as_integers, counters
from edgefl.models.draws.generators import watched
from edgefl.models.draws.rules import RULES, Draw
from edgefl.models.draws.steering import OnePath, Steered
from edgefl.models.layers.layouts import nowhere

_IN_PYTHON = ("torch.nn.functional", "torch.nn.init")
_ASKING = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


class Reading(Steered):
    """While it is on, functions that draw get their numbers, uniform in [0, 1), from ``draw``, in the order of calls."""

    def __init__(self, draw: Draw) -> None:
        super().__init__()
        self._draw = draw

    @classmethod
    def of(cls, names: Sequence[str], numbers: Mapping[str, Tensor]) -> Reading:
        """The first draw reads ``numbers[names[0]]``, and so on. ModelError for one that does not fit or has no number."""
        waiting = iter(names)

        def draw(shape: Sequence[int]) -> Tensor:
            name = next(waiting, None)
            if name is None or tuple(numbers[name].shape) != tuple(shape):
                raise ModelError(
                    f"a training pass draws other random numbers than when its inputs were counted: {tuple(shape)} at "
                    f"{name or 'the end'}; what a model draws must depend on the shape of its input alone",
                    name=name,
                )
            return numbers[name]

        return cls(draw)

    def _called(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        return call_with_draws(self, self._draw, func, args, kwargs)


def call_with_draws(mode: OnePath, draw: Draw, func: Any, args: Any, kwargs: Any) -> Any:
    """Call a function of torch, which gets the numbers that it draws from ``draw``; ``mode`` handles what it calls."""
    if (body := _body(func)) is not None:
        with mode:
            return body(*args, **kwargs)
    rule = RULES.get(getattr(func, "__name__", ""))
    result = NotImplemented if rule is None else rule(draw, *args, **kwargs)
    return func(*args, **kwargs) if result is NotImplemented else result


@cache
def _body(func: Any) -> FunctionType | None:
    """``func``, written in Python in ``torch.nn.functional`` or ``torch.nn.init``, as a function that a mode is not asked
    about: but about what it calls. None for all others."""
    if not isinstance(func, FunctionType) or func.__module__ not in _IN_PYTHON:
        return None
    if not set(_ASKING) & set(func.__code__.co_names):
        return None
    never = dict.fromkeys(_ASKING, lambda *_: False)
    overrides = SimpleNamespace(**vars(torch.overrides) | never)
    names = func.__globals__ | never | {"torch": SimpleNamespace(**vars(torch) | {"overrides": overrides})}
    body = FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    body.__kwdefaults__ = func.__kwdefaults__
    return body


def drawn(module: nn.Module, weights: Mapping[str, TensorSpec], x: TensorSpec) -> dict[str, TensorSpec]:
    """What ``module`` draws, in its present mode, for the input ``x`` with its state ``weights``: in order, by name.

    A name is the path of the innermost submodule that draws, and ``uniform``, with a number behind it from the second draw
    there on. Found by a run without values. One that fails tells what it saw until then: whoever runs the module next
    meets the failure. ModelError if it draws by Python's or numpy's generator: a graph would hold the same numbers forever.
    """
    ports: dict[str, TensorSpec] = {}
    running: list[tuple[nn.Module, str]] = []

    def draw(shape: Sequence[int]) -> Tensor:
        path = running[-1][1] if running else ""
        start = f"{path}.uniform" if path else "uniform"
        name, number = start, 0
        while name in ports:
            number += 1
            name = f"{start}_{number}"
        ports[name] = TensorSpec(tuple(shape))
        return torch.empty(tuple(shape))

    with nowhere():
        tensors = {name: torch.empty(spec.shape, dtype=spec.dtype) for name, spec in weights.items()}
        tensors |= as_integers(tensors, counters(module))
        reading = Reading(draw)
        try:
            with _paths(module, running), watched(module), forgotten(module) as held, reading:
                for tensor, original in move_to_meta(held):
                    reading.know(tensor, original)
                torch.func.functional_call(module, tensors, (torch.empty(x.shape, dtype=x.dtype),))
        except ModelError as error:
            if error.details.get("chance"):
                raise
        except Exception:  # whoever runs the module next meets it
            pass
    return ports


@contextmanager
def _paths(root: nn.Module, running: list[tuple[nn.Module, str]]) -> Iterator[None]:
    """Keep in ``running`` the submodules of ``root`` that run, outermost first, each with its path from there."""
    paths: dict[int, list[str]] = {}
    for path, module in root.named_modules(remove_duplicate=False):
        paths.setdefault(id(module), []).append(path)

    def enter(module: nn.Module, _args: Any) -> None:
        caller = running[-1][1] if running else ""
        known = paths.get(id(module), [caller])
        # One module under several names goes by that which its caller has for it.
        own = next((path for path in known if not caller or path.startswith(f"{caller}.")), known[0])
        running.append((module, own))

    def leave(_module: nn.Module, _args: Any, _out: Any) -> None:
        running.pop()

    hooks = (
        register_module_forward_pre_hook(enter),
        register_module_forward_hook(leave, always_call=True),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
