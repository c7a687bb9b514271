"""A function of tensors as the graph of the ops that it runs: what ``torch.fx.experimental.proxy_tensor.make_fx`` gives,
node by node and name by name, in a third of its time.

An op is written down where torch dispatches it, below autograd and functorch, so gradients are there as ops. make_fx does
so through proxies, which also serve symbolic shapes, subclasses of tensors and higher-order ops; a program has none of
these.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import CONSTANT_NUMEL_LIMIT, disable_autocast_cache
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, autograd_would_have_decomposed
from torch.utils.weak import WeakTensorKeyDictionary

Table = Mapping[OpOverload, Callable[..., object]]
"""What stands for an op: a function of its arguments. One that returns NotImplemented leaves the op as it is."""

_aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default
_NOWHERE = torch.device("meta")
_LAYOUT = frozenset({_aten.size.default, _aten.stride.default, _aten.storage_offset.default})


def graph_of(
    fn: Callable[..., Sequence[Tensor]], arguments: Sequence[Tensor], table: Table, *, fake: bool
) -> fx.GraphModule:
    """The graph of ``fn`` on these arguments, one placeholder for each, with the ops in ``table`` rewritten.

    ``fake``: run without values. Else with those of the arguments: RuntimeError where a Python value is taken out of a
    tensor that depends on them. Tensors that no op has made are constants, attributes of the module. Each node has its
    result, without values, as ``meta["val"]``.
    """
    mode = _fake_mode() if fake else None
    inputs = [mode.from_tensor(value) for value in arguments] if mode else arguments
    writer = _Writer(table, mode)
    for number, value in enumerate(inputs):
        writer.place(value, number)
    with mode or nullcontext(), writer, disable_autocast_cache():
        results = fn(*inputs)
    return writer.module(results)


def _fake_mode() -> FakeTensorMode:
    return FakeTensorMode(
        allow_fallback_kernels=True, allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True
    )


@dataclass(frozen=True)
class _Made:
    """The node of a tensor; ``constant``: its value is the same whatever the arguments are."""

    node: fx.Node
    constant: bool = False


class _Writer(TorchDispatchMode):
    """Runs ops, and writes a node for each."""

    def __init__(self, table: Table, mode: FakeTensorMode | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._table, self._mode = table, mode
        self._graph = fx.Graph()
        self._root = nn.Module()
        self._made: Any = WeakTensorKeyDictionary()
        self._constants: dict[int, str] = {}

    def place(self, value: Tensor, number: int) -> None:
        """A placeholder for an argument."""
        name = f"arg{number}_1"
        self._note(value, self._graph.create_node("placeholder", name, name=name))

    def module(self, results: Sequence[Tensor]) -> fx.GraphModule:
        self._graph.output(tuple(self._argument(value) for value in results))
        return fx.GraphModule(self._root, self._graph)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _DEVICE:
            return func(*args, **kwargs)
        results = self._rewritten(func, args, kwargs)
        if results is not NotImplemented:
            return results
        made = [self._made.get(value) for value in _tensors(args, kwargs)]
        constant = all(each is None or each.constant for each in made)
        if torch.Tag.data_dependent_output in func.tags:
            return self._value(func, args, kwargs, constant)
        return self._write(func, args, kwargs, constant and any(made))

    def _rewritten(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What the table has in place of an op, or what the op is made of where autograd would not see it either."""
        rule = self._table.get(func)
        if rule is not None:
            with self:
                results = rule(*args, **kwargs)
            if results is not NotImplemented:
                return results
        if func is _aten.is_nonzero.default:
            with self:
                return (args[0] != 0).item()
        if func not in _LAYOUT and autograd_would_have_decomposed(
            func, pytree.arg_tree_leaves(*args, **kwargs)
        ):
            with self:
                return func.decompose(*args, **kwargs)
        return NotImplemented

    def _value(self, func: Any, args: Any, kwargs: Any, constant: bool) -> Any:
        """A Python value out of a tensor, which no graph can hold unless it is always the same."""
        if not constant:
            raise RuntimeError(f"{func} takes a Python value out of a tracing tensor")
        return func(*args, **kwargs)

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
        results = func(*args, **kwargs)
        if isinstance(results, Tensor):
            self._note(results, node, constant)
        elif isinstance(results, tuple | list):
            node.meta["val"] = type(results)(map(_bare, results))
            for number, result in enumerate(results):
                part = self._graph.create_node("call_function", operator.getitem, (node, number))
                if isinstance(result, Tensor):
                    self._note(result, part, constant)
        return results

    def _note(self, value: Tensor, node: fx.Node, constant: bool = False) -> None:
        self._made[value] = _Made(node, constant and value.numel() <= CONSTANT_NUMEL_LIMIT)
        node.meta["val"] = _bare(value)

    def _argument(self, value: Any) -> Any:
        """``value`` with nodes for tensors."""
        if isinstance(value, Tensor):
            made = self._made.get(value)
            return self._attribute(value) if made is None else made.node
        if isinstance(value, dict):
            return {key: self._argument(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._argument(item) for item in value)
        return value

    def _attribute(self, value: Tensor) -> fx.Node:
        """A constant; the same one is the same attribute."""
        name = self._constants.get(id(value), "")
        if not name:
            word = "_param_constant" if isinstance(value, nn.Parameter) else "_tensor_constant"
            name = f"{word}{sum(other.startswith(word) for other in self._constants.values())}"
            self._constants[id(value)] = name
            setattr(self._root, name, value)
        node = self._graph.create_node("get_attr", name)
        with self._mode or nullcontext():
            node.meta["val"] = _bare(value, value.device if self._mode else _NOWHERE)
        return node


def _bare(value: Any, device: torch.device = _NOWHERE) -> Any:
    """A tensor without values; a fake one, which has none, as it is, and what is no tensor, too."""
    if type(value) not in (Tensor, nn.Parameter):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)


def _tensors(args: Any, kwargs: Any) -> list[Tensor]:
    return [value for value in pytree.arg_tree_leaves(*args, **kwargs) if isinstance(value, Tensor)]
