"""Graphs of the ops that a function of tensors runs, as ``torch.fx.experimental.proxy_tensor.make_fx`` makes them, node by
node and name by name, in a third of its time.

An op is recorded where torch dispatches it, below autograd and functorch, so gradients are ops too. make_fx does so through
proxies, which also serve symbolic shapes, subclasses of tensors and higher-order ops; an algorithm has none of these.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental.proxy_tensor import CONSTANT_NUMEL_LIMIT, disable_autocast_cache
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from edgefl.contract.algorithm import Function
from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl.models.torch_functions.layouts import META, ListKey, from_key, layout_key
from edgefl_export.operators import aten_ops

Table = Mapping[OpOverload, Callable[..., object]]
"""Replacement function of each op, called with the arguments of the op. If it returns NotImplemented, the op stays."""

_aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default
_REAL = torch.device("cpu")
_KNOWN_RESULTS = 1 << 16
# In inference a processor gives no saved statistics: empty tensors, where the form without values has full ones.
_BY_DEVICE = frozenset(
    {_aten.native_batch_norm, _aten._native_batch_norm_legit, _aten._native_batch_norm_legit_no_training}
)
# Products, which take nearly all of a run's time. Nothing reads what they give for one example; its layout is known.
_PRODUCTS = aten_ops("convolution convolution_backward mm addmm bmm baddbmm")
_LAYOUT = frozenset({_aten.size.default, _aten.stride.default, _aten.storage_offset.default})


@dataclass(frozen=True)
class TracedFunction:
    """Result of the first pass of tracing.

    Attributes:
        function: the traced function.
        module: graph of forward, backward and update, in the order of execution.
        outputs: shape and dtype of each output port.
    """

    function: Function
    module: fx.GraphModule
    outputs: Mapping[str, TensorSpec]


@dataclass(frozen=True)
class LoweredGraph:
    """Function as a graph of core ops without in-place writes; the passes of a target rewrite it.

    Attributes:
        function: the function.
        module: the graph; constants are attributes of the module.
        inputs: shape and dtype of each input port, in the order of the placeholders.
        outputs: shape and dtype of each output port, in the order of the returned tensors.
        unused: names of declared input ports that no output depends on.
    """

    function: Function
    module: fx.GraphModule
    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]
    unused: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.function.name

    def __call__(self, tensors: Tensors) -> Tensors:
        """Run the graph in torch on ``tensors`` and return its outputs, both by port name. Entries that are not inputs
        are ignored.
        """
        results = self.module(*(tensors[name] for name in self.inputs))
        return dict(zip(self.outputs, results, strict=True))


def graph_of(
    fn: Callable[..., Sequence[Tensor]], arguments: Sequence[Tensor], table: Table, *, fake: bool
) -> fx.GraphModule:
    """Run ``fn`` and return the graph of the ops that it ran.

    The graph has one placeholder for each argument. Tensors that no op computed are constants: attributes of the module.
    ``meta["val"]`` of a node is its result without values.

    Args:
        fn: function of tensors.
        arguments: positional arguments of ``fn``.
        table: replacement functions of ops; the graph has the ops that these run.
        fake: run on tensors without values. If false, run on the values of ``arguments``, with zeros as the results of
            matrix products and convolutions, whose values take long to compute.

    Raises:
        RuntimeError: if ``fn`` takes a Python value out of a tensor that depends on ``arguments``.
    """
    inputs = [_bare(value) for value in arguments] if fake else arguments
    writer = _OpRecorder(table, fake)
    for number, value in enumerate(inputs):
        writer.place(value, number)
    with writer, disable_autocast_cache():
        results = fn(*inputs)
    return writer.module(results)


@dataclass(frozen=True)
class _RecordedTensor:
    """Node that computed a tensor. ``constant``: the value does not depend on the arguments."""

    node: fx.Node
    constant: bool = False


class _OpRecorder(TorchDispatchMode):
    """Dispatch mode that runs ops and records a node for each."""

    def __init__(self, table: Table, fake: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._table, self._fake = table, fake
        self._graph = fx.Graph()
        self._root = nn.Module()
        self._made: Any = WeakTensorKeyDictionary()
        self._constants: dict[int, str] = {}

    def place(self, value: Tensor, number: int) -> None:
        """Add a placeholder for ``value``, the argument at position ``number``."""
        name = f"arg{number}_1"
        self._note(value, self._graph.create_node("placeholder", name, name=name))

    def module(self, results: Sequence[Tensor]) -> fx.GraphModule:
        self._graph.output(tuple(self._argument(value) for value in results))
        return _LazyGraphModule(self._root, self._graph)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _DEVICE or func.namespace == "profiler":  # nothing is computed
            return func(*args, **kwargs)
        results = self._apply_rule(func, args, kwargs)
        if results is not NotImplemented:
            return results
        made = [self._made.get(value) for value in _tensors(args, kwargs)]
        drawn = torch.Tag.nondeterministic_seeded in func.tags
        constant = not drawn and all(each is None or each.constant for each in made)
        if torch.Tag.data_dependent_output in func.tags:
            # No graph can hold a Python value unless it is always the same.
            if not constant:
                raise RuntimeError(f"{func} takes a Python value out of a tracing tensor")
            return func(*args, **kwargs)
        return self._write(func, args, kwargs, constant and any(made))

    def _apply_rule(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the results of op ``func`` by its rule in the table, or by torch's decomposition if it has no kernel
        of its own.

        Return NotImplemented if the op itself is to be recorded.
        """
        rule = self._table.get(func)
        if rule is not None:
            with self:
                results = rule(*args, **kwargs)
            if results is not NotImplemented:
                return results
        if func is _aten.is_nonzero.default:
            with self:
                return (args[0] != 0).item()
        if func not in _LAYOUT and not (_has_kernel(func) and _tensors(args, kwargs)):
            with self:
                return func.decompose(*args, **kwargs)
        return NotImplemented

    def _write(self, func: Any, args: Any, kwargs: Any, constant: bool) -> Any:
        if (
            func is _aten.lift_fresh.default
        ):  # of torch.tensor(...): the constant itself must not be written to
            func = _aten.lift_fresh_copy.default
            constant = True
        node = self._graph.create_node(
            "call_function",
            func,
            self._argument(args),
            self._argument(kwargs),
            name=self._graph._target_to_str(func.overloadpacket.__name__),
        )
        results = self._results(func, args, kwargs, constant)
        if isinstance(results, Tensor):
            self._note(results, node, constant)
        elif isinstance(results, tuple | list):
            node.meta["val"] = type(results)(map(_bare, results))
            for number, result in enumerate(results):
                part = self._graph.create_node("call_function", operator.getitem, (node, number))
                if isinstance(result, Tensor):
                    self._note(result, part, constant)
        return results

    def _results(self, func: Any, args: Any, kwargs: Any, constant: bool) -> Any:
        if self._fake:
            return without_values(func, args, kwargs)
        if func in _PRODUCTS and not constant and _row_major(args, kwargs):
            return _zeros_like_result(func, args, kwargs)
        return func(*args, **kwargs)

    def _note(self, value: Tensor, node: fx.Node, constant: bool = False) -> None:
        self._made[value] = _RecordedTensor(node, constant and value.numel() <= CONSTANT_NUMEL_LIMIT)
        node.meta["val"] = _bare(value)

    def _argument(self, value: Any) -> Any:
        """Return ``value`` with each tensor replaced by its node, also within lists, tuples and dicts."""
        if isinstance(value, Tensor):
            made = self._made.get(value)
            return self._attribute(value) if made is None else made.node
        if isinstance(value, dict):
            return {key: self._argument(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._argument(item) for item in value)
        return _REAL if isinstance(value, torch.device) else value

    def _attribute(self, value: Tensor) -> fx.Node:
        """Return the node of a constant; equal constants share an attribute."""
        name = self._constants.get(id(value), "")
        if not name:
            word = "_param_constant" if isinstance(value, nn.Parameter) else "_tensor_constant"
            name = f"{word}{sum(other.startswith(word) for other in self._constants.values())}"
            self._constants[id(value)] = name
            setattr(self._root, name, value)
        node = self._graph.create_node("get_attr", name)
        node.meta["val"] = _bare(value)
        return node


@functools.cache
def _has_kernel(func: OpOverload) -> bool:
    """Return True if a processor runs the op itself, and not the ops of its decomposition."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), torch._C.DispatchKey.CPU))


def _zeros_like_result(func: Any, args: Any, kwargs: Any) -> Any:
    """Return zeros with shape and layout of the result of op ``func`` on these arguments, without computing it."""
    key = func, layout_key(args), layout_key(tuple(kwargs.items())), torch.get_default_dtype()
    return from_key(_result(*key), _REAL)


def _row_major(args: Any, kwargs: Any) -> bool:
    """Return True if every tensor of four or more axes among the arguments is contiguous, so that the layout of
    results is known.
    """
    return all(value.is_contiguous() or value.ndim < 4 for value in _tensors(args, kwargs))


def without_values(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the results of op ``func`` as tensors without values; they are cached by the layout of the arguments.

    Raises:
        DynamicOutputShapeException: if the shape of the result depends on values.
    """
    if torch.Tag.dynamic_output_shape in func.tags:
        raise DynamicOutputShapeException(func)
    key = func, layout_key(args), layout_key(tuple(kwargs.items())), torch.get_default_dtype()
    try:
        hash(key)
    except TypeError:  # an argument that cannot be looked up
        return from_key(_result.__wrapped__(*key))
    return from_key(_result(*key))


@functools.lru_cache(_KNOWN_RESULTS)
def _result(func: Any, args: ListKey, kwargs: ListKey, numbers: torch.dtype) -> Any:
    """Run an op without values and return the layout of its results.

    ``numbers`` is torch's default dtype; it is part of the cache's key only.
    """
    named = dict(from_key(kwargs))
    if func.overloadpacket in _BY_DEVICE:
        return layout_key(func(*from_key(args, _REAL), **named))
    try:
        here = {name: META if name == "device" else value for name, value in named.items()}
        return layout_key(func(*from_key(args), **here))
    except NotImplementedError:  # no form without values: of zeros, which are right as positions too
        return layout_key(func(*from_key(args, _REAL), **named))


def _bare(value: Any) -> Any:
    """Return a tensor without values; any other value as it is."""
    return layout_key(value).tensor() if isinstance(value, Tensor) else value


def _tensors(args: Any, kwargs: Any) -> list[Tensor]:
    """Return all tensors among the arguments of an op, also within lists and tuples."""
    found: list[Tensor] = []
    waiting = [*reversed(kwargs.values()), *reversed(args)]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            waiting.extend(reversed(value))
    return found


# torch in a process that was forked from one that has imported it.


def start_forked() -> None:
    """Prepare torch in a forked process: set it to one thread, because a fork does not copy the other threads.

    Raises:
        RuntimeError: if the parent process had computed a gradient; torch's autograd then works in the parent only.
    """
    torch.set_num_threads(1)
    torch.ones(1, requires_grad=True).sum().backward()
