"""The graph that makes samples of what a device's files hold, where the bundle's reader asks for one."""

from __future__ import annotations

import torch

from edgefl.contract.algorithm import Function
from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl.errors import ExportError
from edgefl.models.layers.log_mel import LogMel
from edgefl.wire.bundle.manifest import DataSpec
from edgefl.wire.bundle.readers import SoundReader

FEATURES = "features"


def features_of(data: DataSpec) -> Function | None:
    """``batch.0.x`` float32 (1, length), one sound, to ``record.x`` (1, *shape); None where the reader asks for nothing.

    ExportError where the features have another shape than samples of ``data``.
    """
    reader = data.reader
    if not isinstance(reader, SoundReader) or not reader.mels:
        return None
    layer = LogMel.of(reader)

    def made(tensors: Tensors) -> Tensors:
        return {"record.x": layer(tensors["batch.0.x"])}

    shape = tuple(layer(torch.zeros(1, reader.length)).shape[1:])
    if shape != data.shape:
        raise ExportError(
            f"the data have samples of shape {data.shape}, and the log-mel features of their reader {shape}: make the "
            "samples of the dataset by edgefl.models.LogMel with the same numbers",
            found=data.shape,
            expected=shape,
        )
    return Function(FEATURES, made, {"batch.0.x": TensorSpec((1, reader.length))}, fixed=True)
