"""Losses defined by the user: a function, or the loss that the model computes itself."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import MethodType
from typing import Any, NoReturn
from weakref import finalize

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl.errors import ModelError
from edgefl.models.losses.loss import Loss
from edgefl.models.python_state.references import StateSearch
from edgefl.models.python_state.snapshots import Snapshot, restoring
from edgefl.models.torch_functions.rules import RewriteMode
from edgefl.models.user_code import at_line, defined_at, user_errors

_Function = Callable[[Tensor, Tensor], Tensor]
_MOST_ROWS, _MOST_ENTRIES = 64, 2**20
_CLOSE = 1e-4


@dataclass(frozen=True)
class LossTrial:
    """Result of running a user's loss on random data.

    Attributes:
        labels: Spec of one sample's label.
        separable: True if the loss of a sample does not depend on the other samples.
    """

    labels: TensorSpec
    separable: bool


_trials: dict[tuple[object, ...], tuple[_Function | None, LossTrial]] = {}


def try_loss(
    function: _Function, name: str, out: TensorSpec, labels: TensorSpec, alone: _Function
) -> LossTrial:
    """Run a user's loss on random outputs and labels, and check its result. The result is cached per function object.

    Args:
        function: User's function (outputs, labels), which returns one loss or one per sample.
        name: Its name, for errors.
        out: Spec of one output sample.
        labels: Spec of one sample's label.
        alone: Function (outputs, labels) that evaluates ``function`` on each sample separately.

    Raises:
        ModelError: The function fails, returns something other than a loss, has no gradient, has state, draws random
            numbers, contains trained parameters, or reads values of tensors in Python.
    """
    # A bound method is another object each time.
    owner, code = (
        (function.__self__, function.__func__) if isinstance(function, MethodType) else (function, None)
    )
    key = (id(owner), id(code), out, labels)
    if key not in _trials:
        trial, held = _try_once(function, name, out, labels, alone), None
        try:
            finalize(owner, _trials.pop, key, None).atexit = False
        except TypeError:  # no weak reference: keep it alive, so that no other object gets its id
            held = function
        _trials[key] = held, trial
    return _trials[key][1]


def _try_once(
    function: _Function, name: str, out: TensorSpec, labels: TensorSpec, alone: _Function
) -> LossTrial:
    """Run the checks of :func:`try_loss` without the cache, and return their result.

    Raises:
        ModelError: The function is no usable loss.
    """
    outputs, y = draw(out, labels)
    rows = len(outputs)
    # No leaves, as in training: a function may write into the outputs.
    given = [(outputs.clone().requires_grad_().clone(), y.clone()) for _ in range(3)]
    poisoned = torch.cat((outputs[:1], torch.full_like(outputs[1:], torch.nan)))
    failed = f"the loss {name!r} failed on outputs {out.shape} and labels {labels.shape}"
    with (
        restoring(Snapshot(StateSearch(function))),
        torch.enable_grad(),
        _LossTrialMode(name),
        _NoRandomMode(name),
    ):
        with user_errors(failed, defined_at(function)):
            # The first call may fill caches, such as weights that are made once.
            _check_result(function(*given[0]), name, rows)
            before = Snapshot(StateSearch(function))
            values = function(*given[1])
            _check_state(name, before)
            again = function(*given[2])
        if not torch.equal(values.detach().nan_to_num(), again.detach().nan_to_num()):
            raise ModelError(
                f"the loss {name!r} gives another value when it is called again with the same outputs and labels: expected "
                "a function of these alone; leave out random numbers and state",
                loss=name,
            )
        with user_errors(f"{failed} of one sample at a time, as evaluation calls it", defined_at(function)):
            apart = alone(outputs, y)
        if values.dim() == 0:
            return LossTrial(labels, separable=False)
        first = function(poisoned, y.clone())[:1]
    pairs = ((values.detach(), apart), (first, apart[:1]))
    separable = all(torch.allclose(*pair, rtol=_CLOSE, atol=_CLOSE, equal_nan=True) for pair in pairs)
    return LossTrial(labels, separable)


def draw(out: TensorSpec, labels: TensorSpec) -> tuple[Tensor, Tensor]:
    """Return (outputs, labels) of a random batch, always the same for equal arguments.

    Classes occur in unequal numbers, and some labels are ignored ones. The batch size differs from every dimension of a
    sample, so that a result with that size must be one value per sample.

    Args:
        out: Spec of one output sample.
        labels: Spec of one sample's label.
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
    """Raise ModelError unless ``values`` is a differentiable float tensor of shape () or (rows,).

    ``values`` is what the loss ``name`` returned for ``rows`` samples.
    """
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
    """Raise ModelError if the function has changed Python state since the snapshot ``before``. ``name`` is its name."""
    changed = [each.path for each in before.changes()]
    if changed:
        raise ModelError(
            f"the loss {name!r} changes {changed[0]} each time it runs: expected a function of outputs and labels alone, "
            "because a graph holds the first value; compute it from these, or train with the final value",
            loss=name,
            state=tuple(changed),
        )


