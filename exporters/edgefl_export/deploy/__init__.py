"""Models for inference as files of stock runtimes: ONNX Runtime, ExecuTorch, and torch with safetensors."""
