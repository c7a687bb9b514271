"""ONNX models for onnxruntime: passes, writer, and forms that run faster."""
