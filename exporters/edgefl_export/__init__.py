"""Torch to artifacts: capture, decompositions, ONNX lowering, verification, bundle writing."""

from edgefl.system import silence as _silence  # noqa: F401
