"""What a function computes, as a digest: of the ops that it runs on its example, found without making a graph of them.

Capturing records the same ops in the same order (:mod:`exporters.capture.trace`), and all else that the compiler makes
follows from them and from the ports. So one digest means one graph, wherever the code stands that it comes from; a run
costs a small part of what capturing does.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from edgefl.contract.program import Function
from edgefl.submodels.channels.trace import plain_attention
from exporters.capture.patches import patched


def fingerprint(function: Function) -> str:
    """SHA-256 of the function's name and ports, of every op that it runs with what that reads, and of its results.

    Constants count with their values, inputs by their names alone. Raises whatever the function raises.
    """
    example, recorder = function.example(0), _Recorder()
    with patched(), plain_attention(), recorder:
        recorder.write(function.name, [(name, spec) for name, spec in function.inputs.items()])
        tensors = {name: tensor.clone() for name, tensor in example.items()}
        for tensor in tensors.values():
            recorder.number(tensor)
        results = function(tensors)
        recorder.write("returns", results)
    return recorder.digest()


class _Recorder(TorchDispatchMode):
    """Writes each op into a digest. A tensor is known by its number, counted in the order in which tensors come up."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sum = hashlib.sha256()
        self._numbers: dict[int, int] = {}
        self._alive: list[Tensor] = []  # so that no id is given to a second tensor

    def digest(self) -> str:
        return self._sum.hexdigest()

    def write(self, *values: object) -> None:
        self._sum.update(f"{self._plain(values)}\n".encode())

    def number(self, tensor: Tensor) -> int:
        """The number of ``tensor``, a new one where it has none."""
        if id(tensor) not in self._numbers:
            self._numbers[id(tensor)] = len(self._alive)
            self._alive.append(tensor)
        return self._numbers[id(tensor)]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.write(str(func), args, kwargs or {})
        results = func(*args, **(kwargs or {}))
        for result in results if isinstance(results, tuple | list) else [results]:
            if isinstance(result, Tensor):
                self.number(result)
        return results

    def _plain(self, value: Any) -> object:
        """``value`` as something whose text is the same in each process."""
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, dict):
            return [(key, self._plain(item)) for key, item in value.items()]
        if isinstance(value, tuple | list):
            return [self._plain(item) for item in value]
        if isinstance(value, torch.Generator):
            return "generator"
        return repr(value)

    def _tensor(self, tensor: Tensor) -> object:
        if id(tensor) in self._numbers:
            return ("tensor", self.number(tensor))
        # Nothing made it here: a constant of the function, or a weight of a skeleton, which has no values.
        about = ("constant", self.number(tensor), tuple(tensor.shape), str(tensor.dtype), str(tensor.device))
        return about if tensor.is_meta else (*about, _values(tensor))


def _values(tensor: Tensor) -> str:
    plain = tensor.detach().cpu().contiguous()
    return hashlib.sha256(plain.flatten().view(torch.uint8).numpy().tobytes()).hexdigest()
