"""Target of the compiler: a graph format with the passes, the writer and the checks that belong to it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import ClassVar

from torch import fx

from edgefl.contract.algorithm import Function
from edgefl.wire.bundle.formats import FormatName
from edgefl.wire.bundle.manifest import Graph
from edgefl_export.artifact import Artifact
from edgefl_export.capture.graph import LoweredGraph, Table, TracedFunction
from edgefl_export.capture.trace import decompose, trace
from edgefl_export.memory.recompute import Budget
from edgefl_export.verify.graphs import Run, Verification, compare

GraphPass = Callable[[fx.GraphModule], None]
"""Rewrite of the graph of core ops, in place."""


class Target(ABC):
    """One format of graphs, for the engines that load it.

    ``passes`` run in order on the graph of core ops. ``version`` names the packages beside edgefl and torch that decide the
    bytes; it is empty if there are none::

        target = target_of("onnx")
        lowered = target.lower(trace(algorithm.finish))
        artifact = target.emit(lowered)             # the bytes that a device loads, and their cost
        target.verify(algorithm.finish, artifact.model, seed=1)
    """

    name: ClassVar[FormatName]
    version: str = ""
    passes: ClassVar[tuple[GraphPass, ...]] = ()

    def rules(self) -> Table | None:
        """Return the decompositions of the second pass; None for those that all targets share."""
        return None

    def lower(self, traced: TracedFunction) -> LoweredGraph:
        """Decompose ``traced``, which is used up, to core ops and run the passes of this target.

        Raises:
            ExportError: if the function breaks the contract; it names the rule.
        """
        lowered = decompose(traced, self.rules())
        for rewrite in self.passes:
            rewrite(lowered.module)
        lowered.module.recompile()
        return lowered

    def capture(self, function: Function) -> LoweredGraph:
        """Trace and lower ``function``."""
        return self.lower(trace(function))

    @abstractmethod
    def emit(self, lowered: LoweredGraph, budget: Budget | None = None) -> Artifact:
        """Write a graph. Equal graphs give equal bytes.

        Args:
            lowered: the graph, as :meth:`lower` returned it.
            budget: memory that one call may take. Values are recomputed until it suffices, and the graph is cut into
                segments that page if recomputation does not.

        Raises:
            ExportError: for an op without a form in this format, with its source line, or if no form fits the budget, with
                the smallest number of bytes that was found.
        """

    def load(self, function: Function, model: bytes, in_place: Collection[str] = ()) -> Run:
        """Return a run of ``model`` in the runtime of this format.

        Args:
            function: the function that the graph computes.
            model: bytes of the graph.
            in_place: state ports that the runtime writes into the memory of their input, if it can.

        Raises:
            ExportError: if the runtime refuses the graph.
        """
        raise NotImplementedError

    def verify(
        self,
        function: Function,
        model: bytes,
        seed: int,
        in_place: Collection[str] = (),
        *,
        quick: bool = False,
    ) -> Verification:
        """Run ``model`` in the runtime of this format and compare its outputs with torch.

        Args:
            function: the function that the graph computes.
            model: bytes of the graph.
            seed: seed of the example.
            in_place: as of :meth:`load`.
            quick: accept torch's float32 as the measure of rounding wherever it excuses the graph.

        Raises:
            ExportError: if an output strays from torch (:mod:`edgefl_export.verify.graphs`).
        """
        return compare(function, self.load(function, model, in_place), seed, quick=quick)

    def verify_untrusted(
        self, function: Function, model: bytes, seed: int, in_place: Collection[str] = ()
    ) -> Verification:
        """Run :meth:`verify` for bytes from elsewhere: whatever a damaged graph does to the runtime is an ExportError."""
        return self.verify(function, model, seed, in_place)

    def variants(
        self, lowered: LoweredGraph, artifact: Artifact, verification: Verification
    ) -> dict[str, bytes]:
        """Return other forms of ``artifact`` by name, of which a device takes the fastest.

        Each was run here on the example of ``verification`` and gave the same outputs.
        """
        return {}

    def port_mismatch(self, graph: Graph, model: bytes) -> str:
        """Return the first disagreement between the ports of ``model`` and of the manifest's ``graph``, or ""."""
        return ""
