"""Integer buffers that a module's forward both reads and changes, such as a step counter for a warm-up.

Devices train and average floats only. Such a buffer therefore becomes float32 state, and is rounded before the module's
code reads it. Integer buffers that nothing reads, such as the counter of a batch norm, are not part of the state.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl.models.modes import in_mode

_NOTE = "edgefl_counters"


def find_moved_buffers(module: nn.Module, run: Any, sample: TensorSpec) -> frozenset[str]:
    """Return the names of the non-persistent buffers that a training pass both changes and computes with.

    Args:
        module: Module.
        run: Function (module, sample, watch) that runs the module on tensors without values, such as
            :func:`edgefl.models.spec.run_fake`. ``watch`` is a :class:`BufferWatch`.
        sample: One sample of its input, without batch dimension.

    Returns:
        Names of the buffers; empty if the run fails, because the later trace reports the error better.
    """
    state = module.state_dict(keep_vars=True).keys()
    others = [name for name, _ in module.named_buffers() if name not in state]
    if not others:
        return frozenset()
    watch = BufferWatch(others)
    try:
        with in_mode(module, training=True):
            run(module, sample, watch)
    except Exception:  # the trace of the module reports it
        return frozenset()
    return frozenset((watch.written | watch.replaced()) & watch.read)


class BufferWatch(TorchDispatchMode):
    """Mode that records which buffers the operations of a run read and write.

    Call :meth:`watch` with the tensors of the run, then run the module inside the mode.

    Args:
        buffers: Names of the buffers to watch.

    Attributes:
        written: Names of the buffers that an operation writes to.
        read: Names of the buffers that an operation reads, except to write the same buffer.
    """

    def __init__(self, buffers: Collection[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.written: set[str] = set()
        self.read: set[str] = set()
        self._buffers = buffers
        self._tensors: Tensors = {}
        self._before: Tensors = {}
        # Buffers that a tensor was computed from, and those whose memory it is.
        self._sources: Any = WeakTensorKeyDictionary()
        self._memory: Any = WeakTensorKeyDictionary()

    def watch(self, tensors: Tensors) -> Self:
        """Set the module's tensors in the next run, by name, and return this mode.

        The run may replace entries of ``tensors``.
        """
        self._tensors, self._before = tensors, dict(tensors)
        for name in self._buffers:
            self._sources[tensors[name]] = self._memory[tensors[name]] = frozenset({name})
        return self

    def replaced(self) -> set[str]:
        """Return the names of the watched buffers that the run replaced by other tensors."""
        return {name for name in self._buffers if self._tensors[name] is not self._before[name]}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        sources = self._union(self._sources, tensors)
        result = func(*args, **(kwargs or {}))
        results = [each for each in pytree.tree_leaves(result) if isinstance(each, Tensor)]
        if func._schema.is_mutable:
            own = self._union(self._memory, tensors[:1])
            self.written |= own
            self.read |= sources - own
        elif any(each.is_floating_point() or each.dtype is torch.bool for each in results):
            self.read |= sources
        elif len(tensors) > 1:
            self.read |= self._union(self._sources, tensors[1:])
        shares_memory = any(each.alias_info is not None for each in func._schema.returns)
        memory = self._union(self._memory, tensors) if shares_memory else frozenset()
        for each in results:
            self._sources[each] = sources
            self._memory[each] = memory
        return result

    @staticmethod
    def _union(names: Any, tensors: list[Tensor]) -> frozenset[str]:
        """Return the union of the sets of buffer names that the table ``names`` has for ``tensors``."""
        return frozenset[str]().union(*(names.get(each, frozenset()) for each in tensors))


def note_counters(module: nn.Module, names: Collection[str]) -> None:
    """Convert the named integer buffers of ``module`` to float32, in place. Named buffers of floats are not changed.

    The original dtype is noted in the module that owns the buffer.
    """
    for name in names:
        path, _, own = name.rpartition(".")
        part = module.get_submodule(path)
        buffer = part._buffers[own]
        assert buffer is not None
        if buffer.is_floating_point():
            continue
        part._buffers[own] = buffer.to(torch.float32)
        part.__dict__[_NOTE] = {**part.__dict__.get(_NOTE, {}), own: buffer.dtype}


def counter_dtypes(module: nn.Module) -> dict[str, torch.dtype]:
    """Return the original dtype of each buffer that :func:`note_counters` converted, by its path in ``module``."""
    return {f"{path}.{own}" if path else own: dtype for path, _, own, dtype in _converted_buffers(module)}


def restore_counters(module: nn.Module) -> None:
    """Convert the buffers of :func:`note_counters` back to rounded integers, in place.

    Used for a module whose code runs directly, without a training graph.
    """
    for _, part, own, dtype in _converted_buffers(module):
        buffer = part._buffers[own]
        assert buffer is not None
        part._buffers[own] = buffer.round().to(dtype)


def round_counters(tensors: Tensors, types: Mapping[str, torch.dtype]) -> Tensors:
    """Return the tensors that ``types`` names, rounded and converted to its dtypes, by name.

    Names that ``tensors`` lacks are skipped; other tensors are left out.
    """
    return {name: tensors[name].round().to(dtype) for name, dtype in types.items() if name in tensors}


def _converted_buffers(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, torch.dtype]]:
    """Yield (path of a part, the part, name of its buffer, original dtype) for each buffer that was converted to
    float32.
    """
    for path, part in module.named_modules():
        for own, dtype in part.__dict__.get(_NOTE, {}).items():
            yield path, part, own, dtype
