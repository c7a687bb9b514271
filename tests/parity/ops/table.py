"""The table of covered ops, ``docs/models/ops.md``, made of the cases of the parity tests.

``python -m tests.parity.ops.table`` writes it: it exports every case once to see which ONNX ops it becomes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path

import onnx

from edgefl_export.capture.trace import capture
from edgefl_export.onnx.model import to_onnx
from tests.parity.ops.case import Case

PATH = Path(__file__).parents[3] / "docs" / "models" / "ops.md"
FAMILIES = (
    "convolution",
    "linear",
    "normalization",
    "pooling",
    "activation",
    "attention",
    "embedding",
    "loss",
    "shapes",
    "arithmetic",
)
HEAD = """# Ops that training graphs may use

Made from the cases in `tests/parity/ops` by `python -m tests.parity.ops.table`; do not edit. Each case is exported as a
training step and compared with torch in float32 and float64: results, loss, every gradient and the updated state, to
1e-4 of the largest entry, on three random inputs. The last column lists what the op and its gradients become, joined over
the variants: ops of ONNX's default domain, opset 18. An op that is missing here may still export, as PyTorch decomposes
most into others; if it does not, the error names it with its module and line.
"""


def rows() -> Iterator[tuple[str, str, Mapping[str, Case]]]:
    """Family, op and its cases by variant, in the order of the files."""
    for family in FAMILIES:
        for op, cases in import_module(f"tests.parity.ops.test_{family}").CASES.items():
            yield family, op, cases


def row(family: str, op: str, cases: Mapping[str, Case]) -> str:
    """The row without its last cell."""
    variants = "; ".join(variant or "as it is" for variant in cases)
    return f"| {family} | {op} | {variants} |"


def onnx_ops(case: Case) -> set[str]:
    """Op types of the exported gradients."""
    graph = onnx.load_from_string(to_onnx(capture(case.gradients()))).graph
    return {node.op_type for node in graph.node}


def main() -> None:
    lines = [HEAD, "| family | layer or function | variants | ONNX ops |", "|---|---|---|---|"]
    for family, op, cases in rows():
        found = set().union(*(onnx_ops(case) for case in cases.values()))
        lines.append(f"{row(family, op, cases)} {', '.join(sorted(found))} |")
    PATH.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
