"""Torch to artifacts: capture, decompositions, ONNX lowering, verification, bundle writing."""

import edgefl.system as _system  # noqa: F401 - switches telemetry off before a runtime is imported
