"""Target ``onnx``: models for onnxruntime, on devices and in browsers."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import cast

import onnx
import torch
from google.protobuf.message import DecodeError
from torch import fx
from torch._ops import OpOverload

from edgefl.contract.algorithm import Function
from edgefl.errors import BundleError
from edgefl.wire.bundle.manifest import Graph
from edgefl_export.artifact import Artifact, artifacts_in, is_page, join_segments
from edgefl_export.capture.graph import LoweredGraph
from edgefl_export.capture.rewrites import merge_equal, store_early
from edgefl_export.memory.budget import within_onnx
from edgefl_export.memory.predict import predicted_arena, predicted_peak
from edgefl_export.memory.recompute import Budget, lean_and_peak
from edgefl_export.memory.usage import rewritable
from edgefl_export.onnx.blocked.images import write_blocked
from edgefl_export.onnx.blocked.updates import write_sums
from edgefl_export.onnx.ops import OPSET
from edgefl_export.onnx.rows import by_rows, write_loops
from edgefl_export.operators import POSITIVE
from edgefl_export.releases import least_onnxruntime
from edgefl_export.select_to_multiply import OPPOSITES, NodeWriter, SelectToMultiply
from edgefl_export.sources import graph_nodes, onnx_nodes
from edgefl_export.target import Target
from edgefl_export.verify.graphs import Run, Verification, agrees, load

_aten = torch.ops.aten

BLOCKED, ROWS = "blocked", "rows"
"""Names of the other forms of a model: :mod:`edgefl_export.onnx.blocked.images`; by rows, :mod:`edgefl_export.onnx.rows` and
:mod:`edgefl_export.onnx.rows`."""


class OnnxMaskPass(SelectToMultiply):
    """Pass with masks that onnxruntime computes fastest: one op on the distance from the bound of a comparison.

    Comparisons and casts of onnxruntime run on one thread even if the session has several. If another core's cache
    holds half of their input, they take several times as long.
    """

    def mask(self, condition: fx.Node, negated: bool, writer: NodeWriter) -> fx.Node | None:
        """Insert positive(distance) if one selection reads the condition, else a cast of the comparison, and return the
        mask (float32).

        A condition with several readers, as the mask of dropout, is kept as booleans until the backward pass: one byte
        for each entry (:mod:`edgefl_export.capture.rewrites`).
        """
        distance = _distance(condition, negated, writer) if len(condition.users) == 1 else None
        if distance is not None:
            return writer(POSITIVE, distance)
        target = cast(OpOverload, condition.target)
        if negated and target.overloadpacket in OPPOSITES:
            opposite = getattr(OPPOSITES[target.overloadpacket], target._overloadname)
            condition = writer(opposite, *condition.args)
        elif negated:
            condition = writer(_aten.logical_not.default, condition)
        return writer(_aten._to_copy.default, condition, dtype=torch.float32)


def _distance(condition: fx.Node, negated: bool, writer: NodeWriter) -> fx.Node | None:
    """Insert a value that is > 0 where the condition holds (does not hold, if ``negated``) and <= 0 elsewhere.

    Return None if the condition holds at its bound, where the distance is 0.
    """
    if negated and condition.target in (_aten.logical_or.default, _aten.bitwise_or.Tensor):
        return _distance_between(condition, writer)
    x, bound = condition.args[:2] if len(condition.args) > 1 else (None, None)
    if (
        not isinstance(x, fx.Node)
        or not isinstance(bound, int | float)
        or x.meta["val"].dtype != torch.float32
    ):
        return None
    bound = float(bound)
    if condition.target is (_aten.le.Scalar if negated else _aten.gt.Scalar):
        return x if bound == 0 else writer(_aten.sub.Tensor, x, bound)
    if condition.target is (_aten.ge.Scalar if negated else _aten.lt.Scalar):
        return writer(_aten.rsub.Scalar, x, bound)
    return None


def _distance_between(outside: fx.Node, writer: NodeWriter) -> fx.Node | None:
    """Insert (x - low) (high - x) for the condition x <= low or x >= high; return None for other conditions.

    It is negative beyond either bound.
    """
    sides = [side for side in outside.args if isinstance(side, fx.Node)]
    targets = {side.target for side in sides}
    if targets != {_aten.le.Scalar, _aten.ge.Scalar} or len({side.args[0] for side in sides}) > 1:
        return None
    below, above = sorted(sides, key=lambda side: side.target is _aten.ge.Scalar)
    if not below.args[1] < above.args[1]:  # type: ignore[operator]
        return None
    first, second = (_distance(side, True, writer) for side in (below, above))
    return None if first is None or second is None else writer(_aten.mul.Tensor, first, second)


class OnnxTarget(Target):
    """Target for ONNX models. Under a memory budget, values are computed twice, and steps are cut into graphs that run
    one after another.
    """

    name = "onnx"
    # Halves are stored before equal nodes are merged: each pass that reads one restores it for itself.
    passes = (OnnxMaskPass(), store_early, merge_equal)

    def emit(self, lowered: LoweredGraph, budget: Budget | None = None) -> Artifact:
        if budget is None:
            return _write_artifact(*lean_and_peak(lowered))
        form, count = within_onnx(lowered, budget)
        if len(form) == 1:
            return replace(_write_artifact(form[0]), memory_budget=count)
        parts = [(each.inputs, each.outputs, _write_artifact(each)) for each in form]
        nodes = graph_nodes(lowered, lowered.module.graph)
        return replace(join_segments(parts, predicted_peak(*form), nodes), memory_budget=count)

    def load(self, function: Function, model: bytes, in_place: Collection[str] = ()) -> Run:
        return load(function, model, in_place)

    def variants(
        self, lowered: LoweredGraph, artifact: Artifact, verification: Verification
    ) -> dict[str, bytes]:
        # Devices that run segments have no memory to try other forms.
        if artifact.segments:
            return {}
        in_blocks = write_blocked(artifact.model)
        forms = {
            BLOCKED: in_blocks,
            ROWS: _write_rows(artifact.model),
            f"{BLOCKED}, {ROWS}": _write_rows(in_blocks) if in_blocks else None,
        }
        chosen: dict[str, bytes] = {}
        for name, form in forms.items():
            sums = write_sums(form) if form and BLOCKED in name else None
            for each in filter(None, (sums, form)):
                # A form that this machine's runtime cannot load is left out, because it is untested.
                run = partial(self.load, lowered.function, each, artifact.in_place)
                if agrees(lowered.function, tuple(lowered.outputs), run, verification):
                    chosen[name] = each
                    break
        return chosen

    def port_mismatch(self, graph: Graph, model: bytes) -> str:
        try:
            models = [onnx.load_from_string(each) for each in artifacts_in(model)]
            read = {value.name for each in models for value in each.graph.input if not is_page(value.name)}
        except (BundleError, DecodeError):
            return f"graph {graph.name!r} is no ONNX model; export the bundle again"
        listed = {port.name for port in graph.inputs}
        if missing := sorted(read - listed):
            return f"the graph reads {', '.join(missing)}, which the manifest does not list"
        if extra := sorted(listed - read):
            return f"the manifest lists {', '.join(extra)}, which the graph does not read"
        return ""


def _write_artifact(lowered: LoweredGraph, peak: int | None = None) -> Artifact:
    """Return the ONNX model of a graph with its cost. ``peak`` is its predicted peak in bytes, which is computed if it
    is None.
    """
    from edgefl_export.onnx.model import IR_VERSION, to_onnx  # imports torch.onnx, which takes a second

    model = to_onnx(lowered)
    return Artifact(
        model,
        planned_bytes=predicted_peak(lowered) if peak is None else peak,
        in_place=rewritable(lowered),
        nodes=onnx_nodes(lowered, model),
        least_runtime=least_onnxruntime(OPSET, IR_VERSION),
        arena_bytes=predicted_arena(lowered),
    )


def _write_rows(model: bytes) -> bytes | None:
    """Return the model with updates and chains in blocks of rows, or None if it has neither."""
    updated = by_rows(model)
    return write_loops(updated or model) or updated
