"""Python branches of a model's code that ask for values which no graph has: chance, and whether a mask hides anything.

A graph is one path through the code, the same in every step. Code that leaves out a layer where a random number says so
(layer drop), or skips the work of a mask that is all ones, has two. While :class:`Steered` is on, such a question has one
answer: the likelier of two by chance, told once as a warning; and that a mask hides something, which is right for every
mask, because the code then applies it.
"""

from __future__ import annotations

import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from edgefl.models.draws.chance import Chance, refused, tell_path
from edgefl.models.draws.generators import middled
from edgefl.models.draws.known import Known
from edgefl.models.layers.torch_recurrent import recurring
from edgefl.models.packed import padded
from edgefl.models.rewritten import RULES as REWRITTEN
from edgefl.models.swapped import Swap, heeding
from edgefl.system.lazy_modules import is_unused

_KEPT = "edgefl_grad_enabled"


def _enter(self: Any) -> None:
    # One object may be entered again inside of itself, as a decorator of a recursive function is.
    self.__dict__.setdefault(_KEPT, []).append(torch.is_grad_enabled())
    torch._C._set_grad_enabled(not self.mode)


def _leave(self: Any, *raised: Any) -> None:
    torch._C._set_grad_enabled(self.__dict__[_KEPT].pop())


_mode = torch.inference_mode
as_no_grad: Swap = Swap(
    (_mode, "__enter__", heeding(lambda: as_no_grad, _mode.__enter__, _enter)),
    (_mode, "__exit__", heeding(lambda: as_no_grad, _mode.__exit__, _leave)),
)
"""Inside, this thread's ``torch.inference_mode`` only switches gradients off."""


# The middle of what a draw may be: it lies on the likelier side of every threshold.
_MIDDLE = 0.5
_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    **dict.fromkeys(("lt", "less", "__lt__"), lambda a, b: a < b),
    **dict.fromkeys(("le", "less_equal", "__le__"), lambda a, b: a <= b),
    **dict.fromkeys(("gt", "greater", "__gt__"), lambda a, b: a > b),
    **dict.fromkeys(("ge", "greater_equal", "__ge__"), lambda a, b: a >= b),
}


