"""Target of the compiler: a graph format with its passes, its writer and its checks."""

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
    """Interface of a graph format: it lowers, writes, runs and checks the graphs of one kind of engine.

    Attributes:
        name: name of the format in manifests.
        version: versions of the packages, besides edgefl and torch, that decide the bytes; "" if there are none.
        passes: rewrites of the graph of core ops, run in order.

    Example::

        target = target_of("onnx")
        lowered = target.lower(trace(algorithm.finish))
        artifact = target.emit(lowered)             # the bytes that a device loads, and their cost
        target.verify(algorithm.finish, artifact.model, seed=1)
    """

    name: ClassVar[FormatName]
    version: str = ""
    passes: ClassVar[tuple[GraphPass, ...]] = ()

    def rules(self) -> Table | None:
        """Return the decompositions of the second pass by op, or None for those that all targets share."""
        return None

    def lower(self, traced: TracedFunction) -> LoweredGraph:
        """Decompose ``traced`` to core ops and run the passes of this target. Rewrites the module of ``traced``.

        Raises:
            ExportError: if the function cannot be compiled. The text names the rule that it breaks.
        """
        lowered = decompose(traced, self.rules())
        for rewrite in self.passes:
            rewrite(lowered.module)
        lowered.module.recompile()
        return lowered

    def capture(self, function: Function) -> LoweredGraph:
        """Trace ``function`` and lower it to core ops, both in one call.

        Raises:
            ExportError: if the function cannot be compiled. The text names the rule that it breaks.
        """
        return self.lower(trace(function))

    @abstractmethod
    def emit(self, lowered: LoweredGraph, budget: Budget | None = None) -> Artifact:
        """Write a graph and return its bytes with their cost. Equal graphs give equal bytes.

        Args:
            lowered: graph from :meth:`lower`.
            budget: memory that one call may use; None for no limit. Values are recomputed until the call fits. If that
                does not suffice, the graph is cut into segments that pass values through files.

        Raises:
            ExportError: if this format cannot express an op (the error has its source line), or if no form of the graph
                fits the budget (the error has the smallest number of bytes found).
        """

    def load(self, function: Function, model: bytes, in_place: Collection[str] = ()) -> Run:
        """Load ``model`` into the runtime of this format and return a function that runs it: arrays by input name to
        outputs.

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
            in_place: state ports as in :meth:`load`.
            quick: skip the exact reference where the rounding error of torch in float32 already explains a difference.

        Raises:
            ExportError: if the runtime refuses the graph, or if an output differs from that of torch by more than
                rounding (:mod:`edgefl_export.verify.graphs`).
        """
        return compare(function, self.load(function, model, in_place), seed, quick=quick)

    def verify_untrusted(
        self, function: Function, model: bytes, seed: int, in_place: Collection[str] = ()
    ) -> Verification:
        """Compare bytes of unknown origin with torch, as :meth:`verify` does for bytes of this compiler.

        Args:
            function: function that the graph should compute.
            model: bytes of the graph, which may be damaged.
            seed: seed of the example.
            in_place: state ports that the runtime writes into the memory of their input, if it can.

        Raises:
            ExportError: if an output differs from torch, or if the graph does not load, fails, or crashes the runtime.
        """
        return self.verify(function, model, seed, in_place)

    def variants(
        self, lowered: LoweredGraph, artifact: Artifact, verification: Verification
    ) -> dict[str, bytes]:
        """Return variants of ``artifact``: bytes by name of the variant. A device measures them and uses the fastest.

        Each variant was run on the example of ``verification`` and gave the same outputs. By default there are none.

        Args:
            lowered: the graph that ``artifact`` was written from.
            artifact: result of :meth:`emit`.
            verification: result of :meth:`verify` for ``artifact``.
        """
        return {}

    def port_mismatch(self, graph: Graph, model: bytes) -> str:
        """Return a text with the first difference between the ports of ``model`` and of the manifest's ``graph``.

        Return "" if they agree or if the format does not name its ports.
        """
        return ""
