"""Deep copies of modules, and copies that can be traced and trained."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Mapping
from types import CellType, FunctionType, MethodType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import UninitializedBuffer, is_lazy
from torch.overrides import TorchFunctionMode

from edgefl.contract.tensors import TensorSpec
from edgefl.errors import ModelError
from edgefl.models.modes import is_inference, mark_inference
from edgefl.models.python_state.items import SlotAttributes
from edgefl.models.torch_functions.patches import ThreadPatch
from edgefl.models.user_code import user_errors

M = TypeVar("M", bound=nn.Module)


_copying = ThreadPatch()
"""Inside, ``copy.deepcopy`` of this thread copies modules as :func:`copy_module` does."""


def copy_module(module: M, memo: dict[int, Any] | None = None) -> M:
    """Return a deep copy of ``module``, also in cases where ``copy.deepcopy`` fails.

    Computed tensors that the module stores are detached, such as the weight that pruning or the older ``weight_norm``
    sets in a pre-hook; torch refuses to copy them. Functions that refer to modules, such as the hook ``lambda module,
    args, out: out * self.scale``, are copied and refer to the copies.

    Args:
        module: Module to copy. It is not changed.
        memo: Objects to use instead of a copy, by the ``id`` of the original, as for ``copy.deepcopy``. It receives all
            copies.
    """
    memo = {} if memo is None else memo
    with torch.no_grad(), _DetachingMode(), _copying():
        made = copy.deepcopy(module, memo)
        for part in module.modules():
            # torch's own copy of a module leaves out what its class keeps in __slots__.
            for name, value in SlotAttributes(part).read().items():
                SlotAttributes(memo[id(part)]).write(name, copy.deepcopy(value, memo))
    for part in made.modules():
        if isinstance(part, nn.RNNBase):
            part._flat_weight_refs = [_GONE] * len(part._flat_weights_names)
    return made


def _state(self: nn.RNNBase) -> dict[str, Any]:
    """Return the attributes of a recurrent layer without its list of weights; the replacement of
    ``nn.RNNBase.__getstate__``.

    Torch rebuilds the list. Reading it would move the buffers of a parametrization, such as spectral norm.
    """
    state = self.__dict__.copy()
    del state["_flat_weight_refs"]
    return state | {"_flat_weights": [None] * len(self._flat_weights_names)}


def _copy_traced(self: fx.GraphModule, memo: dict[int, Any]) -> fx.GraphModule:
    """Return a copy of an fx module that keeps hooks and attributes. It replaces ``GraphModule.__deepcopy__``.

    Torch's own copy loses them, and also loses attributes of submodules whose tensors the graph reads.
    """
    made = type(self).__new__(type(self))
    memo[id(self)] = made
    attributes = {name: value for name, value in self.__dict__.items() if name != "_graph"}
    made.__dict__.update(copy.deepcopy(attributes, memo))
    made.graph = copy.deepcopy(self.graph, memo)
    return made


# A reference to nothing: torch gathers the weights when the layer is called next.
_GONE: weakref.ref[Any] = weakref.ref(set())


def _copy_function(function: FunctionType, memo: dict[int, Any]) -> FunctionType:
    """Return a copy of a function that refers to modules in its closure or defaults.

    The copy refers to copies of these modules.

    Any other function is returned itself.
    """
    if not _copying.is_active() or not any(map(_refers_to_module, _captured_values(function))):
        return function
    cells = tuple(CellType() for _ in function.__closure__ or ())
    made = FunctionType(
        function.__code__, function.__globals__, function.__name__, None, cells if cells else None
    )
    memo[id(function)] = made  # before its cells are copied: a function may refer to itself
    for cell, original in zip(cells, function.__closure__ or (), strict=True):
        if _is_filled(original):
            cell.cell_contents = copy.deepcopy(original.cell_contents, memo)
    made.__defaults__ = copy.deepcopy(function.__defaults__, memo)
    made.__kwdefaults__ = copy.deepcopy(function.__kwdefaults__, memo)
    made.__dict__.update(function.__dict__)
    made.__qualname__, made.__module__ = function.__qualname__, function.__module__
    return made


def _captured_values(function: FunctionType) -> Iterator[object]:
    """Yield the values in a function's closure and defaults."""
    yield from (cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell))
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()


