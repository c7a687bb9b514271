"""Captured graphs as ONNX models."""
