"""Control flow of a model's code that depends on values which no graph has: random numbers, masks, and constants.

A graph is one path through the code, the same in every step. Code that skips a layer by a random number (layer drop),
or skips the work of a mask that is all ones, has two paths. :class:`TraceableMode` chooses one of them. For a random
number it is the more likely one, with a warning. For a mask it is the one that applies the mask, which is correct for
every mask.

Code also reads numbers of tensors that it has just made of constants: ``torch.linspace(0, 1, 5).tolist()``, a length as
``torch.tensor(16)``, or a test for the causal mask. :class:`ConstantValues` computes them by the same calls on real
tensors.
"""

from __future__ import annotations

import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from edgefl.models.torch_functions.patches import ThreadPatch
from edgefl.models.torch_functions.python_random import (
    DrawnNumber,
    functions_patch,
    number_error,
    warn_of_path,
)
from edgefl.models.torch_functions.random_ops import RULES
from edgefl.models.torch_functions.recurrent import padding, recurring
from edgefl.models.torch_functions.rules import RULES as REWRITTEN
from edgefl.system.lazy_modules import is_unused

_FACTORIES = frozenset(
    {"tensor", "as_tensor", "scalar_tensor", "arange", "linspace", "logspace", "zeros", "ones", "full", "eye"}
    | {"tril_indices", "triu_indices"}
)
_PYTHON_VALUES = frozenset({"item", "tolist", "__bool__", "__int__", "__float__", "__index__"})
_READING_NUMBERS = frozenset({"clamp", "clip", "clamp_", "arange", "linspace"})
_WRITING = frozenset({"__setitem__", "__set__"}) | {
    f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
}
# Code asks for the values of small tensors only; larger ones would cost time and memory.
_ENTRIES = 1 << 16


