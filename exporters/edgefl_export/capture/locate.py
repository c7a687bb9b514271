"""Source lines of ops in the user's code: the function runs once more, in torch, and each op is watched."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from edgefl.contract.algorithm import Function
from edgefl.errors import ExportError
from edgefl.models.partition.normalize import module_of
from edgefl.models.user_code import is_user_code, node_at, source_of
from edgefl.system.distribution import folders
from edgefl_export.decompositions import core_table

_ROOMS = (Path(torch.__file__).resolve().parent, Path(__file__).resolve().parents[1])
# They run a model's code and have no part in what it computes.
_RUNNERS = tuple(
    folder / room
    for folder in folders("edgefl")
    for room in (
        "models/partition",
        "models/torch_functions/control_flow.py",
        "models/torch_functions/python_random.py",
        "models/torch_functions/random_inputs.py",
        "models/torch_functions/random_ops.py",
        "objective",
    )
)


@dataclass(frozen=True)
class SourceLocation:
    """Place in the user's code that called an op. Unknown parts are empty.

    Attributes:
        op: name of the op in torch.
        module: path of the module as in ``named_modules``, with its class.
        source: ``file:line``.
        backward: the op is part of a gradient; ``module`` and ``source`` are those of the forward op.
    """

    op: str = ""
    module: str = ""
    source: str = ""
    backward: bool = False

    def __str__(self) -> str:
        parts = [
            "in the gradient of what is called" if self.backward else "",
            f"in module {self.module}" if self.module else "",
            f"at {self.source}" if self.source else "",
        ]
        return ", ".join(part for part in parts if part) or "in the backward pass or inside another op"


def locate(function: Function, op: str) -> SourceLocation:
    """Run ``function`` in torch and return the location of the first call that leads to ``op`` in the graph.

    Calls are searched for in this order: ``op`` itself, another overload of it, an op whose name contains the name of
    ``op``, an op that is decomposed into it.

    Args:
        function: function to run on its example.
        op: op of the graph, as ``aten.name.overload``.

    Returns:
        The location; empty if there is no such call.
    """
    for wanted in (_is(op), _matches_name(op), _contains(op), _decomposes_into(op)):
        place = _run_watched(function, _CallTracer(wanted))
        if place != SourceLocation():
            return place
    return SourceLocation()


def locate_type(function: Function, dtypes: Collection[torch.dtype]) -> SourceLocation:
    """Run ``function`` and return the location of the first op with a result of one of ``dtypes``; empty if none has."""
    return _run_watched(function, _CallTracer(dtypes=dtypes))


def locate_call(function: Function, op: str, tensor: Callable[[Tensor], bool]) -> SourceLocation:
    """Run ``function`` and return the location of the first call of ``op`` on a tensor for which ``tensor`` is true.

    If there is no such call, return the result of :func:`locate`.
    """

    def wanted(func: Any, args: Any, kwargs: Any) -> bool:
        leaves = pytree.tree_leaves((args, kwargs))
        return str(func) == op and any(isinstance(leaf, Tensor) and tensor(leaf) for leaf in leaves)

    place = _run_watched(function, _CallTracer(wanted))
    return place if place != SourceLocation() else locate(function, op)


def refusal(function: Function, op: object, place: SourceLocation, what: str, rest: str) -> ExportError:
    """Return the error ``op <op> in function <name> <what> (<place>)<rest>``, with the same parts as attributes."""
    name = place.op or str(op)
    return ExportError(
        f"op {name} in function {function.name!r} {what} ({place}){rest}",
        function=function.name,
        op=name,
        module=place.module,
        source=place.source,
    )


def _run_watched(function: Function, watch: _CallTracer) -> SourceLocation:
    example = function.example(0)  # before the watch: it draws random numbers
    enter = register_module_forward_pre_hook(lambda module, args: watch.enter(module))
    leave = register_module_forward_hook(lambda module, args, out: watch.leave(), always_call=True)
    try:
        with watch:
            function(example)
    except Exception:
        return watch.place  # the function failed by itself; what was seen until then still helps
    finally:
        enter.remove()
        leave.remove()
    return watch.place


Wanted = Callable[[Any, Any, Any], bool]
"""Predicate on a call: op, positional and named arguments. True for a call that is looked for."""


def _is(op: str) -> Wanted:
    return lambda func, args, kwargs: str(func) == op


def _matches_name(op: str) -> Wanted:
    """Return a predicate for ops whose names equal ``op`` but for overload and underscores: ``_linalg_svd`` for
    ``linalg_svd``.
    """
    return lambda func, args, kwargs: _bare(str(func)) == _bare(op)


def _contains(op: str) -> Wanted:
    """Return a predicate for ops whose names contain that of ``op``: ``native_batch_norm_backward`` for ``batch_norm``."""
    return lambda func, args, kwargs: f"_{_bare(op)}_" in f"_{_bare(str(func))}_"


def _bare(op: str) -> str:
    """Return the name of ``namespace.name.overload`` without outer underscores and the suffixes of functional forms."""
    return op.split(".")[1].strip("_").removesuffix("_functional").removesuffix("_copy")


def _decomposes_into(op: str) -> Wanted:
    """Return a predicate for ops that rules of the compiler or of PyTorch decompose into ``op`` and maybe others."""
    decided: dict[object, bool] = {}
    known = [*torch._decomp.decomposition_table.items(), *core_table().items()]
    rules: dict[Any, Callable[..., object]] = {func: rule for func, rule in known if str(func) != op}

    def wanted(func: Any, args: Any, kwargs: Any) -> bool:
        if func not in decided:
            trace = make_fx(
                lambda: func(*args, **kwargs),
                decomposition_table=rules,
                tracing_mode="fake",
                _allow_non_fake_inputs=True,
            )
            decided[func] = any(str(node.target) == op for node in trace().graph.nodes)
        return decided[func]

    return wanted


def _nothing(*_: object) -> bool:
    return False


class _CallTracer(TorchDispatchMode):
    """Dispatch mode that stores the location of the first op that is ``wanted`` or has a result of one of ``dtypes``."""

    def __init__(self, wanted: Wanted = _nothing, dtypes: Collection[torch.dtype] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.place = SourceLocation()
        self._wanted, self._dtypes = wanted, dtypes
        self._calls: list[tuple[nn.Module, str]] = []  # the modules that are running, each with its path
        self._forward: dict[int, tuple[str, str]] = {}  # module and line of each gradient's forward op

    def enter(self, module: nn.Module) -> None:
        self._calls.append((module, _path(module, self._calls)))

    def leave(self) -> None:
        self._calls.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        place = self._place(str(func))
        if self.place == SourceLocation() and self._wanted(func, args, kwargs or {}):
            self.place = place
        result = func(*args, **(kwargs or {}))
        made = (item for item in pytree.tree_leaves(result) if isinstance(item, Tensor))
        if self.place == SourceLocation() and any(item.dtype in self._dtypes for item in made):
            self.place = place
        return result

    def _place(self, op: str) -> SourceLocation:
        gradient = torch._C._current_autograd_node()
        if gradient is not None:
            return SourceLocation(op, *self._forward.get(gradient._sequence_nr(), ("", "")), backward=True)
        here = (self._module(), _source())
        # Autograd has just numbered the node of this op; an op without one must not take the last one's place.
        self._forward.setdefault(torch.autograd._get_sequence_nr() - 1, here)
        return SourceLocation(op, *here)

    def _module(self) -> str:
        """Return the dotted path and the class of the innermost running module; "" outside of all modules."""
        if not self._calls:
            return ""
        module, path = self._calls[-1]
        node = _generated_node(module)
        if node is not None and module_of(node):
            return module_of(node)
        return f"{path} ({type(module).__name__})" if path else type(module).__name__


def _path(module: nn.Module, calls: list[tuple[nn.Module, str]]) -> str:
    """Return the dotted path of ``module``: its name in the nearest caller that contains it, after the caller's path.

    A module may be registered under several names; ``calls``, the running modules with their paths, decide between them.
    """
    for caller, path in reversed(calls):
        for name, inner in caller.named_modules(remove_duplicate=False):
            if inner is module:
                return ".".join(part for part in (path, name) if part)
    return ""


def _source() -> str:
    """Return ``file:line`` of the innermost frame of the user's code between the function and the op.

    A frame of code that was generated from a graph counts as the line that the graph was traced from. Without a frame of
    the user, return the innermost frame of edgefl outside the compiler; "" if edgefl only runs models there.
    """
    own: str | None = None
    for frame, line in traceback.walk_stack(None):
        path = Path(frame.f_code.co_filename)
        if frame.f_code is _run_watched.__code__:
            break
        node = node_at(frame, line)
        if node is not None and source_of(node):
            return source_of(node)
        if is_user_code(path):
            return f"{path}:{line}"
        if own is None and path.exists() and not _within(_ROOMS, path):
            own = "" if _within(_RUNNERS, path) else f"{path}:{line}"
    return own or ""


def is_compiler(path: Path) -> bool:
    """Return True if ``path`` lies in the folder of torch or of the compiler, after resolving symbolic links."""
    return _within(_ROOMS, path)


def _within(rooms: tuple[Path, ...], path: Path) -> bool:
    resolved = path.resolve()
    return any(room in (resolved, *resolved.parents) for room in rooms)


def _generated_node(module: nn.Module) -> fx.Node | None:
    """Return the graph node that the generated code of ``module`` executes now; None if its code is not generated."""
    frames = traceback.walk_stack(None)
    return next(
        (node_at(frame, line) for frame, line in frames if frame.f_locals.get("self") is module), None
    )
