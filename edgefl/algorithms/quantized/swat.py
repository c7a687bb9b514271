"""Sparse weight and activation training, SWAT: the local training of ZeroFL (fedbat.md 3, 8.16)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edgefl.algorithms.baselines.sgd import sgd
from edgefl.contract.algorithm import Algorithm, Function
from edgefl.contract.tensors import Tensors
from edgefl.errors import ModelError
from edgefl.models.spec import skeleton
from edgefl.models.tied import units_with_tied_weights
from edgefl.objective.objective import Objective
from edgefl.objective.parts import inference
from edgefl.wire.update.form import SparseEncoding

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""(input, weight, bias) to output; linear in input and in weight."""


def swat(
    objective: Objective,
    *,
    batch: int = 64,
    steps: int = 10,
    lr: float = 0.05,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    sparsity: float = 0.97,
    activations: bool = True,
    masked_loss: bool = False,
    dense_inference: bool = False,
) -> Algorithm:
    """Return SWAT: :func:`edgefl.algorithms.baselines.sgd.sgd` whose dense and conv layers compute with a few large
    entries.

    It is the local training of ZeroFL (Raihan and Aamodt 2020; fedbat.md 3). The other options are sgd's. top(t)
    keeps the entries t whose |t| is at least the ceil((1 - ``sparsity``) d)-th largest magnitude of the whole tensor, ties
    included, and is 0 elsewhere. In training, a layer f(x, w, b) has::

        y  = f(x, top(w), b);
        dx = gradient of f by x, computed with top(w);
        dw = gradient of f by w, computed with top(x), for every entry of w;
        db = gradient of f by b.

    Each step selects the top again, of ``x`` over the whole batch. Every weight may move: an entry outside of the top gets
    the gradient that it would have inside (straight-through). Layers of other types, those with untrained weights, biases
    and norms are dense. Entries that a mask of the submodel holds at 0 stay 0, and count in d.

    Args:
        objective: Model part that a tier trains, with its loss.
        batch: Samples per local step.
        steps: Local steps per round.
        lr: Learning rate, unless the server announces another (``hyper.lr``).
        momentum: Momentum of local SGD; its buffers are 0 at the start of a round.
        weight_decay: Weight decay of conv and dense kernels.
        sparsity: Share of entries outside of the top, in [0, 1).
        activations: True: dw reads top(x). False: dw reads x.
        masked_loss: True: set logits of classes without local samples to 0 in training.
        dense_inference: True: inference reads w instead of top(w). Moving statistics belong to the sparse model, so
            use it for models without such statistics, or after a training of little sparsity.

    Raises:
        ModelError: The sparsity is out of range, or the submodel has no layer to make sparse.
    """
    if not 0.0 <= sparsity < 1.0:
        raise ModelError(
            f"the sparsity of swat lies in [0, 1), such as 0.97; found {sparsity}", sparsity=sparsity
        )
    trained = make_sparse(objective, TopSelection(1 - sparsity, activations, not dense_inference))
    algorithm = sgd(
        trained,
        batch=batch,
        steps=steps,
        lr=lr,
        momentum=momentum,
        weight_decay=weight_decay,
        masked_loss=masked_loss,
    )
    return replace(algorithm, name="swat", inference=None if dense_inference else _inference(trained))


@dataclass(frozen=True)
class TopSelection:
    """Settings of SWAT's selection of the entries with the largest magnitudes.

    Attributes:
        share: Share of the entries that are selected.
        activations: True: the gradient of a weight reads the selected entries of the layer's input.
        inference: True: inference reads the selected entries of the weight.
    """

    share: float
    activations: bool = True
    inference: bool = True

    def of(self, tensor: Tensor) -> Tensor:
        """Return ``tensor`` with 0 for all but its entries of largest magnitude, detached from gradients.

        Ties are all kept.
        """
        tensor = tensor.detach()
        size = tensor.abs()
        count = max(1, SparseEncoding(self.share).kept(size.numel()))
        if count == size.numel():
            return tensor
        least = torch.topk(size.reshape(-1), count, sorted=False).values.amin(0)
        return torch.where(size >= least, tensor, torch.zeros(()))

    def apply(self, product: Product, layer: SparseLayer, x: Tensor) -> Tensor:
        """Return the output of ``layer`` for ``x``, with the gradients of :func:`swat` in training.

        Args:
            product: Linear function of the layer: (x, weight, bias) to the output.
            layer: Linear or convolution layer with this selection.
            x: Input of the layer.
        """
        weight, bias = layer.weight, layer.bias
        if not layer.training:
            return product(x, self.of(weight) if self.inference else weight, bias)
        read = self.of(x) if self.activations else x.detach()
        result: Tensor = _TopProduct.apply(  # type: ignore[no-untyped-call]
            product, x, weight, bias, read, self.of(weight)
        )
        return result


