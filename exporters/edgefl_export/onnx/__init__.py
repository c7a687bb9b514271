"""ONNX models for onnxruntime: passes, writer, and variants that run faster."""
