"""Losses by name, as federation files name them, and the default loss of a model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from edgefl.contract.options import check_options
from edgefl.contract.tensors import TensorSpec
from edgefl.errors import ConfigError, ModelError
from edgefl.models.losses.classification import (
    CROSS_ENTROPY,
    BinaryCrossEntropy,
    CausalLM,
    CrossEntropy,
    SequenceCrossEntropy,
)
from edgefl.models.losses.contrastive import InfoNCE, NTXent
from edgefl.models.losses.ctc import CTC
from edgefl.models.losses.loss import Loss
from edgefl.models.losses.own import ModelLoss, OwnLoss
from edgefl.models.losses.regression import AbsoluteError, Huber, Quantile, SquaredError
from edgefl.models.user_code import user_errors
from edgefl.models.user_factory import factory_of, importing_for

LOSSES: Mapping[str, Callable[..., Loss]] = {
    "cross_entropy": CrossEntropy,
    "sequence_cross_entropy": SequenceCrossEntropy,
    "causal_lm": CausalLM,
    "binary_cross_entropy": BinaryCrossEntropy,
    "squared_error": SquaredError,
    "absolute_error": AbsoluteError,
    "huber": Huber,
    "quantile": Quantile,
    "info_nce": InfoNCE,
    "nt_xent": NTXent,
    "ctc": CTC,
    "model": ModelLoss,
}

_POSITIONAL = 2  # (out, y)


def build(name: str, **options: Any) -> Loss:
    """Return the loss with a name and options, as a federation file has them.

    Args:
        name: Key of :data:`LOSSES`, or ``file.py:function`` of the user's own: ``function(out, y, **options)`` as in
            :class:`~edgefl.models.losses.own.OwnLoss`, or a class with the methods of a
            :class:`~edgefl.models.losses.loss.Loss`.
        options: Options of the loss.

    Raises:
        ConfigError: The name or an option is unknown. The message lists the known ones.
        ModelError: The value of an option is out of range.
    """
    if ":" in name:
        return _build_own(name, options)
    factory = LOSSES.get(name)
    if factory is None:
        known = ", ".join(LOSSES)
        raise ConfigError(
            f"no loss {name!r}; there are: {known}, or 'path/to/file.py:function'", name=name, known=known
        )
    check_options(f"loss {name!r}", factory, options, upon=0)
    try:
        return factory(**options)
    except TypeError as error:  # an option without a default
        raise ConfigError(f"loss {name!r} needs options: {error}", name=name) from error


def _build_own(name: str, options: Mapping[str, Any]) -> Loss:
    """Return the loss of a user's function or class, imported by its address ``file.py:function``.

    Raises:
        ConfigError: There is no such function, an option is unknown, or the class has no method of a loss.
        ModelError: The class fails.
    """
    made = factory_of(name, "loss")
    if not inspect.isclass(made):
        check_options(f"loss {name!r}", made, options, upon=_POSITIONAL)
        return OwnLoss(partial(made, **options) if options else made)
    check_options(f"loss {name!r}", made, options, upon=0)
    with user_errors(f"the class {name!r} of a loss failed"), importing_for(name):
        loss = made(**options)
    if isinstance(loss, Loss):
        return loss
    if callable(loss):
        return OwnLoss(loss)
    raise ConfigError(
        f"loss {name!r} is a class without the methods each, correct and label: give it these or __call__(out, y), or name "
        "a function (out, y) -> one loss, or one per sample",
        name=name,
    )


@dataclass(frozen=True)
class TokenLabels(TensorSpec):
    """Spec of labels that are tokens of a sequence.

    ``are`` is ``tokens`` if the labels are the input tokens themselves, ``next`` if they are the token after each of them.
    """

    are: Literal["tokens", "next"] = "tokens"


def fit_loss(
    loss: Loss | None, out: TensorSpec, labels: TensorSpec | None = None, sample: TensorSpec | None = None
) -> Loss:
    """Return the loss to train a model with.

    Args:
        loss: Loss that the user chose, or None for the one that fits.
        out: Spec of one output sample. (classes,) with unknown labels means classification.
        labels: Spec of one label of the data. None: unknown.
        sample: Spec of one sample of the input. None: unknown.

    Returns:
        ``loss`` (with these labels if it is a function of the user's), or the only loss that fits.

    Raises:
        ModelError: ``loss`` is None, and several losses fit, or none. The message lists them.
    """
    if loss is not None:
        return loss.with_labels(labels, out) if isinstance(loss, OwnLoss) else loss
    if labels is None and len(out.shape) == 1:
        return CROSS_ENTROPY
    names = fitting_losses(out, labels, sample)
    if isinstance(labels, TokenLabels) and "causal_lm" in names:
        return CausalLM(ignore_index=labels.ignored, shift=labels.are == "tokens")
    if len(names) == 1:
        ignored = None if labels is None else labels.ignored
        return build(names[0]) if ignored is None else build(names[0], ignore_index=ignored)
    described = "" if labels is None else f" and labels are {_describe_labels(labels)}"
    remedy = "no loss of edgefl fits" if not names else f"name the loss: {', '.join(names)} fit"
    raise ModelError(
        f"the model gives {out.shape} per sample{described}: {remedy}; a function (out, y) -> one loss per sample does, too",
        found=out.shape,
        losses=names,
    )


def fitting_losses(
    out: TensorSpec, labels: TensorSpec | None, sample: TensorSpec | None = None
) -> tuple[str, ...]:
    """Return the names of the losses that can read these outputs and labels; () if none can.

    Args:
        out: Spec of one output sample.
        labels: Spec of one label of the data. None: unknown.
        sample: Spec of one sample of the input. None: unknown. A floating input excludes ``causal_lm``.
    """
    tokens = sample is None or not sample.dtype.is_floating_point
    return tuple(name for name in LOSSES if _reads(name, out, labels) and (name != "causal_lm" or tokens))


def _reads(name: str, out: TensorSpec, labels: TensorSpec | None) -> bool:
    """Return True if the loss ``name`` can read outputs and labels with these specs. Unknown labels (None) fit any loss."""
    if name == "ctc":  # the only one whose labels have a length of their own
        return len(out.shape) == 2 and (labels is None or _are_shorter(labels, out))
    try:
        expected = build(name).label(out)
    except ModelError:
        return False
    if labels is None:
        return True
    if labels.ignored is not None and "ignore_index" not in inspect.signature(LOSSES[name]).parameters:
        return False
    return (
        expected.shape == labels.shape and expected.dtype.is_floating_point == labels.dtype.is_floating_point
    )


def _are_shorter(labels: TensorSpec, out: TensorSpec) -> bool:
    """Return True if labels are integer sequences that are shorter than the sequence of outputs."""
    return not labels.dtype.is_floating_point and len(labels.shape) == 1 and labels.shape[0] < out.shape[0]


def _describe_labels(labels: TensorSpec) -> str:
    return f"{str(labels.dtype).removeprefix('torch.')} {labels.shape}"
