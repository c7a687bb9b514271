"""Torch to artifacts: capture, decompositions, ONNX lowering, verification, bundle writing."""