class _LossTrialMode(TorchFunctionMode):
    """Mode that rejects what a trace cannot capture: tensor values read in Python, and trained parameters in the loss."""

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
                        f"take parameter.detach().clone(), or make it a part of the model{at_line()}",
                        loss=self._loss,
                        shape=tuple(leaf.shape),
                    )
        return func(*args, **(kwargs or {}))


def _is_trained(leaf: Tensor) -> bool:
    return leaf.requires_grad and leaf.is_leaf


class _NoRandomMode(TorchDispatchMode):
    """Mode that rejects operations that draw random numbers."""

    def __init__(self, name: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._loss = name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            raise ModelError(
                f"the loss {self._loss!r} draws random numbers ({func}): expected the same value for the same outputs and "
                f"labels; draw in the model's forward instead{at_line()}",
                loss=self._loss,
            )
        return func(*args, **(kwargs or {}))


Function = Callable[[Tensor, Tensor], Tensor]
_OF_CLASSES = (nn.CrossEntropyLoss, nn.NLLLoss, nn.MultiMarginLoss)
_OF_NUMBERS = (
    nn.MSELoss,
    nn.L1Loss,
    nn.SmoothL1Loss,
    nn.HuberLoss,
    nn.BCEWithLogitsLoss,
    nn.BCELoss,
    nn.PoissonNLLLoss,
)


@dataclass(frozen=True)
class OwnLoss:
    """Loss computed by ``function(out, y)`` from outputs (B, ...) and labels (B, ...).

    The function returns one value, (), as ``nn.CrossEntropyLoss(weight=...)`` does, or one value per sample, (B,).
    Training minimises the value, or the mean of the values, of the whole batch. So class weights, ignored labels, sums
    and terms between samples train as in torch. Evaluation pads its last batch, so it calls the function with one
    sample at a time and averages. A sample whose label alone makes the value NaN, such as one with only ignored labels,
    has loss 0 there.

    Args:
        function: Function, ``functools.partial``, bound method, or ``nn.Module`` without trained parameters. Hidden
            state and random numbers are rejected.
        labels: Shape and dtype of one sample's label. None: those of the data.
    """

    function: Function
    labels: TensorSpec | None = None

    @property
    def name(self) -> str:
        """Name of the function."""
        bare = self.function.func if isinstance(self.function, partial) else self.function
        return getattr(bare, "__name__", type(bare).__name__)

    def with_labels(self, labels: TensorSpec | None, out: TensorSpec) -> OwnLoss:
        """Return this loss if it has labels, else a copy with the labels of the data.

        Args:
            labels: Spec of one label of the data. None: unknown; for a loss module of torch they are derived from the
                output.
            out: Spec of one output sample.
        """
        if self.labels is not None:
            return self
        return replace(self, labels=labels or _labels_of(self.function, out))

    def batch_loss(self, out: Tensor, y: Tensor) -> Tensor:
        """Return the training loss of a whole batch, ()."""
        with RewriteMode():
            values = self.function(out, y)
        return values if values.dim() == 0 else values.mean()

    def is_separable(self, out: TensorSpec) -> bool:
        """Return True if the function returns one loss per sample that does not depend on the other samples.

        Runs the function on random data of the shape of ``out``, the spec of one output sample; the result is cached.

        Raises:
            ModelError: The labels are unknown, or the function is no usable loss.
        """
        return self._try_once(out).separable

    def each(self, out: Tensor, y: Tensor) -> Tensor:
        """Return the loss of each sample evaluated separately, (B,). For evaluation.

        A sample whose label alone makes the value NaN has loss 0.
        """
        with RewriteMode():
            values, reduced = _one_by_one(self.function, out, y)
            if not reduced:
                return values
            # 0 / 0 of a mean over no label. NaN of a diverged model must stay, so constant outputs decide.
            blank, _ = _one_by_one(self.function, torch.ones_like(out), y)
        empty = torch.logical_and(blank.isnan(), values.isnan())
        return torch.where(empty, torch.zeros_like(values), values)

    def correct(self, out: Tensor, y: Tensor) -> Tensor:
        """Return zeros (B,), because the function does not define correct predictions."""
        return torch.zeros(len(out), dtype=torch.float32, device=out.device)

    def label(self, out: TensorSpec) -> TensorSpec:
        return self._try_once(out).labels

    def metrics(self, out: TensorSpec) -> tuple[str, ...]:
        return ()

    def sums(self, out: Tensor, y: Tensor) -> Tensors:
        return {}

    def _try_once(self, out: TensorSpec) -> LossTrial:
        """Run the function once on random data, and return the result, which is cached.

        Raises:
            ModelError: The labels are unknown, or the function is no usable loss (:func:`try_loss`).
        """
        if self.labels is None:
            raise ModelError(
                f"the loss {self.name!r} does not say what labels it reads: give `data`, or "
                f"edgefl.losses.own_loss({self.name}, labels=...) with the TensorSpec of one sample's label",
                loss=self.name,
            )
        return try_loss(self.function, self.name, out, self.labels, self.each)


def own_loss(function: Function | Loss, labels: TensorSpec | None = None) -> Loss:
    """Return a loss made of a function, or of a loss module of torch.

    Example::

        edgefl.losses.own_loss(nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 0.2])))

    Args:
        function: Maps outputs (B, ...) and labels (B, ...), int64 or float32, to one loss, (), or one per sample, (B,).
            A :class:`~edgefl.models.losses.loss.Loss` is returned unchanged.
        labels: Shape and dtype of one sample's label. None: those of the data.

    Returns:
        The loss; see :class:`OwnLoss` for its use in training and evaluation.
    """
    return function if isinstance(function, Loss) else OwnLoss(function, labels)


def _labels_of(function: Function, out: TensorSpec) -> TensorSpec | None:
    """Return the spec of one label that a loss module of torch reads with outputs ``out``, or None if it is unknown."""
    if isinstance(function, _OF_CLASSES) and out.shape:
        places = out.shape[1:]
        ignored: int | None = getattr(function, "ignore_index", None)
        # -100 is the default also where each sample has a class.
        return TensorSpec(
            places, torch.int64, out.shape[0], None if ignored == -100 and not places else ignored
        )
    return TensorSpec(out.shape, torch.float32) if isinstance(function, _OF_NUMBERS) else None


def _one_by_one(function: Function, out: Tensor, y: Tensor) -> tuple[Tensor, bool]:
    """Evaluate ``function`` on each sample separately.

    Returns:
        (loss of each sample (B,), True if the function reduces a batch to one value).
    """
    reduced = False

    def alone(row: Tensor, label: Tensor) -> Tensor:
        nonlocal reduced
        # Some functions write into the labels, which are needed again.
        value = function(row.unsqueeze(0), label.unsqueeze(0).clone())
        reduced = value.dim() == 0
        return value.reshape(())

    try:
        with warnings.catch_warnings():
            # An op without a batching rule runs row by row, which is slow but right; a deviation of one row is NaN.
            warnings.simplefilter("ignore")
            values: Tensor = torch.vmap(alone)(out, y)
    except (RuntimeError, NotImplementedError):  # custom gradients, writes into tensors, lengths as lists
        values = torch.stack([alone(*pair) for pair in zip(out.unbind(), y.unbind(), strict=True)])
    return values, reduced


@dataclass(frozen=True)
class ModelLoss:
    """Loss that a module returns besides its output if its forward gets labels, as models of transformers do.

    When the module is split, the loss is extracted from its graph and becomes an :class:`OwnLoss`. It must be computed
    from the output and the labels alone, and equally in training and inference. The data define shape and dtype of a
    label. Labels to ignore must be those that the model ignores, often -100.

    Attributes:
        labels: Name of forward's argument for labels.
        key: Key or attribute of the loss in the returned value.
    """

    labels: str = "labels"
    key: str = "loss"

    def each(self, out: Tensor, y: Tensor) -> NoReturn:
        raise self._refusal()

    def correct(self, out: Tensor, y: Tensor) -> NoReturn:
        raise self._refusal()

    def label(self, out: TensorSpec) -> NoReturn:
        raise self._refusal()

    def label_of_data(self, label: TensorSpec | None) -> TensorSpec:
        """Return ``label``, the spec of one label of the data.

        Raises:
            ModelError: ``label`` is None, because there are no data.
        """
        if label is None:
            raise ModelError(
                "the loss `model` does not say what labels it reads: give `data`, or the TensorSpec of one sample's label "
                "as `labels` of edgefl.submodels.split"
            )
        return label

    def _refusal(self) -> ModelError:
        """Return the error for a model that consists of units (stages of the model) already, from which no loss can be
        extracted.
        """
        return ModelError(
            "the loss `model` is what an nn.Module returns when it is given labels; this model is made of units already: "
            "name another loss"
        )
