"""Submodel of a trained global model as a plain module for inference, of any type and size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from edgefl.contract.algorithm import Function
from edgefl.contract.tensors import Tensors, TensorSpec, arrays, prefixed, select
from edgefl.errors import ModelError
from edgefl.models.copies import copy_module
from edgefl.models.counters import restore_counters
from edgefl.models.inputs import call_with_inputs
from edgefl.models.losses.loss import Loss, metrics_of, sums_of
from edgefl.models.spec import ModelSpec
from edgefl.submodels.submodel import Submodel
from edgefl.wire.metrics import add_sums, compute_metrics
from edgefl.wire.tensors import Array

FIRST_ROUND = 1
"""Round of a deployed rolling window."""


def standalone(
    submodel: Submodel,
    weights: Mapping[str, Array],
    number: int = FIRST_ROUND,
    inference: Function | None = None,
) -> nn.Sequential:
    """Return the module of ``submodel`` with its part of ``weights``, in inference mode, for use without the server.

    The size need not have been trained. Entries that the submodel lacks are zero if its tensors keep their shape. For a
    submodel with frozen units (stages of the model) the result is the whole model.

    Args:
        submodel: Submodel of any kind.
        weights: Global weights, by name.
        number: Round for which a rolling window is taken.
        inference: Inference function of the algorithm that trained the submodel; None: it has none.

    Raises:
        ModelError: ``weights`` have other names or shapes than the submodel's model.
    """
    _check(submodel.spec, weights)
    whole = bool(submodel.prefix)
    made = copy_module(submodel.spec.module if whole else submodel.suffix).eval().requires_grad_(False)
    tensors = _tensors(weights) if whole else _read(submodel, weights, number, inference)
    made.load_state_dict({name: tensors[name] for name in made.state_dict()})
    restore_counters(made)
    return made


def scores(module: nn.Sequential, loss: Loss, batches: Iterable[Tensors]) -> dict[str, float]:
    """Return the metrics of ``loss`` and the loss itself, by name, over the rows of all ``batches``. Without batches
    return {}.

    Args:
        module: Model in inference mode.
        loss: Loss, which defines the metrics.
        batches: Batches by name: inputs, the first as ``x``, and labels ``y``.
    """
    return scores_of(partial(call_with_inputs, module), loss, batches)


@torch.inference_mode()
def scores_of(
    forward: Callable[[Tensors], Tensor], loss: Loss, batches: Iterable[Tensors]
) -> dict[str, float]:
    """Return the metrics of ``loss`` and the loss itself, by name, for a model that is given as a function.

    Without batches return {}.

    Args:
        forward: Function from a batch (tensors by name) to the model's output, such as the run of a deployed
            file.
        loss: Loss, which defines the metrics.
        batches: Batches by name: inputs, the first as ``x``, and labels ``y``.
    """
    sums: dict[str, Array] = {}
    names: tuple[str, ...] = ()
    for batch in batches:
        out, y = forward(batch), batch["y"]
        sums = add_sums(sums, arrays(sums_of(loss, out, y, torch.ones(len(y), device=y.device))))
        names = metrics_of(loss, TensorSpec(tuple(out.shape[1:]), out.dtype))
    return compute_metrics(names, sums) if sums else {}


def _read(
    submodel: Submodel, weights: Mapping[str, Array], number: int, inference: Function | None
) -> Tensors:
    """Return the tensors that the submodel's trained units (stages of the model) use in inference, by local name.

    Args:
        submodel: Submodel without frozen units.
        weights: Global weights, by name.
        number: Round for which a rolling window is taken.
        inference: Inference function of the algorithm, or None.
    """
    local = _tensors(submodel.place(weights, number).payload or weights)
    if inference is not None:
        given = prefixed("weights", local)
        with torch.no_grad():
            return local | select(inference({name: given[name] for name in inference.inputs}), "weights")
    if submodel.carrier is None:
        return local
    with torch.no_grad():
        local_weights, gates = submodel.carrier.unpack(
            {name: local[name] for name in submodel.carrier.payload}
        )
        return local_weights | submodel.carrier.effective(local_weights, gates, {}, training=False)


def _tensors(arrays: Mapping[str, Array]) -> Tensors:
    return {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}


def _check(spec: ModelSpec, weights: Mapping[str, Array]) -> None:
    """Raise ModelError unless ``weights`` have the names and shapes of the model's."""
    expected = {name: tuple(tensor.shape) for name, tensor in spec.weights.items()}
    shapes = {name: array.shape for name, array in weights.items()}
    wrong = sorted(name for name in expected.keys() | shapes.keys() if expected.get(name) != shapes.get(name))
    if wrong:
        name = wrong[0]
        raise ModelError(
            f"the weights are not those of {spec.name}: {name!r} should have shape {expected.get(name, 'none')}, found "
            f"{shapes.get(name, 'none')} ({len(wrong)} tensors differ); name the federation file that they were trained "
            "with",
            wrong=wrong,
        )