class _TopProduct(torch.autograd.Function):
    """Product of an input x and ``top``, the largest entries of a weight, plus the bias.

    In the backward pass, the gradient by the weight is computed with the argument ``read`` instead of x.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        product: Product, x: Tensor, weight: Tensor, bias: Tensor | None, read: Tensor, top: Tensor
    ) -> Tensor:
        return product(x, top, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.product, _x, _weight, bias, read, top = inputs
        ctx.biased = bias is not None
        ctx.save_for_backward(read, top, *([bias] if ctx.biased else []))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        # vjp also computes the product again, which is not used: exporting removes it.
        back: Callable[[Tensor], tuple[Tensor, ...]] = torch.func.vjp(
            lambda x, weight, bias=None: ctx.product(x, weight, bias), *ctx.saved_tensors
        )[1]
        x, weight, *bias = back(gradient)
        return None, x, weight, bias[0] if ctx.biased else None, None, None


# -- layers ----------------------------------------------------------------------------------------------------


class SparseLinear(nn.Linear):
    top: TopSelection

    def forward(self, x: Tensor) -> Tensor:
        return self.top.apply(F.linear, self, x)


class _SparseConv(nn.modules.conv._ConvNd):
    top: TopSelection

    def forward(self, x: Tensor) -> Tensor:
        return self.top.apply(self._conv_forward, self, x)


class SparseConv1d(_SparseConv, nn.Conv1d): ...


class SparseConv2d(_SparseConv, nn.Conv2d): ...


class SparseConv3d(_SparseConv, nn.Conv3d): ...


SparseLayer = SparseLinear | _SparseConv

_LAYERS: dict[type[nn.Module], type[SparseLayer]] = {
    nn.Linear: SparseLinear,
    nn.Conv1d: SparseConv1d,
    nn.Conv2d: SparseConv2d,
    nn.Conv3d: SparseConv3d,
}


def make_sparse(objective: Objective, top: TopSelection) -> Objective:
    """Return ``objective`` with its trained linear and convolution layers replaced by sparse ones with the selection
    ``top``.

    Raises:
        ModelError: The objective has no such layer.
    """
    suffix = skeleton(objective.suffix, training=objective.suffix.training)
    layers = [layer for layer in suffix.modules() if type(layer) in _LAYERS and _weight(layer).requires_grad]
    if not layers:
        names = sorted({type(layer).__name__ for layer in suffix.modules() if layer._parameters})
        raise ModelError(
            "swat makes nn.Linear and nn.Conv1d to nn.Conv3d sparse, and none of them is trained here (layers: "
            f"{', '.join(names)}); train this submodel by sgd",
            layers=names,
        )
    for layer in layers:
        # Another class for the same object: names, sharing and all settings of the layer stay.
        layer.__class__ = _LAYERS[type(layer)]
        layer.top = top  # type: ignore[assignment]
    return replace(objective, suffix=suffix)


def _inference(trained: Objective) -> Function:
    whole = inference(trained)
    tops = {
        f"weights.{path}.weight": layer.top
        for path, layer in trained.suffix.named_modules()
        if isinstance(layer, SparseLayer)
    }

    def fn(tensors: Tensors) -> Tensors:
        if shared := units_with_tied_weights(trained.suffix):
            raise ModelError(
                f"expected a model without shared weights, found some in {', '.join(sorted(shared))}: swat computes with "
                "the largest entries of one use only, which one tensor cannot hold; train with dense_inference",
                units=sorted(shared),
            )
        weights = whole(tensors)
        return weights | {name: top.of(weights[name]) for name, top in tops.items()}

    return Function("inference", fn, whole.inputs)


def _weight(layer: nn.Module) -> nn.Parameter:
    # If the weight is tied to that of another layer, it is no parameter of this one.
    return cast(nn.Parameter, layer.weight)
