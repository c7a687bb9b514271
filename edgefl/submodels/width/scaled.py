"""HeteroFL's scaler: a narrow model's layers speak as loud in training as the whole model's (fiarse.md 3, 2.9)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from torch import Tensor, nn

from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl.submodels.width.view import View

Hidden = Callable[[str, int], bool]
"""Whether a dimension of a state tensor holds channels that a width cuts."""


def scaler(module: nn.Sequential, ratio: float, hidden: Hidden) -> View:
    """The output of each hidden convolution and dense layer of ``module``, divided by ``ratio`` in training only.

    Dividing weight and bias is the same: the layers are linear. The scale stands before a norm that follows, as in
    HeteroFL. A layer is hidden if a width may cut its outputs; classes are not, so the classifier is as it is.
    """
    divided = frozenset(_divided(module, hidden))

    def through(weights: Tensors, noise: Mapping[str, Tensor]) -> Tensors:
        return {name: w / ratio if name in divided else w for name, w in weights.items()}

    return View({name: TensorSpec.of(tensor) for name, tensor in module.state_dict().items()}, through)


def _divided(module: nn.Sequential, hidden: Hidden) -> Iterator[str]:
    for path, layer in module.named_modules():
        for weight, bias, outputs in _linear(layer):
            name = f"{path}.{weight}" if path else weight
            if getattr(layer, weight) is not None and hidden(name, outputs):
                yield name
                yield f"{path}.{bias}" if path else bias


def _linear(layer: nn.Module) -> tuple[tuple[str, str, int], ...]:
    """(weight, bias, dimension of the outputs) of the linear maps in a layer."""
    if isinstance(layer, nn.Linear):
        return (("weight", "bias", 0),)
    if isinstance(layer, nn.modules.conv._ConvNd):
        return (("weight", "bias", 1 if layer.transposed else 0),)
    if isinstance(layer, nn.MultiheadAttention):
        packed = layer.in_proj_weight is not None
        names = ("in_proj_weight",) if packed else ("q_proj_weight", "k_proj_weight", "v_proj_weight")
        return tuple((name, "in_proj_bias", 0) for name in names)
    return ()
