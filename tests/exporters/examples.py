"""Small functions for the exporters' tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from torch import nn
from torch.nn import functional as F

from edgefl.contract.algorithm import Function
from edgefl.contract.tensors import Tensors, TensorSpec, prefixed, select
from edgefl.wire.blobs import describe
from edgefl.wire.bundle.manifest import Graph
from edgefl_export.artifact import Artifact
from edgefl_export.capture.graph import LoweredGraph
from edgefl_export.compiler.manifest import ports

BATCH = 4


def step_of(module: nn.Module, shape: tuple[int, ...], classes: int = 3) -> Function:
    """One SGD step on the cross-entropy of ``module``; buffers are state and may be updated in place."""
    parameters = dict(module.named_parameters())
    buffers = {name: b for name, b in module.named_buffers() if b.is_floating_point()}
    ports = {f"state.{name}": TensorSpec.of(value) for name, value in {**parameters, **buffers}.items()}
    ports["batch.0.x"] = TensorSpec((BATCH, *shape))
    ports["batch.0.y"] = TensorSpec((BATCH,), torch.int64)
    ports["hyper.lr"] = TensorSpec(())

    def fn(tensors: Tensors) -> Tensors:
        state = select(tensors, "state")
        leaves = {name: state[name].detach().requires_grad_() for name in parameters}
        moved = {name: state[name].clone() for name in buffers}
        logits = torch.func.functional_call(module, {**leaves, **moved}, (tensors["batch.0.x"],))
        loss = F.cross_entropy(logits, tensors["batch.0.y"])
        grads = torch.autograd.grad(loss, list(leaves.values()))
        updated = {k: state[k] - tensors["hyper.lr"] * g for k, g in zip(leaves, grads, strict=True)}
        return prefixed("state", updated | moved) | {"metric.loss": loss.detach()}

    return Function("train", fn, ports, label_range=classes)


def pointwise(fn: Callable[[Tensors], Tensors], **shapes: tuple[int, ...]) -> Function:
    """A function of float tensors; ``state__w=(3,)`` declares the port ``state.w``."""
    ports = {name.replace("__", "."): TensorSpec(shape) for name, shape in shapes.items()}
    return Function("example", fn, ports)


def run_onnx(model: bytes, arrays: Mapping[str, Any], *, as_written: bool = False) -> list[Any]:
    """Return what onnxruntime gives of the arrays or tensors it reads; ``as_written``: not optimized."""
    options = onnxruntime.SessionOptions()
    if as_written:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return list(
        session.run(None, {port.name: np.asarray(arrays[port.name]) for port in session.get_inputs()})
    )


def small_net() -> nn.Sequential:
    """Two units with batch norm, so that most rules take part."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 8, 3, stride=2, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 3),
    )


def op_types(model: bytes) -> list[str]:
    return [node.op_type for node in onnx.load_from_string(model).graph.node]


def entry_of(lowered: LoweredGraph, artifact: Artifact) -> Graph:
    """What a manifest says of an ONNX artifact."""
    return Graph(
        name="train",
        format="onnx",
        blob=describe(artifact.model, 1 << 17),
        inputs=ports(lowered.inputs),
        outputs=ports(lowered.outputs),
        in_place=artifact.in_place,
    )