class ConstantValues:
    """Values of the tensors that do not depend on the input, while a model runs on tensors without values.

    A mode reports each call to :meth:`update`. If all arguments of a call are constants, the same call on their values
    computes the value of its result.
    """

    def __init__(self) -> None:
        self._values: Any = WeakTensorKeyDictionary()

    def python_value(self, name: str, args: Any) -> Any:
        """Return the Python value that the tensor method ``name``, such as ``item``, reads from the constant ``args[0]``.

        Returns NotImplemented if ``name`` is no such method, or the value of the tensor is unknown.
        """
        if name in _PYTHON_VALUES and isinstance(args[0], Tensor) and args[0] in self._values:
            with _plain_torch():
                return getattr(self._values[args[0]], name)()
        return NotImplemented

    def add(self, tensor: Tensor, values: Tensor) -> None:
        """Register a constant ``tensor``, which has no values itself, with its ``values``. Large tensors are ignored."""
        if _is_small(values):
            self._values[tensor] = values

    def update(self, func: Any, name: str, args: Any, kwargs: Any, result: Any) -> None:
        """Record a call. If all arguments are constants, compute and store the values of its results.

        Values that the call may have overwritten are forgotten, unless they could be computed.

        Args:
            func: Function that was called.
            name: Its name.
            args: Positional arguments.
            kwargs: Keyword arguments.
            result: Result without values.
        """
        written = writes(name, kwargs)
        results = [each for each in pytree.tree_leaves(result) if isinstance(each, Tensor)]
        known = name in _FACTORIES or any(each in self._values for each in _tensors(args, kwargs))
        inputs = (
            self._values_of(args, kwargs) if known and (written or results) and name not in RULES else None
        )
        if inputs is None or not all(map(_is_small, results)):
            if written and self._values:
                self._forget(_tensors(args, kwargs))
            return
        with _plain_torch(), torch.no_grad(), _NoRandomOpsMode():  # type: ignore[no-untyped-call]
            try:
                outputs = pytree.tree_leaves(func(*inputs[0], **inputs[1]))
            except Exception:  # a device without values, or a random number
                if written:
                    self._forget(_tensors(args, kwargs))
                return
        for each, values in zip(
            results, (each for each in outputs if isinstance(each, Tensor)), strict=False
        ):
            if each.shape == values.shape:
                self._values[each] = values
            else:
                self._values.pop(each, None)

    def with_numbers(self, name: str, args: Any) -> Any:
        """Return the positional arguments ``args`` of the function ``name``, with constant tensors replaced by numbers.

        It does so where torch would read the numbers: in slices, ``clamp`` and ranges. Other arguments are unchanged.
        """
        if name in _READING_NUMBERS:
            return tuple(
                self._number(each) if place or name in _FACTORIES else each for place, each in enumerate(args)
            )
        if name not in ("__getitem__", "__setitem__"):
            return args
        index = args[1]
        parts = tuple(map(self._bounds, index)) if type(index) is tuple else self._bounds(index)
        return args[0], parts, *args[2:]

    def _bounds(self, part: object) -> object:
        if not isinstance(part, slice):
            return part
        bounds = (part.start, part.stop, part.step)
        if not any(isinstance(each, Tensor) for each in bounds):
            return part
        return slice(*map(self._number, bounds))

    def _number(self, value: object) -> object:
        if not isinstance(value, Tensor) or value.dim():
            return value
        number = self.python_value("item", (value,))
        return value if number is NotImplemented else number

    def _forget(self, written: Iterable[Tensor]) -> None:
        """Remove the values of all tensors that share memory with a tensor that a call may have written to."""
        memory = set(map(_memory, written))
        for each in [each for each in self._values if None in memory or _memory(each) in memory]:
            del self._values[each]

    def _values_of(self, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Return (args, kwargs) with values on the CPU instead of tensors without values.

        Return None if the value of a tensor or of a size is unknown.
        """
        leaves, spec = pytree.tree_flatten(
            (args, {**kwargs, "device": "cpu"} if "device" in kwargs else kwargs)
        )
        if any(isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool) for leaf in leaves):
            return None
        if any(isinstance(leaf, Tensor) and leaf not in self._values for leaf in leaves):
            return None
        values: tuple[Any, Any] = pytree.tree_unflatten(
            [self._values[leaf] if isinstance(leaf, Tensor) else _on_cpu(leaf) for leaf in leaves], spec
        )
        return values


class _NoRandomOpsMode(TorchDispatchMode):
    """Mode that raises at random operations. Their results are no constants, because each step draws other numbers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise RuntimeError(f"{func} draws")
        return func(*args, **(kwargs or {}))


def writes(name: str, kwargs: Any) -> bool:
    """Return True if the torch function or method ``name``, called with ``kwargs``, writes to an argument."""
    return (name.endswith("_") and not name.endswith("__")) or name in _WRITING or "out" in kwargs


def _on_cpu(leaf: object) -> object:
    return torch.device("cpu") if isinstance(leaf, torch.device) else leaf


def _is_small(tensor: Tensor) -> bool:
    """Return True if the tensor has a fixed shape and few enough entries to compute its values."""
    return all(type(size) is int for size in tensor.shape) and tensor.numel() <= _ENTRIES


@contextmanager
def _plain_torch() -> Iterator[None]:
    """Hide calls in the ``with`` block from all torch modes and from functorch transforms."""
    with torch._C.DisableTorchFunction(), _disable_current_modes(), temporarily_clear_interpreter_stack():
        yield


def _memory(tensor: Tensor) -> int | None:
    """Return a number that is equal for tensors that share memory, or None for a tensor without a storage."""
    with torch._C.DisableTorchFunction():
        while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            tensor = torch._C._functorch.get_unwrapped(tensor)
        try:
            address: int = tensor.untyped_storage()._cdata
        except (NotImplementedError, RuntimeError):
            return None
        return address


def _tensors(args: Any, kwargs: Any) -> Iterator[Tensor]:
    """Yield the tensors among the arguments, and those in lists and tuples among them, one level deep."""
    for each in (*args, *kwargs.values()):
        for part in each if isinstance(each, list | tuple) else (each,):
            if isinstance(part, Tensor):
                yield part


_KEPT = "edgefl_grad_enabled"


def _enter(self: Any) -> None:
    # One object may be entered again inside of itself, as a decorator of a recursive function is.
    self.__dict__.setdefault(_KEPT, []).append(torch.is_grad_enabled())
    torch._C._set_grad_enabled(not self.mode)


def _leave(self: Any, *raised: Any) -> None:
    torch._C._set_grad_enabled(self.__dict__[_KEPT].pop())


inference_as_no_grad = ThreadPatch()
"""In this context ``torch.inference_mode`` of the thread only disables gradients."""
inference_as_no_grad.replace_function(torch.inference_mode, "__enter__", _enter)
inference_as_no_grad.replace_function(torch.inference_mode, "__exit__", _leave)

# The middle of the range of a draw, which lies on the likelier side of every threshold.
_MIDDLE = 0.5
_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    **dict.fromkeys(("lt", "less", "__lt__"), lambda a, b: a < b),
    **dict.fromkeys(("le", "less_equal", "__le__"), lambda a, b: a <= b),
    **dict.fromkeys(("gt", "greater", "__gt__"), lambda a, b: a > b),
    **dict.fromkeys(("ge", "greater_equal", "__ge__"), lambda a, b: a >= b),
}


