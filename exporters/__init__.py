"""Torch to artifacts: capture, decompositions, ONNX lowering, verification, bundle writing."""

import edgefl  # noqa: F401 - onnxruntime is told to report to nobody before it is imported
