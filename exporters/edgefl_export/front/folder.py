"""Names of bundles on disk."""

from __future__ import annotations


def bundle_name(tier: str, exchange: str = "", format: str = "onnx") -> str:
    """File of a tier's bundle for an exchange, in ONNX unless its name says otherwise."""
    words = (tier, exchange, "" if format == "onnx" else format, "efl")
    return ".".join(word for word in words if word)