class SinglePathMode(TorchFunctionMode):
    """Mode in which a comparison of one random number gives the more likely answer in Python, and warns.

    So no layer is skipped at random, and a trace of the code has one path.
    """

    def __init__(self) -> None:
        super().__init__()
        # Numbers of torch.rand, and results of comparisons with them; None for a mask's all().
        self._drawn: Any = WeakTensorKeyDictionary()
        self._answers: Any = WeakTensorKeyDictionary()
        self._entered: list[ExitStack] = []

    def __enter__(self) -> Self:
        self._entered.append(ExitStack())
        self._entered[-1].enter_context(functions_patch())
        if "torch._dynamo" in sys.modules and not is_unused("torch._dynamo"):
            # It would compile code of ours, and set the state of Python's generator at each compilation.
            self._entered[-1].enter_context(torch.compiler.set_stance("force_eager"))
        self._prepare(self._entered[-1])
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def _prepare(self, entered: ExitStack) -> None:
        """Enter further contexts of the mode on the stack ``entered``. Does nothing here; subclasses override it."""

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._entered.pop().close()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if any(_has_drawn_number(each) for each in (*args, *kwargs.values())):
            raise number_error()
        if (value := self._constant(name, args)) is not NotImplemented:
            return value
        if name == "__bool__" and args[0] in self._answers:
            return self._answer(args[0])
        result = self._run(func, name, args, kwargs)
        if isinstance(result, Tensor) and all(type(size) is int and size == 1 for size in result.shape):
            self._note(name, args, result)
        return result

    def _constant(self, name: str, args: Any) -> Any:
        """Return the Python value that the tensor method ``name`` reads, if the tensor does not depend on the input.

        Otherwise return NotImplemented. For subclasses; always NotImplemented here.
        """
        return NotImplemented

    def _run(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Run the torch function ``func`` and return its result. Subclasses override this method to rewrite functions."""
        return self._called(func, name, args, kwargs)

    def _called(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Call the torch function ``func`` itself and return its result.

        Subclasses override this method to provide the random numbers of the function.
        """
        return func(*args, **kwargs)

    def _note(self, name: str, args: Any, result: Tensor) -> None:
        """Record the result of a call: a drawn number, or the answer of a comparison with one.

        Args:
            name: Name of the function.
            args: Positional arguments.
            result: Tensor with one entry.
        """
        if name == "rand":
            self._drawn[result] = True
        elif name in _COMPARISONS and any(isinstance(arg, Tensor) and arg in self._drawn for arg in args):
            sides = [_MIDDLE if isinstance(arg, Tensor) and arg in self._drawn else arg for arg in args[:2]]
            if not any(isinstance(side, Tensor) for side in sides):
                self._answers[result] = _COMPARISONS[name](*sides)

    def _answer(self, asked: Tensor) -> bool:
        """Return the recorded answer of the comparison ``asked``, and warn about the path that it selects."""
        answer = self._answers[asked]
        warn_of_path(answer)
        return bool(answer)


class TraceableMode(SinglePathMode):
    """Mode in which a module can be traced.

    - ``mask.all()`` is taken as False if its value is unknown.
    - Functions that no graph can represent are rewritten (:mod:`edgefl.models.torch_functions.rules`).
    - Torch's transformer layers compute in inference as in training, because their fused kernels and nested tensors have no
      graph.
    - Packed sequences are padded ones (:mod:`edgefl.models.torch_functions.recurrent`).
    - Constants have values, and inference mode only disables gradients.
    """

    def __init__(self) -> None:
        super().__init__()
        self._constants = ConstantValues()

    def set_values(self, tensor: Tensor, values: Tensor) -> None:
        """Use ``values`` when code reads the values of ``tensor``, which has none itself."""
        self._constants.add(tensor, values)

    def _prepare(self, entered: ExitStack) -> None:
        entered.enter_context(padding())
        entered.enter_context(recurring())
        entered.enter_context(inference_as_no_grad())
        entered.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)

    def _constant(self, name: str, args: Any) -> Any:
        return self._constants.python_value(name, args)

    def _run(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        if func is Tensor.register_hook and not args[0].requires_grad:
            return RemovableHandle(OrderedDict())  # in inference there is no gradient to change
        if func is Tensor.requires_grad_ and _is_traced():
            return args[0]  # the gradients of weights do not change by it
        args = self._constants.with_numbers(name, args)
        if (rule := REWRITTEN.get(func)) is not None:
            with self:  # for the draws of the rule itself
                rewritten = rule(*args, **kwargs)
            if rewritten is not NotImplemented:
                return rewritten
        if name in ("cpu", "to") and args[0].is_meta and _to_cpu(name, args, kwargs):
            # A tensor without values has none to move there.
            dtypes = [each for each in (*args[1:], *kwargs.values()) if isinstance(each, torch.dtype)]
            return args[0].to(*dtypes) if dtypes else args[0]
        result = self._called(func, name, args, kwargs)
        self._constants.update(func, name, args, kwargs, result)
        return result

    def _note(self, name: str, args: Any, result: Tensor) -> None:
        super()._note(name, args, result)
        if name == "all" and args and not args[0].is_floating_point():
            self._answers[result] = None

    def _answer(self, asked: Tensor) -> bool:
        return _truth_of(asked) if self._answers[asked] is None else super()._answer(asked)


def _is_traced() -> bool:
    """Return True inside of a ``torch.func`` transform, unless the user's own code takes the gradient."""
    return (
        torch._C._are_functorch_transforms_active()
        and not torch._C._functorch.get_inplace_requires_grad_allowed()
    )


def _to_cpu(name: str, args: Any, kwargs: Any) -> bool:
    """Return True if the call of the tensor method ``name`` (``cpu`` or ``to``) moves a tensor to the CPU."""
    where = args[1] if len(args) > 1 else kwargs.get("device")
    return name == "cpu" or (isinstance(where, str | torch.device) and torch.device(where).type == "cpu")


def _truth_of(asked: Tensor) -> bool:
    """Return the value of a bool tensor if it does not depend on the input, else False."""
    if asked.is_meta or torch.compiler.is_exporting():
        return False
    try:
        return bool(asked)
    except Exception:  # every tracer has an exception of its own
        return False


def _has_drawn_number(value: Any) -> bool:
    """Return True for a :class:`DrawnNumber`, and for a list or tuple that contains one."""
    return type(value) is DrawnNumber or (
        isinstance(value, list | tuple) and any(map(_has_drawn_number, value))
    )


def disable_masking(module: nn.Module) -> None:
    """Disable SpecAugment in the configurations of ``module``, in place, and warn. It draws random numbers by numpy."""
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


def disable_expert_dispatch(module: nn.Module) -> None:
    """Make mixtures of experts of the library transformers read the expert weights of each row, in place.

    Other implementations gather the rows of each expert. Their number depends on values, so they have no graph.
    """
    for part in module.modules():
        config: Any = part.__dict__.get("config")
        if getattr(config, "_experts_implementation", None) and hasattr(part, "_is_expert_parallel"):
            config._experts_implementation = "batched_mm"  # transformers' name for that
