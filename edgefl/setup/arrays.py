"""The weights of a model as a server averages them."""

from __future__ import annotations

import torch

from edgefl.models.spec import ModelSpec
from edgefl.wire.errors import ModelError
from edgefl.wire.tensors import Arrays


def arrays_of(spec: ModelSpec, *, rounded: bool) -> Arrays:
    """By global name. ModelError for what cannot be averaged or, if ``rounded``, not be rounded on its way to devices."""
    for name, tensor in spec.weights.items():
        if not tensor.is_floating_point():
            raise ModelError(
                f"tensor {name} of {spec.name} is {tensor.dtype}, and only floats can be averaged: "
                "register it as a buffer with persistent=False",
                name=name,
            )
        if rounded and tensor.dtype != torch.float32:
            raise ModelError(
                f"tensor {name} of {spec.name} is {tensor.dtype}, and only float32 can be rounded on its way to devices: "
                "make the model float32, or set downlink.encoding to 'float32'",
                name=name,
            )
        if "~" in name or "/" in name:
            raise ModelError(
                f"tensor {name} of {spec.name} has '~' or '/' in its name, which are reserved in blobs and for the server's "
                "state: rename the module or parameter",
                name=name,
            )
    return {name: tensor.detach().cpu().numpy().copy() for name, tensor in spec.weights.items()}
