"""Submodules that stay closed while a module is traced: one call, one node, and what is noted of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._pytree import GetAttrKey, SequenceKey
from torch.utils.weak import WeakTensorKeyDictionary

from edgefl.errors import ModelError
from edgefl.models.draws.steering import Steered
from edgefl.models.graph.output import called_by
from edgefl.models.own_gradients import Applied, Kind
from edgefl.models.packed import Padded
from edgefl.models.user_code import defined_at


@dataclass(frozen=True)
class Call:
    """One call of a closed submodule: ``arguments`` is (args, kwargs) with an index for each tensor.

    ``results`` holds the places of the returned tensors: () for a tensor, (1, 0) for the first of a second tuple.
    """

    path: str
    arguments: Any
    results: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Slot:
    """Stands in :attr:`Call.arguments` for the tensor at this index."""

    index: int


State = tuple[Hashable, ...]
"""Modes, attributes and tensors of a module and its parts, by identity."""


@dataclass
class Recorder:
    """Calls of closed submodules seen so far.

    Attributes:
        inside: True while a closed submodule runs.
        asked_mode: True if code outside of closed submodules read its mode.
        learned: tensors that require a gradient in training, which those of a trace do not show.
        states: what each closed submodule held when the root was called.
    """

    calls: list[Call] = field(default_factory=list)
    applied: Counter[str] = field(default_factory=Counter)
    running: list[Callable[[list[Tensor]], Any]] = field(default_factory=list)
    returned: Any = None
    inside: bool = False
    asked_mode: bool = False
    learned: Any = field(default_factory=WeakTensorKeyDictionary)
    states: dict[nn.Module, State] = field(default_factory=dict)


recorders: list[Recorder] = []


@torch.library.custom_op("edgefl::closed", mutates_args=())
def _closed_call(tensors: list[Tensor], index: int) -> list[Tensor]:
    """Call number ``index`` of a closed submodule; exists in graphs only, never runs on values."""
    raise NotImplementedError


@_closed_call.register_fake
def _(tensors: list[Tensor], index: int) -> list[Tensor]:
    recorder = recorders[-1]
    recorder.inside = True
    try:
        recorder.returned = recorder.running[index](tensors)
    finally:
        recorder.inside = False
    outputs = [value for value in pytree.tree_leaves(recorder.returned) if isinstance(value, Tensor)]
    return [torch.empty_like(value) for value in outputs]


OPERATOR = torch.ops.edgefl.closed.default


def learned(values: Any) -> None:
    """Tensors in ``values`` require a gradient in training."""
    if recorders and torch.is_grad_enabled():
        for leaf in pytree.tree_leaves(values):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                recorders[-1].learned[leaf] = True


def requires_gradient(values: Any) -> bool:
    """Whether a tensor in ``values`` does, in training."""
    known = recorders[-1].learned if recorders else {}
    tensors = (leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor))
    return any(tensor.requires_grad or tensor in known for tensor in tensors)


@contextmanager
def closing(root: nn.Module, closed: Callable[[str, nn.Module], bool], recorder: Recorder) -> Iterator[None]:
    """Turn calls of the submodules ``closed(path, module)`` of ``root`` into calls of one operator inside.

    ``recorder`` notes them. A submodule is called as a whole, with its hooks. It stays open where code around it has
    changed its weights, attributes or mode since ``root`` was called: the unit that calls it later would not.
    """
    modules = [
        (path, module)
        for path, module in root.named_modules()
        if path and closed(path, module) and not isinstance(module, nn.ModuleList | nn.ModuleDict | Applied)
    ]
    call_root: Callable[..., Any] = root._call_impl

    def started(*args: Any, **kwargs: Any) -> Any:
        recorder.states = {module: _state(module) for _, module in modules}
        return call_root(*args, **kwargs)

    recorders.append(recorder)
    try:
        with ExitStack() as stack:
            stack.enter_context(called_by(root, started))
            for path, module in modules:
                recording = _recording(path, module, module._call_impl, recorder)
                stack.enter_context(called_by(module, recording))
            yield
    finally:
        recorders.pop()


_UNSTEADY = frozenset({"_call_impl", "_flat_weights", "_flat_weight_refs"})
"""Attributes that differ although nothing was changed."""


def _state(module: nn.Module) -> State:
    return tuple(
        (name, _identity(value))
        for part in module.modules()
        for group in (part.__dict__, part._parameters, part._buffers, part._modules)
        for name, value in group.items()
        if name not in _UNSTEADY
    )


def _identity(value: object) -> Hashable:
    if isinstance(value, list | tuple):
        return tuple(map(id, value))
    if isinstance(value, dict):
        return tuple((str(key), id(each)) for key, each in value.items())
    return value if isinstance(value, bool | int | float | str) else id(value)


def applying(root: nn.Module, recorder: Recorder, kind: Kind, args: tuple[Any, ...]) -> Any:
    """A function with a gradient of its own, as a closed submodule of ``root``: opened, it would lose that gradient."""
    if recorder.inside:
        return kind.apply(*args)
    name = f"{kind.__name__}_{recorder.applied[kind.__name__]}"
    recorder.applied[kind.__name__] += 1
    layer = root._modules.get(name)
    if not isinstance(layer, Applied) or layer.kind is not kind:  # not of an earlier trace
        layer = Applied(kind)
        root.add_module(name, layer)
    recorded = len(recorder.calls)
    result = _recording(name, layer, layer.forward, recorder)(*args)
    if len(recorder.calls) == recorded or not _is_plain_result(recorder.returned):
        raise ModelError(
            f"{kind.__name__} has a gradient of its own, and is given or returns something that is no tensor and no plain "
            f"constant{_at(kind)}; give it tensors alone",
            function=kind.__name__,
        )
    return result


def _at(kind: Kind) -> str:
    source = defined_at(kind)
    return f" (at {source})" if source else ""


@contextmanager
def observed(root: nn.Module, recorder: Recorder) -> Iterator[None]:
    """Inside, the recorder learns of who reads ``training`` of a part of ``root``: a property comes before what modules
    hold themselves."""
    parts = {id(part) for part in root.modules()}

    def read(module: nn.Module) -> bool:
        recorder.asked_mode |= id(module) in parts and not recorder.inside
        return bool(module.__dict__["training"])

    def write(module: nn.Module, training: bool) -> None:
        module.__dict__["training"] = training

    nn.Module.training = property(read, write)  # type: ignore[assignment]
    try:
        yield
    finally:
        del nn.Module.training


def _recording(
    path: str, module: nn.Module, original: Callable[..., Any], recorder: Recorder
) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if recorder.inside or not all(_is_plain(leaf) for leaf in leaves):
            return original(*args, **kwargs)
        if module in recorder.states and recorder.states[module] != _state(module):
            return original(*args, **kwargs)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]

        def run(given: list[Tensor]) -> Any:
            queue = iter(given)
            filled = [next(queue) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            args, kwargs = pytree.tree_unflatten(filled, spec)
            state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
            # Rebound statistics must not stay behind; functional_call puts the module's own back.
            with Steered():  # a mode is off while it handles the call of the operator
                return torch.func.functional_call(
                    _Shell(module, original), {f"module.{k}": v for k, v in state.items()}, args, kwargs
                )

        recorder.running.append(run)
        recorder.calls.append(Call(path, _slots(leaves, spec), ()))
        index = len(recorder.calls) - 1
        outputs = _closed_call(tensors, index)
        if not _is_plain_result(recorder.returned):
            return original(*args, **kwargs)
        result = _returned(recorder, index, outputs)
        if any(parameter.requires_grad for parameter in module.parameters()):
            learned(result)
        return result

    return forward


class _Shell(nn.Module):
    """Calls ``original`` while the tensors of ``module`` are replaced."""

    def __init__(self, module: nn.Module, original: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self.original = module, original

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.original(*args, **kwargs)


def _is_plain(leaf: object) -> bool:
    # A symbolic size is no int here: the call would hold this batch's size.
    return leaf is None or isinstance(leaf, Tensor | torch.dtype) or type(leaf) in (bool, int, float, str)


def _is_plain_result(value: Any) -> bool:
    if type(value) in (tuple, list, Padded):
        return all(map(_is_plain_result, value))
    return value is None or isinstance(value, Tensor)


def _slots(leaves: list[Any], spec: pytree.TreeSpec) -> Any:
    numbers = iter(range(len(leaves)))
    return pytree.tree_unflatten(
        [Slot(next(numbers)) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec
    )


def _returned(recorder: Recorder, index: int, found: list[Tensor]) -> Any:
    """What the closed submodule returned, built of the operator's results; notes where each one lies."""
    flat, spec = pytree.tree_flatten_with_path(recorder.returned)
    tensors = iter(found)
    places = tuple(tuple(map(_place, keys)) for keys, leaf in flat if isinstance(leaf, Tensor))
    call = recorder.calls[index]
    recorder.calls[index] = Call(call.path, call.arguments, places)
    return pytree.tree_unflatten(
        [next(tensors) if isinstance(leaf, Tensor) else leaf for _, leaf in flat], spec
    )


def _place(key: object) -> int:
    assert isinstance(key, SequenceKey | GetAttrKey)
    return key.idx if isinstance(key, SequenceKey) else Padded._fields.index(key.name)
