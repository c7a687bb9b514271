"""Form of a graph that suits a processor, chosen by its instruction sets without a measurement."""

from __future__ import annotations

from collections.abc import Collection

Features = frozenset[str]

_SUITED: tuple[tuple[Features, tuple[str, ...], tuple[str, ...]], ...] = (
    (frozenset({"avx2", "fma"}), ("blocked, rows", "blocked", "rows"), ("blocked",)),
)
"""Instruction sets, and the forms of ONNX graphs for processors that have them, best first: with one thread, and with more.

A processor with AVX-512 has these sets, too, and AMX computes no float32: the forms are the same there. For NEON there is no
row: onnxruntime has no kernels for the blocked layout there, and updates by rows were not measured."""


def suited_form(format: str, forms: Collection[str], features: Features, threads: int = 1) -> str:
    """Return the name of the form to run.

    Args:
        format: of the graph. ExecuTorch programs run in their own form: by rows they take as long.
        forms: names of the graph's variants.
        features: instruction sets of the processor (:func:`edgefl_device.host.processor_features`).
        threads: of the engine. Blocks of rows keep a step in the cache of one core, and cost time on several.

    Returns:
        One of ``forms``; empty for the graph's own form.
    """
    for needed, alone, together in _SUITED:
        if format == "onnx" and needed <= features:
            return next((form for form in (alone if threads == 1 else together) if form in forms), "")
    return ""