class OnePath(TorchFunctionMode):
    """Mode in which a comparison of one drawn number steers Python as most draws would: a layer is never left out."""

    def __init__(self) -> None:
        super().__init__()
        self._drawn: Any = WeakTensorKeyDictionary()
        self._answers: Any = WeakTensorKeyDictionary()
        self._entered: list[ExitStack] = []

    def __enter__(self) -> Self:
        self._entered.append(ExitStack())
        self._entered[-1].enter_context(middled())
        if "torch._dynamo" in sys.modules and not is_unused("torch._dynamo"):
            # It would compile code of ours, and set the state of Python's generator at each compilation.
            self._entered[-1].enter_context(torch.compiler.set_stance("force_eager"))
        self._prepare(self._entered[-1])
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def _prepare(self, entered: ExitStack) -> None:
        """Enter what else is on meanwhile."""

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._entered.pop().close()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if any(_by_chance(each) for each in (*args, *kwargs.values())):
            raise refused()
        if (value := self._constant(name, args)) is not NotImplemented:
            return value
        if name == "__bool__" and args[0] in self._answers:
            return self._answer(args[0])
        result = self._run(func, name, args, kwargs)
        if isinstance(result, Tensor) and all(type(size) is int and size == 1 for size in result.shape):
            self._note(name, args, result)
        return result

    def _constant(self, name: str, args: Any) -> Any:
        """Return the Python value of a tensor that is the same for every input, or NotImplemented."""
        return NotImplemented

    def _run(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        return self._called(func, name, args, kwargs)

    def _called(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)

    def _note(self, name: str, args: Any, result: Tensor) -> None:
        if name == "rand":
            self._drawn[result] = True
        elif name in _COMPARISONS and any(isinstance(arg, Tensor) and arg in self._drawn for arg in args):
            sides = [_MIDDLE if isinstance(arg, Tensor) and arg in self._drawn else arg for arg in args[:2]]
            if not any(isinstance(side, Tensor) for side in sides):
                self._answers[result] = _COMPARISONS[name](*sides)

    def _answer(self, asked: Tensor) -> bool:
        answer = self._answers[asked]
        tell_path(answer)
        return bool(answer)


class Steered(OnePath):
    """Mode in which a module can be traced.

    ``mask.all()`` is false where its value is unknown. Functions without a form are rewritten
    (:mod:`edgefl.models.rewritten`), and torch's transformer layers do in inference what they do in training: their fused
    kernels and nested tensors have no graph. Packed sequences are padded ones (:mod:`edgefl.models.packed`), tensors that
    are made of constants have values (:mod:`edgefl.models.draws.known`), and inference mode only switches gradients off.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known = Known()

    def know(self, tensor: Tensor, values: Tensor) -> None:
        """Answer questions for the values of ``tensor``, which has none, from ``values``."""
        self._known.add(tensor, values)

    def _prepare(self, entered: ExitStack) -> None:
        entered.enter_context(padded())
        entered.enter_context(recurring())
        entered.enter_context(as_no_grad())
        entered.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)

    def _constant(self, name: str, args: Any) -> Any:
        return self._known.answer(name, args)

    def _run(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        if func is Tensor.register_hook and not args[0].requires_grad:
            return RemovableHandle(OrderedDict())  # in inference there is no gradient to change
        if func is Tensor.requires_grad_ and _is_traced():
            return args[0]  # gradients of weights are the same, and code that asks for others calls autograd
        args = self._known.numbers(name, args)
        if (rule := REWRITTEN.get(func)) is not None:
            with self:  # for the draws of the rule itself
                rewritten = rule(*args, **kwargs)
            if rewritten is not NotImplemented:
                return rewritten
        if name in ("cpu", "to") and args[0].is_meta and _to_cpu(name, args, kwargs):
            # It has no values to take there.
            dtypes = [each for each in (*args[1:], *kwargs.values()) if isinstance(each, torch.dtype)]
            return args[0].to(*dtypes) if dtypes else args[0]
        result = self._called(func, name, args, kwargs)
        self._known.note(func, name, args, kwargs, result)
        return result

    def _note(self, name: str, args: Any, result: Tensor) -> None:
        super()._note(name, args, result)
        if name == "all" and args and not args[0].is_floating_point():
            self._answers[result] = None

    def _answer(self, asked: Tensor) -> bool:
        return _value(asked) if self._answers[asked] is None else super()._answer(asked)


def _is_traced() -> bool:
    """Return True inside of a transform of torch.func that is not one of the gradients of the user's own code."""
    return (
        torch._C._are_functorch_transforms_active()
        and not torch._C._functorch.get_inplace_requires_grad_allowed()
    )


def _to_cpu(name: str, args: Any, kwargs: Any) -> bool:
    where = args[1] if len(args) > 1 else kwargs.get("device")
    return name == "cpu" or (isinstance(where, str | torch.device) and torch.device(where).type == "cpu")


def _value(asked: Tensor) -> bool:
    """The truth of ``asked`` where a value is at hand that is the same for all inputs; else False."""
    if asked.is_meta or torch.compiler.is_exporting():
        return False
    try:
        return bool(asked)
    except Exception:  # every tracer has an exception of its own
        return False


def _by_chance(value: Any) -> bool:
    """Whether an argument is a number of Python's or numpy's generator, or a list with one."""
    return type(value) is Chance or (isinstance(value, list | tuple) and any(map(_by_chance, value)))


def without_masking(module: nn.Module) -> None:
    """Switch off what the configurations in ``module`` call SpecAugment, in place: it draws in Python, by numpy."""
    for part in module.modules():
        config = part.__dict__.get("config")
        rates = [getattr(config, name, 0.0) or 0.0 for name in ("mask_time_prob", "mask_feature_prob")]
        if config is not None and any(rates) and getattr(config, "apply_spec_augment", True):
            config.apply_spec_augment = False
            warnings.warn(
                f"SpecAugment of {type(part).__name__} is off (apply_spec_augment): it chooses what to hide in Python, and "
                "a graph would hide the same in every step",
                stacklevel=2,
            )


def without_dispatch(module: nn.Module) -> None:
    """Let mixtures of experts in ``module`` read the weights of each row's experts, in place: how many rows an expert has
    depends on values, and the ways that gather an expert's rows first have no graph."""
    for part in module.modules():
        config: Any = part.__dict__.get("config")
        if getattr(config, "_experts_implementation", None) and hasattr(part, "_is_expert_parallel"):
            config._experts_implementation = "batched_mm"  # transformers' name for that
