"""Compiler: traces, lowers, emits and verifies the functions of a tier, and lists the graphs in a manifest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from edgefl.contract.algorithm import Function
from edgefl.errors import ConfigError, ExportError
from edgefl.system.memory import without_collector
from edgefl.wire.blobs import describe
from edgefl.wire.bundle.archive import BundleArchive
from edgefl.wire.bundle.formats import FORMATS, Outputs
from edgefl.wire.bundle.manifest import Graph
from edgefl.wire.bundle.readers import TextSpec
from edgefl.wire.bundle.sources import OpOrigin
from edgefl.wire.bundle.variants import compress
from edgefl_export.artifact import Artifact
from edgefl_export.capture.graph import LoweredGraph, TracedFunction
from edgefl_export.capture.trace import TraceCache
from edgefl_export.compiler.cache import BundleCache, CompiledBundle
from edgefl_export.compiler.manifest import build_manifest, check_wiring, ports, segments_of
from edgefl_export.compiler.request import CompileRequest
from edgefl_export.executorch.target import ExecuTorchTarget
from edgefl_export.memory.recompute import Budget
from edgefl_export.onnx.target import OnnxTarget
from edgefl_export.sources import packed_sources
from edgefl_export.target import Target
from edgefl_export.verify.graphs import Verification

VERIFY_SEED = 1

Progress = Callable[[str], None]
"""A user's function, called with a line of text before each graph."""


@dataclass(frozen=True)
class CompiledGraph:
    """Compiled function: its manifest entry, its blobs by SHA-256, and the origins (module, op, cost) of its nodes."""

    entry: Graph
    blobs: Mapping[str, bytes]
    nodes: Mapping[str, OpOrigin]


class Compiler:
    """Compiler of bundles for one target.

    Args:
        target: format to write.
        cache: cache of bundles, keyed by request, source code and package versions. If None, every bundle is compiled.
    """

    def __init__(self, target: Target, cache: BundleCache | None = None) -> None:
        self.target = target
        self.cache = cache

    def compile(self, request: CompileRequest, on_progress: Progress = lambda _: None) -> CompiledBundle:
        """Return the bundle of a request, from the cache if possible; a newly compiled one is added to the cache.

        Every graph of a new bundle runs once in the runtime of its format and is compared with torch. Equal functions
        give equal bytes, so tiers share the blobs of graphs by their digest.

        Args:
            request: exchange of a tier, and its data.
            on_progress: called with a line of text before each graph is compiled.

        Raises:
            ExportError: if a graph cannot be written or differs from torch, or if the functions do not fit together (for
                example, a step reads a state that no earlier function returns).
        """
        # Look in the cache. The digest covers the traced functions, whose graphs wait for the compiler.
        traces, digest = TraceCache(), ""
        if self.cache is not None:
            try:
                digest = request.fingerprint(self.target, traces)
            except ExportError:
                traces = TraceCache()  # the stages below fail at the same function, and name its graph before
            else:
                bundle = self.cache.find(digest)
                if bundle is not None:
                    return CompiledBundle(bundle, from_cache=True)

        # Compile each function by itself: none of its graphs outlives the next one's trace.
        graphs: list[CompiledGraph] = []
        for name, function in request.functions.items():
            bundle_name = (
                f"tier {request.tier}, {request.exchange}" if request.exchange else f"tier {request.tier}"
            )
            on_progress(f"{request.model}, {bundle_name}: graph {name} ({self.target.name})")
            graphs.append(self._compile_function(request, name, function, traces))

        # Describe the whole: the origins of all nodes in one blob, the tokenizer, the manifest.
        blobs = {sha256: blob for graph in graphs for sha256, blob in graph.blobs.items()}
        sources, listing = packed_sources(
            {graph.entry.name: graph.nodes for graph in graphs}, request.chunk_bytes
        )
        blobs[sources.sha256] = listing
        tokenizer = None
        if request.tokenizer and isinstance(request.data.reader, TextSpec):
            tokenizer = describe(request.tokenizer, request.chunk_bytes)
            blobs[tokenizer.sha256] = request.tokenizer
        manifest = build_manifest(request, [graph.entry for graph in graphs], sources, tokenizer)
        check_wiring(manifest)
        bundle = BundleArchive(manifest, blobs)
        if self.cache is not None and digest:
            self.cache.keep(digest, bundle)
        return CompiledBundle(bundle, from_cache=False)

    def lower(self, traced: TracedFunction) -> LoweredGraph:
        """Return the graph of core ops, rewritten by the passes of the target. Rewrites the module of ``traced``, which
        cannot be used again.
        """
        return self.target.lower(traced)

    def emit(self, lowered: LoweredGraph, budget: Budget | None = None) -> Artifact:
        """Return the bytes of a graph with their cost.

        Args:
            lowered: graph of core ops.
            budget: limit for its memory on the device; None for no limit.

        Raises:
            ExportError: if no form of the graph fits the budget, or if the format has no form for an op.
        """
        return self.target.emit(lowered, budget)

    def verify(self, function: Function, artifact: Artifact) -> Verification:
        """Run an artifact in the runtime of its format and compare it with torch. Raise ExportError if they differ."""
        return self.target.verify(function, artifact.model, VERIFY_SEED, artifact.in_place, quick=True)

    def _compile_function(
        self, request: CompileRequest, name: str, function: Function, traces: TraceCache
    ) -> CompiledGraph:
        """Lower, emit and verify the function of graph ``name``; only training steps have a budget and variants.

        ``traces`` has the functions that were traced already.
        """
        is_step = name in request.steps
        with without_collector():
            lowered = self.lower(traces.take(function))
            artifact = self.emit(lowered, request.memory_budget if is_step else None)
        verification = self.verify(function, artifact)
        forms = self.target.variants(lowered, artifact, verification) if is_step else {}
        ref = describe(artifact.model, request.chunk_bytes)
        blobs, variants = {ref.sha256: artifact.model}, []
        for kind, form in forms.items():
            variant, frame = compress(kind, form, request.chunk_bytes, base=artifact.model)
            variants.append(variant)
            blobs[variant.blob.sha256] = frame
        masks = request.algorithm.masks if name == request.algorithm.finish.name else {}
        entry = Graph(
            name=name,
            format=self.target.name,
            blob=ref,
            inputs=ports(lowered.inputs),
            outputs=ports(lowered.outputs, masks),
            memory_budget=artifact.memory_budget,
            planned_bytes=artifact.planned_bytes,
            arena_bytes=artifact.arena_bytes,
            in_place=artifact.in_place,
            metrics=function.metrics,
            activations=function.activations,
            variants=tuple(variants),
            segments=segments_of(artifact),
            planned_outputs=artifact.planned_outputs,
            least_runtime=artifact.least_runtime,
        )
        return CompiledGraph(entry, blobs, artifact.nodes)


def target_of(name: str, outputs: Outputs = "caller") -> Target:
    """Return a new target for a format.

    Args:
        name: one of :data:`edgefl.wire.bundle.formats.FORMATS`.
        outputs: owner of the memory of outputs (:class:`~edgefl_export.executorch.target.ExecuTorchTarget`); ignored for
            ONNX.

    Raises:
        ConfigError: if there is no such format, or if its package is not installed.
    """
    if name not in FORMATS:
        raise ConfigError(f"no format {name!r}; there are: {', '.join(FORMATS)}", format=name)
    return ExecuTorchTarget(outputs) if name == "executorch" else OnnxTarget()


def check_installed(names: Iterable[str]) -> None:
    """Raise ConfigError, with the install command, if the packages of one of these formats are not installed."""
    for name in names:
        target_of(name)
