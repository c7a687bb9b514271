"""Exported programs run in ExecuTorch's own runtime, beside torch."""
