"""Target ``executorch``: programs for phones. Writing and checking them needs the package of the extra ``executorch``."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from importlib import metadata
from typing import TYPE_CHECKING, cast

import torch
from torch import fx
from torch._ops import OpOverload

from edgefl.contract.algorithm import Function
from edgefl.errors import ConfigError
from edgefl.system.distribution import install
from edgefl.wire.bundle.formats import EXECUTORCH_DTYPES, Outputs
from edgefl.wire.bundle.manifest import Graph, Port
from edgefl_export.artifact import Artifact
from edgefl_export.capture.graph import LoweredGraph, Table
from edgefl_export.capture.rewrites import store_early
from edgefl_export.executorch import rules
from edgefl_export.executorch.graph import move_transpositions
from edgefl_export.memory.budget import Form, MemoryMeasure, fit_budget
from edgefl_export.memory.recompute import Budget
from edgefl_export.select_to_multiply import NodeWriter, SelectToMultiply
from edgefl_export.target import Target
from edgefl_export.verify.graphs import Run, Verification, agrees

if TYPE_CHECKING:
    from edgefl_export.executorch.check.isolated import IsolatedRunner
    from edgefl_export.executorch.check.programs import TensorPort

_aten = torch.ops.aten

ROWS = "rows"
"""Name of the variant of a program that updates large state in blocks of rows
(:mod:`edgefl_export.executorch.program.write`)."""

# Whether the mask of a comparison is the step of x - c (1) or of c - x (-1), and whether it is inverted.
_COMPARISONS = {
    _aten.gt.Scalar: (1, False),
    _aten.le.Scalar: (1, True),
    _aten.lt.Scalar: (-1, False),
    _aten.ge.Scalar: (-1, True),
    _aten.gt.Tensor: (1, False),
    _aten.le.Tensor: (1, True),
    _aten.lt.Tensor: (-1, False),
    _aten.ge.Tensor: (-1, True),
}


class XnnpackMaskPass(SelectToMultiply):
    """Pass with masks for single comparisons: x > c -> ceil(clamp(x - c, 0, 1)), because XNNPACK has no comparisons."""

    def mask(self, condition: fx.Node, negated: bool, writer: NodeWriter) -> fx.Node | None:
        if condition.target not in _COMPARISONS:
            return None
        sign, inverted = _COMPARISONS[cast(OpOverload, condition.target)]
        first, second = condition.args[:2] if sign > 0 else condition.args[1::-1]
        if second == 0:
            distance = first
        elif isinstance(first, fx.Node):
            distance = writer(_aten.sub.Tensor, first, second)
        else:
            distance = writer(_aten.rsub.Scalar, second, first)
        mask = writer(_aten.ceil.default, writer(_aten.clamp.default, distance, 0.0, 1.0))
        return mask if inverted == negated else writer(_aten.rsub.Scalar, mask, 1.0)


class _ProgramMemory(MemoryMeasure):
    """Measure of the memory that programs plan. The last written program is kept, because writing one takes seconds."""

    pages = False

    def __init__(self, planned_outputs: bool) -> None:
        self._planned_outputs = planned_outputs
        self._last: tuple[LoweredGraph, Artifact] | None = None

    def program(self, form: Form) -> Artifact:
        from edgefl_export.executorch.program.write import to_executorch

        if self._last is None or self._last[0] is not form[0]:
            self._last = form[0], to_executorch(form[0], planned_outputs=self._planned_outputs)
        return self._last[1]

    def safe(self, form: Form) -> int:
        return self.program(form).planned_bytes


class ExecuTorchTarget(Target):
    """Target for ExecuTorch programs.

    Methods import the writer and the runtime late: they take a second to load, and a bare installation lacks them.

    Args:
        outputs: owner of the memory of outputs: ``caller``, or ``planned`` for the arena of the program, for callers that
            can only load and execute.

    Raises:
        ConfigError: if the package ``executorch`` is not installed.
    """

    name = "executorch"
    passes = (XnnpackMaskPass(), move_transpositions, store_early)

    def __init__(self, outputs: Outputs = "caller") -> None:
        self._runner: IsolatedRunner | None = None
        self._planned = outputs == "planned"
        try:
            self.version = metadata.version("executorch") + (", planned outputs" if self._planned else "")
        except metadata.PackageNotFoundError as error:
            raise ConfigError(
                f"graphs in format 'executorch' need the package executorch: {install('executorch')}, or choose "
                "format 'onnx'",
                format=self.name,
            ) from error

    def rules(self) -> Table:
        return rules.table()

    def emit(self, lowered: LoweredGraph, budget: Budget | None = None) -> Artifact:
        """Write a program and return it with its cost.

        The writer recomputes cheap values also without a budget (:mod:`edgefl_export.executorch.program.partition`);
        with a budget it may recompute products, too. A program is never cut into segments, because each would keep an
        arena and an XNNPACK workspace of its own.

        Args:
            lowered: graph from :meth:`lower`.
            budget: memory that one call may use; None for no limit. A relative budget is a share of the bytes planned
                without a budget.

        Raises:
            ExportError: if ExecuTorch cannot express an op, or if no form of the graph fits the budget.
        """
        from edgefl_export.executorch.program.write import LEAST_BYTES, to_executorch

        if budget is None:
            return to_executorch(lowered, planned_outputs=self._planned)
        memory = _ProgramMemory(self._planned)
        unbounded = memory.safe((lowered,))
        count = max(LEAST_BYTES, int(budget.count * unbounded)) if budget.relative else int(budget.count)
        return replace(memory.program(fit_budget(lowered, count, memory)), memory_budget=count)

    def load(self, function: Function, model: bytes, in_place: Collection[str] = ()) -> Run:
        from edgefl_export.executorch.check import programs

        return programs.load(function, model)

    def verify_untrusted(
        self, function: Function, model: bytes, seed: int, in_place: Collection[str] = ()
    ) -> Verification:
        """Compare a program with ``function`` in torch, on random inputs, in a child process that lives as long as this
        target.

        Args:
            function: function that the program should compute.
            model: bytes of the program, which may be damaged.
            seed: seed of the inputs.
            in_place: ignored.

        Raises:
            ExportError: if an output differs from torch, or if the program fails, hangs or crashes the process.
        """
        from edgefl_export.executorch.check import isolated, programs

        self._runner = self._runner or isolated.IsolatedRunner()
        return programs.verify_isolated(function, model, seed, self._runner)

    def variants(
        self, lowered: LoweredGraph, artifact: Artifact, verification: Verification
    ) -> dict[str, bytes]:
        from edgefl_export.executorch.program.write import to_row_variant

        form = to_row_variant(lowered, artifact)
        if form is None:
            return {}
        run = partial(self.load, lowered.function, form)
        return {ROWS: form} if agrees(lowered.function, tuple(lowered.outputs), run, verification) else {}

    def port_mismatch(self, graph: Graph, model: bytes) -> str:
        from edgefl_export.executorch.check.programs import read_ports

        try:
            inputs, outputs = read_ports(model)
        except ValueError as error:
            return f"graph {graph.name!r} is no ExecuTorch program with a method 'forward' ({error}); export it again"
        names = [port.name for port in inputs], [port.name for port in outputs]
        listed = [port.name for port in graph.inputs], [port.name for port in graph.outputs]
        if names != listed:
            described = (" -> ".join(map(", ".join, ports)) for ports in (names, listed))
            return "the graph has the ports {}, the manifest lists {}".format(*described)
        return _type_mismatch("input", graph.inputs, inputs) or _type_mismatch(
            "output", graph.outputs, outputs
        )


def _type_mismatch(kind: str, listed: tuple[Port, ...], tensors: Sequence[TensorPort]) -> str:
    for port, tensor in zip(listed, tensors, strict=True):
        claim = f"{port.dtype}{list(port.shape)}"
        has = f"{EXECUTORCH_DTYPES.get(tensor.dtype, tensor.dtype)}{list(tensor.shape)}"
        if claim != has:
            return f"{kind} {port.name!r} is {claim} in the manifest and {has} in the graph"
    return ""
