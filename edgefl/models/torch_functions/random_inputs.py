"""Random numbers of a model as inputs, instead of draws from torch's generator.

Every random number of a forward pass is drawn by a function of torch, which the model's code or a torch layer calls:
``F.dropout``, ``torch.rand_like``, attention with ``dropout_p``. In :class:`RandomInputMode` these functions compute
their result from given numbers. So the model's code need not change::

    ports = random_inputs(module, weights, x)             # of a training pass: {"head.dropout.uniform": (4, 8)}
    with RandomInputMode.from_numbers(tuple(ports), numbers):
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
from edgefl.models.counters import counter_dtypes, round_counters
from edgefl.models.python_state.snapshots import move_to_meta, restored_state
from edgefl.models.torch_functions.control_flow import SinglePathMode, TraceableMode
from edgefl.models.torch_functions.layouts import on_meta_device
from edgefl.models.torch_functions.python_random import patched_generators
from edgefl.models.torch_functions.random_ops import RULES, Draw

_IN_PYTHON = ("torch.nn.functional", "torch.nn.init")
_ASKING = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


class RandomInputMode(TraceableMode):
    """Mode in which random functions of torch take their numbers from ``draw``, in the order of the calls.

    Args:
        draw: Function that returns numbers of a shape, uniform in [0, 1).
    """

    def __init__(self, draw: Draw) -> None:
        super().__init__()
        self._draw = draw

    @classmethod
    def from_numbers(cls, names: Sequence[str], numbers: Mapping[str, Tensor]) -> RandomInputMode:
        """Return a mode whose draws read ``numbers``, in the order of ``names``.

        In the mode, a draw with another shape than its number, or one draw too many, raises ModelError.

        Args:
            names: Names of the draws, in their order.
            numbers: Uniform numbers of each draw, by name.
        """
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


def call_with_draws(mode: SinglePathMode, draw: Draw, func: Any, args: Any, kwargs: Any) -> Any:
    """Call a function of torch with random numbers from ``draw``.

    Args:
        mode: Mode that handles the functions which ``func`` calls.
        draw: Function that returns numbers of a shape, uniform in [0, 1).
        func: Function of torch.
        args: Positional arguments.
        kwargs: Keyword arguments.

    Returns:
        The result of the function. If no rule replaces its random numbers, it draws from torch's generator.
    """
    if (body := _body(func)) is not None:
        with mode:
            return body(*args, **kwargs)
    rule = RULES.get(getattr(func, "__name__", ""))
    result = NotImplemented if rule is None else rule(draw, *args, **kwargs)
    return func(*args, **kwargs) if result is NotImplemented else result


@cache
def _body(func: Any) -> FunctionType | None:
    """Return a copy of a torch function that does not dispatch to modes, so that modes see the functions that it calls.

    Returns None unless ``func`` is written in Python in ``torch.nn.functional`` or ``torch.nn.init``.
    """
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


def random_inputs(
    module: nn.Module, weights: Mapping[str, TensorSpec], x: TensorSpec
) -> dict[str, TensorSpec]:
    """Return the random numbers that a module draws in its current mode, as specs by name, in order.

    Runs it without values.

    If the run fails, the result has the draws until then, because the next run of the module reports the error better.

    Args:
        module: Module.
        weights: Specs of its state by name.
        x: Spec of a batch of its input.

    Returns:
        Spec of each draw by name. The name is the path of the innermost submodule that draws and ``uniform``, with a
        number from its second draw on.

    Raises:
        ModelError: The module draws by Python's or numpy's generator, so a graph would have the same numbers in every
            step.
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

    with on_meta_device():
        tensors = {name: torch.empty(spec.shape, dtype=spec.dtype) for name, spec in weights.items()}
        tensors |= round_counters(tensors, counter_dtypes(module))
        mode = RandomInputMode(draw)
        try:
            with _paths(module, running), patched_generators(module), restored_state(module) as held, mode:
                for tensor, original in move_to_meta(held):
                    mode.set_values(tensor, original)
                torch.func.functional_call(module, tensors, (torch.empty(x.shape, dtype=x.dtype),))
        except ModelError as error:
            if error.details.get("chance"):
                raise
        except Exception:  # the next run reports it
            pass
    return ports


@contextmanager
def _paths(root: nn.Module, running: list[tuple[nn.Module, str]]) -> Iterator[None]:
    """Keep ``running`` up to date in the ``with`` block: the submodules of ``root`` that run now, each as (module, path).

    The outermost module is first.
    """
    paths: dict[int, list[str]] = {}
    for path, module in root.named_modules(remove_duplicate=False):
        paths.setdefault(id(module), []).append(path)

    def enter(module: nn.Module, _args: Any) -> None:
        caller = running[-1][1] if running else ""
        known = paths.get(id(module), [caller])
        # A module under several names has the one by which its caller knows it.
        own = next((path for path in known if not caller or path.startswith(f"{caller}.")), known[0])
        running.append((module, own))

    def leave(_module: nn.Module, _args: Any, _out: Any) -> None:
        running.pop()

    hooks = (register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
