"""Tracing of a model without values, to find the structure of its tensors' dimensions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._decomp import decomposition_table
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from edgefl.contract.tensors import TensorSpec
from edgefl.models.spec import on_meta, run_units, without_values
from edgefl.submodels.channels.axes import Axes, UnalignedError, pin
from edgefl.submodels.channels.operations import AxisRegistry, OpCall, pinned_axes, unknown_axes
from edgefl.submodels.channels.rules import rule_of

# Two rows: with one, batch statistics of a channel could have a single value, which torch refuses.
_ROWS = 2
Before = Callable[[str, nn.Module, tuple[Any, ...]], None]
"""Called with path, module and arguments before a submodule runs."""
Place = tuple[str, int]
"""Path of a submodule that is a graph, and the position of an operation in it."""


@dataclass(frozen=True, eq=False)
class TracedAxes:
    """Result of one traced run: the structure of each dimension, as an axis.

    Attributes:
        axes: Axes of each state tensor, by name.
        places: Axes of the results of operations in submodules that are graphs, by (path of the graph, position).
        loose: Dimensions that get their size from the code. Only a run of the narrow model shows whether they
            follow a cut.
    """

    axes: Mapping[str, Axes]
    places: Mapping[Place, Axes]
    loose: Axes


def trace_axes(
    module: nn.Sequential, sample: TensorSpec, before: Before | None = None, *, fixed: bool = False
) -> TracedAxes:
    """Run ``module`` without values, on the meta device and in inference mode, and return the axes of its tensors.

    The dimensions of the input and the output must be kept whole, and so must tensors that no operation reads.

    Args:
        module: Units of a model, run in order. Not changed.
        sample: Spec of one sample.
        before: Function (path, module, arguments) that is called before each submodule runs, or None.
        fixed: True: sizes that the code gives to tensors of zeros and the like, and to expanded tensors, must be
            kept, too.

    Raises:
        ModelError: The model cannot run. The error names the unit (stage of the model) and the line of the user's
            code.
    """
    book, places = AxisRegistry(fixed=fixed), dict[Place, Axes]()
    bare = on_meta(module).eval()
    state = bare.state_dict(keep_vars=True)
    axes = {name: book.note(tensor, unknown_axes(tensor.shape)) for name, tensor in state.items()}
    x = torch.empty((_ROWS, *sample.shape), dtype=sample.dtype, device="meta")
    book.note(x, pinned_axes(x.shape, "the model's input"))
    for path, part in bare.named_modules():
        _follow(path, part, book, before)
        if isinstance(part, fx.GraphModule):
            part.forward = _AxisRecorder(path, part, book, places).run
    with without_values(bare), plain_attention(), _TraceMode(book):
        result = run_units(bare, x)
    for axis in book.axes(result):
        pin(axis, "the model's output")
    for name, tensor in state.items():
        if not book.is_read(tensor):
            for axis in axes[name]:
                pin(axis, "nothing reads it in inference")
    return TracedAxes(axes, places, tuple(book.loose))


def _follow(path: str, module: nn.Module, book: AxisRegistry, before: Before | None) -> None:
    def enter(part: nn.Module, args: tuple[Any, ...]) -> None:
        book.path.append(path)
        if before is not None:
            before(path, part, args)

    def leave(_part: nn.Module, _args: tuple[Any, ...], _out: Any) -> None:
        book.path.pop()

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave)


class _AxisRecorder(fx.Interpreter):
    """Interpreter of a submodule that is a graph.

    It records the axes (structures of dimensions) of every operation's result.
    """

    def __init__(
        self, path: str, module: fx.GraphModule, book: AxisRegistry, places: dict[Place, Axes]
    ) -> None:
        super().__init__(module)
        self.extra_traceback = False
        self._order = {node: position for position, node in enumerate(module.graph.nodes)}
        self._path, self._book, self._places = path, book, places

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, Tensor):
            self._places[self._path, self._order[n]] = self._book.peek(result)
        return result


class _TraceMode(TorchDispatchMode):
    """Dispatch mode that finds the structure (axis) of each dimension of an operation's results by the operation's rule."""

    def __init__(self, book: AxisRegistry) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._book = book
        self._opened: list[Any] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if rule_of(func) is None and func in decomposition_table and func not in self._opened:
            inner_results = self._open(func, args, kwargs)
            if inner_results is not NotImplemented:
                return inner_results
        results = func(*args, **kwargs)
        op = OpCall.of(self._book, func, args, kwargs, results)
        if op.results:
            # A view in place gives a tensor other dimensions than it had.
            note = self._book.renote if torch.Tag.inplace_view in func.tags else self._book.note
            for tensor, axes in zip(op.results, _result_axes(op), strict=True):
                note(tensor, axes)
        return results

    def _open(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operations into which torch decomposes ``func``, and return the result.

        Return NotImplemented without a decomposition.
        """
        self._opened.append(func)
        try:
            with self:
                return decomposition_table[func](*args, **kwargs)
        except NotImplementedError:
            return NotImplemented
        finally:
            self._opened.pop()


def _result_axes(op: OpCall) -> list[Axes]:
    """Return the axes (structures of dimensions) of each result of ``op``.

    If its rule does not give them, all inputs and results must be kept whole.
    """
    rule = rule_of(op.func)
    try:
        axes = rule(op) if rule is not None else []
    except UnalignedError:
        axes = []
    if isinstance(axes, tuple):
        others = [op.whole(result.shape, "only for the operation itself") for result in op.results[1:]]
        axes = [axes, *others]
    if op.fits(axes):
        return axes
    why = "no rule says how its dimensions hang together"
    for tensor in op.tensors:
        op.pin(op.book.axes(tensor), why)
    return [op.whole(result.shape, why) for result in op.results]


@contextmanager
def plain_attention() -> Iterator[None]:
    """Make torch compute attention as products and a softmax, instead of fused kernels, inside the ``with`` block."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