def _is_filled(cell: CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _refers_to_module(value: object, depth: int = 3) -> bool:
    """Return True if ``value`` is or contains a module or parameter, up to ``depth`` levels down."""
    if isinstance(value, nn.Module | nn.Parameter):
        return True
    if isinstance(value, Tensor) or not depth:
        return False
    if isinstance(value, MethodType):
        return _refers_to_module(value.__self__, depth - 1)
    if type(value) in (list, tuple, dict):
        items = value.values() if isinstance(value, dict) else cast(list[object], value)
        return any(_refers_to_module(each, depth - 1) for each in items)
    return isinstance(value, FunctionType) and any(
        _refers_to_module(each, depth - 1) for each in _captured_values(value)
    )


class _DeepcopyTable:
    """Entry for functions in ``copy._deepcopy_dispatch``, as the attribute ``functions``, so that :class:`ThreadPatch`
    can replace it.
    """

    @property
    def functions(self) -> Any:
        return copy._deepcopy_dispatch[FunctionType]  # type: ignore[attr-defined]

    @functions.setter
    def functions(self, handler: Any) -> None:
        copy._deepcopy_dispatch[FunctionType] = handler  # type: ignore[attr-defined]


class _DetachingMode(TorchFunctionMode):
    """Mode in which ``copy.deepcopy`` copies computed tensors detached instead of refusing them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.__deepcopy__ or args[0].is_leaf:
            return func(*args, **kwargs or {})
        tensor, memo = args
        if id(tensor) not in memo:
            memo[id(tensor)] = tensor.detach().clone()
        return memo[id(tensor)]


_copying.replace_function(nn.RNNBase, "__getstate__", _state)
_copying.replace_function(fx.GraphModule, "__deepcopy__", _copy_traced)
_copying.replace(_DeepcopyTable(), "functions", _copy_function)


def trainable_copy(module: nn.Module) -> nn.Module:
    """Return a deep copy of ``module`` that computes the same and that can be traced, cut and trained.

    Parts in inference mode inside a module in training mode stay in inference mode, also if the module's own ``train``
    puts them there. A layer without state that has several names, such as one ReLU for all, becomes one layer per name.
    Integer and complex buffers (position ids, counters) become constants, because only floats are averaged.

    Raises:
        ModelError: A batch norm uses a cumulative average (``momentum=None``).
    """
    made = copy_module(module)
    mark_inference(made)
    _check_averages(made)
    _copy_stateless(made)
    for part in made.modules():
        if isinstance(part, nn.modules.batchnorm._NormBase):
            part.register_load_state_dict_post_hook(_without_counter)
        part._non_persistent_buffers_set |= {
            name
            for name, buffer in part._buffers.items()
            if buffer is not None and not buffer.is_floating_point()
        }
    return made


def initialize_lazy(module: nn.Module, sample: TensorSpec | Mapping[str, TensorSpec]) -> nn.Module:
    """Return ``module`` itself, or a copy with initialized parameters if it has lazy layers.

    Args:
        module: Module. It is not changed.
        sample: One sample of the input, or of several inputs by name, without batch dimension. It determines the
            shapes of lazy layers.

    Raises:
        ModelError: The module cannot run on such a sample.
    """
    waiting = [each for each in (*module.parameters(), *module.buffers()) if is_lazy(each)]
    if not waiting:
        return module
    # torch copies parameters without a shape, but no buffers.
    fresh: dict[int, object] = {
        id(each): UninitializedBuffer(device=each.device, dtype=each.dtype)  # type: ignore[call-arg]
        for each in waiting
        if isinstance(each, UninitializedBuffer)
    }
    made = copy_module(module, fresh)
    modes = {part: part.training for part in made.modules()}
    with torch.no_grad(), user_errors(f"{type(module).__name__} has lazy layers and cannot read a sample"):
        made.eval()
        if isinstance(sample, Mapping):
            made(**{name: each.rows(2).zeros() for name, each in sample.items()})
        else:
            made(sample.rows(2).zeros())
    for part, training in modes.items():
        part.training = training
    return made


def _check_averages(module: nn.Module) -> None:
    """Raise ModelError if a batch norm in ``module`` that is trained uses a cumulative average (``momentum=None``)."""
    for path, part in module.named_modules():
        averages = isinstance(part, nn.modules.batchnorm._BatchNorm) and part.track_running_stats
        if averages and not is_inference(part) and part.momentum is None:
            raise ModelError(
                f"batch norm {path!r} keeps a cumulative average (momentum=None), which depends on a batch counter; "
                "give it a momentum such as 0.1",
                module=path,
            )


def _copy_stateless(module: nn.Module) -> None:
    """Replace a layer without state that has several names by one copy per name, in place, so that a cut can separate
    them.
    """
    seen: set[nn.Module] = set()
    for part in module.modules():
        for name, child in part._modules.items():
            if child in seen and child is not None and _is_plain(child):
                part._modules[name] = copy_module(child)
            elif child is not None:
                seen.add(child)


def _is_plain(module: nn.Module) -> bool:
    """Return True if ``module`` and all its parts are layers of torch itself and have no state."""
    parts = list(module.modules())
    return not module.state_dict() and all(type(part).__module__.startswith("torch.nn.") for part in parts)


def _without_counter(_norm: nn.Module, keys: Any) -> None:
    """Remove batch counters from the unexpected keys of ``load_state_dict``. Batch norms run this function after loading.

    Torch adds such a counter to every state that a batch norm loads.
    """
    keys.unexpected_keys[:] = [
        key for key in keys.unexpected_keys if not key.endswith(".num_batches_tracked")
    ]
