"""Trial run of a user's loss function, so that a loss that no graph can hold is refused before anything is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any
from weakref import finalize

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from edgefl.contract.tensors import TensorSpec
from edgefl.errors import ModelError
from edgefl.models.caches import Snapshot, kept
from edgefl.models.references import References
from edgefl.models.user_code import blamed, defined_at, place

_Function = Callable[[Tensor, Tensor], Tensor]
_MOST_ROWS, _MOST_ENTRIES = 64, 2**20
_CLOSE = 1e-4


@dataclass(frozen=True)
class Trial:
    """Result of a trial run: the label of one sample, and whether the loss of a sample depends on that sample alone."""

    labels: TensorSpec
    separable: bool


_trials: dict[tuple[object, ...], tuple[_Function | None, Trial]] = {}


def try_loss(function: _Function, name: str, out: TensorSpec, labels: TensorSpec, alone: _Function) -> Trial:
    """Run ``function`` on random outputs and labels and return what it is; remembered for each function object.

    Args:
        function: The user's function (outputs, labels) -> one loss or one per sample.
        name: Its name, for errors.
        out: Output of one sample.
        labels: Label of one sample.
        alone: Evaluation of the same function, one value per sample.

    Raises:
        ModelError: The function fails, returns something else than a loss, has no gradient, keeps state, draws random
            numbers, holds trained parameters, or takes values out of tensors.
    """
    # A bound method is another object each time.
    owner, code = (
        (function.__self__, function.__func__) if isinstance(function, MethodType) else (function, None)
    )
    key = (id(owner), id(code), out, labels)
    if key not in _trials:
        trial, held = _tried(function, name, out, labels, alone), None
        try:
            finalize(owner, _trials.pop, key, None).atexit = False
        except TypeError:  # nothing tells when it goes, so it is kept, for no other object to get its id
            held = function
        _trials[key] = held, trial
    return _trials[key][1]


def _tried(function: _Function, name: str, out: TensorSpec, labels: TensorSpec, alone: _Function) -> Trial:
    outputs, y = draw(out, labels)
    rows = len(outputs)
    # No leaves, as in training: a function may write into the outputs.
    given = [(outputs.clone().requires_grad_().clone(), y.clone()) for _ in range(3)]
    poisoned = torch.cat((outputs[:1], torch.full_like(outputs[1:], torch.nan)))
    failed = f"the loss {name!r} failed on outputs {out.shape} and labels {labels.shape}"
    with kept(Snapshot(References(function))), torch.enable_grad(), _Traceable(name), _NoDraws(name):
        with blamed(failed, defined_at(function)):
            # The first call may fill caches, such as weights that are made once.
            _check_result(function(*given[0]), name, rows)
            before = Snapshot(References(function))
            values = function(*given[1])
            _check_state(name, before)
            again = function(*given[2])
        if not torch.equal(values.detach().nan_to_num(), again.detach().nan_to_num()):
            raise ModelError(
                f"the loss {name!r} gives another value when it is called again with the same outputs and labels: expected "
                "a function of these alone; leave out random numbers and state",
                loss=name,
            )
        with blamed(f"{failed} of one sample at a time, as evaluation calls it", defined_at(function)):
            apart = alone(outputs, y)
        if values.dim() == 0:
            return Trial(labels, separable=False)
        first = function(poisoned, y.clone())[:1]
    pairs = ((values.detach(), apart), (first, apart[:1]))
    separable = all(torch.allclose(*pair, rtol=_CLOSE, atol=_CLOSE, equal_nan=True) for pair in pairs)
    return Trial(labels, separable)


def draw(out: TensorSpec, labels: TensorSpec) -> tuple[Tensor, Tensor]:
    """Return random outputs and labels of a batch: classes in unequal counts, ignored labels among them.

    The number of rows is no size of a sample, so that a result of that size is one value per sample.
    """
    generator = torch.Generator().manual_seed(0)
    fits = max(3, _MOST_ENTRIES // max(1, torch.Size(out.shape).numel()))
    rows = min(fits, _MOST_ROWS, max(3, 2 * (labels.below or 0) + 1))
    while rows in out.shape or rows in labels.shape:
        rows += 1
    outputs = torch.randn((rows, *out.shape), generator=generator)
    shape = (rows, *labels.shape)
    if labels.dtype.is_floating_point:
        return outputs, torch.rand(shape, generator=generator, dtype=labels.dtype)
    below = labels.below or 2
    # The square of a uniform number prefers small classes; one entry of each class that fits comes first.
    uniform = torch.rand(shape, generator=generator).square()
    y = (uniform * below).to(labels.dtype).clamp_max(below - 1).flatten()
    present = torch.arange(min(below, len(y)), dtype=labels.dtype)
    y[: len(present)] = present
    y = y[torch.randperm(len(y), generator=generator)]
    if labels.ignored is not None:
        y[:: max(2, len(y) // 3)] = labels.ignored
    return outputs, y.reshape(shape)


def _check_result(values: object, name: str, rows: int) -> None:
    if not isinstance(values, Tensor) or values.shape not in ((), (rows,)):
        found = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise ModelError(
            f"the loss {name!r} gives {found} for {rows} samples: expected one number for each, ({rows},), or one for all, "
            "(); reduce other sizes by .mean() or .sum()",
            loss=name,
        )
    if not values.dtype.is_floating_point or not values.requires_grad:
        raise ModelError(
            f"the loss {name!r} has no gradient with respect to the outputs: expected a float tensor computed from them by "
            f"operations that torch differentiates, found {values.dtype}; leave out detach, argmax and comparisons",
            loss=name,
        )


def _check_state(name: str, before: Snapshot) -> None:
    changed = [each.path for each in before.changes()]
    if changed:
        raise ModelError(
            f"the loss {name!r} changes {changed[0]} each time it runs: expected a function of outputs and labels alone, "
            "because a graph holds the first value; compute it from these, or train with the final value",
            loss=name,
            state=tuple(changed),
        )


class _Traceable(TorchFunctionMode):
    """Refuses what a trace does not see: values handed to Python, and untrained parameters."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._loss = name

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        called = getattr(func, "__name__", "")
        if called in ("tolist", "numpy", "__array__"):
            raise ModelError(
                f"{called} takes values out of a tensor, and a graph would have those of the first batch in every step: "
                "compute with tensors alone"
            )
        # A look at requires_grad, shape or data of a parameter computes nothing with it.
        if called not in {"__get__", "detach"}:
            for leaf in pytree.tree_leaves((args, kwargs or {})):
                if isinstance(leaf, Tensor) and (isinstance(leaf, nn.Parameter) or _is_trained(leaf)):
                    raise ModelError(
                        f"the loss {self._loss!r} reads a parameter of shape {tuple(leaf.shape)}: expected outputs, labels "
                        "and constants, because training moves the model's parameters alone; register it as a buffer, "
                        f"take parameter.detach().clone(), or make it a part of the model{place()}",
                        loss=self._loss,
                        shape=tuple(leaf.shape),
                    )
        return func(*args, **(kwargs or {}))


def _is_trained(leaf: Tensor) -> bool:
    return leaf.requires_grad and leaf.is_leaf


class _NoDraws(TorchDispatchMode):
    """Refuses random numbers of torch."""

    def __init__(self, name: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._loss = name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            raise ModelError(
                f"the loss {self._loss!r} draws random numbers ({func}): expected the same value for the same outputs and "
                f"labels; draw in the model's forward instead{place()}",
                loss=self._loss,
            )
        return func(*args, **(kwargs or {}))
