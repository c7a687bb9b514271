"""Regions of a graph for ExecuTorch's XNNPACK delegate."""
