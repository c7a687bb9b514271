"""Which tensors of a model importance may thin out, and which every tier holds whole (fiarse.md 2.9)."""

from __future__ import annotations

from torch import nn

from edgefl.models.layers.recurrent import LstmDirection, Stack
from edgefl.models.spec import ModelSpec

# Layers all of whose own parameters are kernels, embeddings, or biases added to a kernel's product.
_LAYERS = (
    nn.modules.conv._ConvNd,
    nn.Linear,
    nn.Bilinear,
    nn.Embedding,
    nn.EmbeddingBag,
    nn.MultiheadAttention,
    nn.RNNBase,
    nn.RNNCellBase,
    Stack,
    LstmDirection,
)


def maskable(spec: ModelSpec) -> tuple[str, ...]:
    """Names, in state order, of the trained tensors of convolutions, dense, recurrent and embedding layers.

    Biases are among them, those of convolutions and recurrent layers too: fiarse.md 2.9 lists the bias of a dense layer,
    and theirs do the same. Every other tensor is dense: the affine pair of any norm, moving statistics, a user's bare
    parameters (positions of a ViT, layer scales of ConvNeXt), and whatever training does not move.
    """
    names = {
        f"{path}.{name}"
        for path, module in spec.module.named_modules()
        if isinstance(module, _LAYERS)
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.requires_grad
    }
    return tuple(name for name in spec.weights if name in names)


def frozen(spec: ModelSpec) -> frozenset[str]:
    """Names of the parameters that training does not move; moving statistics are none."""
    named = spec.module.named_parameters(remove_duplicate=False)
    return frozenset(name for name, parameter in named if not parameter.requires_grad)


def dense(spec: ModelSpec) -> tuple[str, ...]:
    """Names, in state order, of the tensors that every tier holds whole."""
    thinned = set(maskable(spec))
    return tuple(name for name in spec.weights if name not in thinned)
