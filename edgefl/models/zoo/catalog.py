"""Models by name, and models of the user's own by ``package.module:factory`` or ``path/to/file.py:factory``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from edgefl.contract.tensors import TensorSpec
from edgefl.errors import ModelError
from edgefl.models.losses.catalog import fit_loss
from edgefl.models.losses.exit_loss import ExitLoss
from edgefl.models.losses.loss import Loss
from edgefl.models.spec import ModelSpec
from edgefl.models.split import check_classes, split
from edgefl.models.user_code import defined_at, user_errors
from edgefl.models.user_factory import factory_of, importing_for
from edgefl.models.zoo.basic import bilstm, cnn, elu_mlp, fedbat_cnn, mlp
from edgefl.models.zoo.convnext import convnext
from edgefl.models.zoo.language import lstm_lm
from edgefl.models.zoo.mobilenet import mobilenet
from edgefl.models.zoo.resnet import resnet8, resnet10, resnet18, resnet20
from edgefl.models.zoo.transformer import bert, gpt, vit

MODELS: Mapping[str, Callable[..., ModelSpec]] = {
    "bert": bert,
    "bilstm": bilstm,
    "cnn": cnn,
    "convnext": convnext,
    "elu_mlp": elu_mlp,
    "fedbat_cnn": fedbat_cnn,
    "gpt": gpt,
    "lstm_lm": lstm_lm,
    "mlp": mlp,
    "mobilenet": mobilenet,
    "resnet10": resnet10,
    "resnet18": resnet18,
    "resnet20": resnet20,
    "resnet8": resnet8,
    "vit": vit,
}


# Options that describe the data; a factory gets those that it declares.
_SHAPE_OPTIONS = ("in_channels", "size", "features", "length", "vocabulary", "classes", "sample_shape")
_OUTPUT = "output"


def build_model(name: str, **options: Any) -> ModelSpec:
    """Build a model.

    Args:
        name: a name of :data:`MODELS`, or ``package.module:factory`` or ``path/to/file.py:factory`` of the user's own
            (:func:`build_from_factory`).
        options: options of its function (``seed``, ``classes``, ``in_channels``, ``size``, ...).

    Raises:
        ModelError: wrong name or option; the message lists those that exist.
    """
    return model_trained_on(name, options)


def model_trained_on(
    name: str, options: Mapping[str, Any], loss: Loss | None = None, labels: TensorSpec | None = None
) -> ModelSpec:
    """Build a model for ``loss`` (None: its own, or the one that fits) and ``labels``, one label of the data."""
    if ":" in name:
        own = factory_of(name, "model")
        with importing_for(name):
            return build_from_factory(own, name, options, loss, labels)
    factory = MODELS.get(name)
    if factory is None:
        known = ", ".join(sorted(MODELS))
        raise ModelError(
            f"no model {name!r}; there are: {known}, 'package.module:factory' or 'path/to/file.py:factory'",
            name=name,
            known=known,
        )
    accepted = inspect.signature(factory).parameters
    unknown = sorted(set(options) - set(accepted))
    if unknown:
        raise ModelError(
            f"model {name!r} has no option {unknown[0]!r}; it takes {', '.join(accepted)}",
            unknown=unknown,
            accepted=tuple(accepted),
        )
    return with_loss(factory(**options), loss, labels)


def with_loss(spec: ModelSpec, loss: Loss | None, labels: TensorSpec | None = None) -> ModelSpec:
    """Return ``spec`` with ``loss``, at each of its exits if it has some; None keeps its own.

    Raises:
        ModelError: the loss cannot read the model's output.
    """
    if loss is None:
        return spec
    reading = fit_loss(loss, spec.boundary(len(spec.units)), labels)
    made = replace(
        spec, loss=replace(spec.loss, base=reading) if isinstance(spec.loss, ExitLoss) else reading
    )
    check_classes(made)
    return made


def build_from_factory(
    factory: Callable[..., Any],
    name: str,
    options: Mapping[str, Any],
    loss: Loss | None = None,
    labels: TensorSpec | None = None,
) -> ModelSpec:
    """Build a model by a factory of the user's own.

    Args:
        factory: returns a ModelSpec, an ``nn.Module`` (cut automatically; an ``nn.Sequential`` between its children) or
            ``(nn.Module, cuts)``.
        name: its name, for errors and for the model.
        options: its options. ``sample_shape`` (sizes or a :class:`TensorSpec`; or ``in_channels`` and ``size``),
            ``classes``, ``seed`` and ``output`` (as of :func:`edgefl.models.split.split`) are only passed to a factory
            that has them as parameters.
        loss: as in :func:`model_trained_on`.
        labels: as in :func:`model_trained_on`.

    Raises:
        ModelError: the factory fails or returns something else, with the line of its code.
    """
    seed = int(options.get("seed", 0))
    accepted = inspect.signature(factory).parameters
    read = _SHAPE_OPTIONS if _OUTPUT in accepted else (*_SHAPE_OPTIONS, _OUTPUT)
    layout: dict[str, Any] = {key: options[key] for key in read if key in options}
    passed = {key: value for key, value in options.items() if key in accepted or key not in (*layout, "seed")}
    if "seed" in accepted:
        passed["seed"] = seed
    unknown = [key for key in passed if key not in accepted]
    if unknown and not any(each.kind is each.VAR_KEYWORD for each in accepted.values()):
        raise ModelError(
            f"the factory {name!r} of a model has no option {unknown[0]!r}; it takes {', '.join(accepted) or 'none'}",
            unknown=unknown,
            accepted=tuple(accepted),
        )
    # A factory draws its initial values from torch's global generator: seed it, then put it back as it was.
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        with user_errors(f"the factory {name!r} of a model failed", defined_at(factory)):
            made = factory(**passed)
    return _with_factory_line(factory, lambda: _spec(name, made, layout, loss, labels))


def _with_factory_line(factory: Callable[..., Any], make: Callable[[], ModelSpec]) -> ModelSpec:
    """Return the result of ``make``; add the factory's line to an error that has no line of the user's code."""
    source = defined_at(factory)
    try:
        with user_errors("a module cannot be cut into units", source):
            return make()
    except ModelError as error:
        if error.details.get("source") or not source:
            raise
        raise ModelError(
            f"{error.message} (the model's factory is at {source})", **error.details | {"source": source}
        ) from error


def _spec(
    path: str, made: object, options: Mapping[str, Any], loss: Loss | None, labels: TensorSpec | None
) -> ModelSpec:
    if isinstance(made, ModelSpec):
        return with_loss(replace(made, name=made.name or path), loss, labels)
    module, cuts = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(module, nn.Module):
        raise ModelError(
            f"{path!r} must return a ModelSpec, an nn.Module or (nn.Module, cuts); "
            f"found {type(module).__name__}",
            name=path,
        )
    missing = [] if "classes" in options else ["'classes'"]
    if not {"sample_shape"} <= options.keys() and not {"in_channels", "size"} <= options.keys():
        missing.append("'sample_shape' (that of one sample, such as [1, 28, 28])")
    if missing:
        raise ModelError(
            f"model {path!r} returns a plain module, which does not say what it is for; give the option"
            f"{'s' * (len(missing) > 1)} {' and '.join(missing)}",
            name=path,
        )
    return split(
        module,
        cuts,
        sample=_sample(path, options),
        classes=int(options["classes"]),
        name=path,
        loss=loss,
        labels=labels,
        output=options.get(_OUTPUT),
    )


def _sample(path: str, options: Mapping[str, Any]) -> TensorSpec | Mapping[str, TensorSpec]:
    shape = options.get("sample_shape")
    if isinstance(shape, TensorSpec | Mapping):
        return shape
    if "sample_shape" in options:
        return TensorSpec(tuple(int(size) for size in options["sample_shape"]))
    size = int(options["size"])
    return TensorSpec((int(options["in_channels"]), size, size))
