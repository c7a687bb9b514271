"""A step in segments: the same numbers with less memory at once, through a device's own runtime."""

from __future__ import annotations

import functools
from dataclasses import replace
from itertools import product
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from benchmarks.train_step.command import paged_bytes
from edgefl import algorithms
from edgefl.contract.algorithm import Algorithm
from edgefl.contract.tensors import role_of
from edgefl.models.zoo.catalog import build_model
from edgefl.objective.objective import Objective
from edgefl.submodels.output_side.submodel import OutputSide
from edgefl.wire.blobs import describe
from edgefl.wire.bundle import manifest as wire
from edgefl.wire.bundle.manifest import SEGMENTED, DataSpec, Graph
from edgefl.wire.limits import Limits
from edgefl.wire.tensors import Arrays
from edgefl_device.engine.onnx import OnnxEngine
from edgefl_export.artifact import Artifact, artifacts_in, is_page, join_segments
from edgefl_export.capture.graph import LoweredGraph
from edgefl_export.capture.trace import capture
from edgefl_export.compiler.compiler import target_of
from edgefl_export.compiler.manifest import ports, segments_of
from edgefl_export.memory.budget import cuts, within_onnx
from edgefl_export.memory.cutting import segments
from edgefl_export.memory.predict import predicted_peak
from edgefl_export.memory.recompute import Budget, plans
from edgefl_export.memory.usage import timeline
from tests.rings.rows import mostly_slow
from tests.support.bundles import build_bundle
from tests.support.errors import BundleError, refuses

OPTIONS: dict[str, tuple[dict[str, object], int]] = {
    "resnet8": ({"size": 32}, 16),
    "vit": ({"size": 16, "width": 24, "depth": 2, "rate": 0.1}, 4),
    "lstm_lm": ({"length": 8, "vocabulary": 50, "features": 16, "hidden": 32}, 4),
}
TIGHT = Budget(0.56, relative=True)
"""Less than recomputation alone gives the residual network."""


@functools.cache
def algorithm_of(model: str) -> Algorithm:
    options, batch = OPTIONS[model]
    return algorithms.build("sgd", Objective.of(OutputSide(build_model(model, **options), 0)), batch=batch)


@functools.cache
def step_of(model: str) -> LoweredGraph:
    return capture(algorithm_of(model).phases[0].function)


def in_turn(parts: tuple[LoweredGraph, ...], given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the segments leave, each reading what the step began with and the pages of those before it."""
    made: dict[str, torch.Tensor] = {}
    for part in parts:
        pages = {name: value for name, value in made.items() if is_page(name)}
        made |= part({**given, **pages})
    return {name: value for name, value in made.items() if not is_page(name)}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("model", "recomputed"), mostly_slow(product(OPTIONS, (False, True)), [("resnet8", True), ("vit", False)])
)
def test_a_step_cut_anywhere_computes_the_same(model: str, recomputed: bool) -> None:
    lowered = step_of(model)
    if recomputed:
        lowered = replace(lowered, module=next(plans(lowered)).module)
    given = lowered.function.example(3)
    whole = lowered(given)
    count = len(lowered.module.graph.nodes)

    for number in (2, 5, 16):
        parts = segments(lowered, [count * place // number for place in range(1, number)])

        found = in_turn(parts, given)
        assert found.keys() == whole.keys()
        assert all(torch.equal(found[name], whole[name]) for name in whole)


def test_cuts_hold_less_the_more_they_cost() -> None:
    found = list(cuts(timeline(step_of("resnet8").module)))

    assert len(found) > 1
    assert [cut.held for cut in found] == sorted((cut.held for cut in found), reverse=True)
    assert [cut.cost for cut in found] == sorted(cut.cost for cut in found)


def test_what_lies_between_cuts_holds_what_was_counted() -> None:
    lowered = step_of("resnet8")
    *_, tightest = cuts(timeline(lowered.module))

    for part in segments(lowered, tightest.places):
        nodes = zip(part.inputs, part.module.graph.find_nodes(op="placeholder"), strict=True)
        given = sum(node.meta["val"].nbytes for name, node in nodes if not is_page(name))
        assert timeline(part.module).peak - given <= 1.2 * tightest.held


# -- on a device ---------------------------------------------------------------------------------------------------


@functools.cache
def written(budget: Budget | None) -> Artifact:
    form = target_of("onnx")
    lowered = form.capture(algorithm_of("resnet8").phases[0].function)
    return form.emit(lowered, budget)


def graph_of(artifact: Artifact) -> Graph:
    lowered = step_of("resnet8")
    return Graph(
        name="train",
        format="onnx",
        blob=describe(artifact.model, Limits().chunk_bytes),
        inputs=ports(lowered.inputs),
        outputs=ports(lowered.outputs),
        in_place=artifact.in_place,
        segments=segments_of(artifact),
    )


def trained(artifact: Artifact, folder: Path, steps: int = 4) -> tuple[Arrays, list[float]]:
    """The state after some steps in a device's engine, and the losses."""
    graph, engine = graph_of(artifact), OnnxEngine(pages=folder)
    loaded = engine.load(graph, artifact.model)
    function = algorithm_of("resnet8").phases[0].function
    example = {name: value.numpy() for name, value in function.example(0).items()}
    state = engine.write_state({name: array for name, array in example.items() if role_of(name) == "state"})
    losses = []
    for seed in range(steps):
        feeds = {name: value.numpy() for name, value in function.example(seed).items()}
        feeds["hyper.lr"] = np.array(0.05, np.float32)
        outputs = loaded.run(feeds, state)
        state = {**state, **outputs.state}
        losses.append(float(outputs.arrays["metric.loss"]))
        assert not list(folder.iterdir()), "what a step keeps on the disk has a name"
    return {name: np.array(array) for name, array in engine.read_state(state).items()}, losses


@pytest.mark.slow
def test_steps_in_segments_train_as_one_graph_does(tmp_path: Path) -> None:
    tight = written(TIGHT)
    assert len(tight.segments) > 1 and tight.in_place, "the budget is met in one graph"

    state, losses = trained(tight, tmp_path)
    expected, expected_losses = trained(written(None), tmp_path)

    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    assert state.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(
            state[name], array, rtol=1e-4, atol=1e-6 * max(1.0, float(np.abs(array).max()))
        )


@pytest.mark.slow
def test_one_graph_and_its_segments_give_the_same_bits(tmp_path: Path) -> None:
    """Cut at one recomputation plan, here none."""
    form = target_of("onnx")
    lowered = form.capture(algorithm_of("resnet8").phases[0].function)
    *_, tightest = cuts(timeline(lowered.module))
    parts = [(part.inputs, part.outputs, form.emit(part)) for part in segments(lowered, tightest.places)]
    cut = join_segments(parts, 0, {})

    state, losses = trained(cut, tmp_path)
    expected, expected_losses = trained(written(None), tmp_path)

    np.testing.assert_allclose(losses, expected_losses, rtol=1e-6)
    for name, array in expected.items():
        np.testing.assert_allclose(
            state[name], array, rtol=0, atol=1e-6 * max(1.0, float(np.abs(array).max()))
        )


def test_a_step_in_segments_is_compared_with_torch() -> None:
    tight = written(TIGHT)

    report = target_of("onnx").verify(
        algorithm_of("resnet8").phases[0].function, tight.model, 1, tight.in_place
    )

    assert report.worst <= 1e-4
    assert len(artifacts_in(tight.model)) == len(tight.segments)
    assert paged_bytes(tight) > 0


@pytest.mark.slow
def test_segments_are_predicted_to_need_less_than_the_step_in_one_graph() -> None:
    lowered = target_of("onnx").capture(algorithm_of("resnet8").phases[0].function)

    parts, _ = within_onnx(lowered, Budget(0.7, relative=True))
    alone, (*_, tightest) = predicted_peak(lowered), cuts(timeline(lowered.module))

    assert len(parts) == 1, "recomputation is enough for this"
    assert max(predicted_peak(part) for part in segments(lowered, tightest.places)) < 0.85 * alone


# -- in a bundle ---------------------------------------------------------------------------------------------------


@functools.cache
def bundled() -> wire.Manifest:
    made = build_bundle(
        algorithm_of("resnet8"),
        ("all",),
        model="resnet8",
        tier="weak",
        data=DataSpec(shape=(3, 32, 32), dtype="float32", classes=10),
        memory_budget=TIGHT,
    )
    return made.manifest


@pytest.mark.slow
def test_a_manifest_with_segments_has_a_version_that_older_devices_refuse() -> None:
    manifest = bundled()

    assert manifest.v == SEGMENTED
    assert wire.decode_manifest(wire.encode_manifest(manifest)) == manifest
    with pytest.raises(BundleError, match="has segments in a manifest of version 1"):
        wire.decode_manifest(wire.encode_manifest(msgspec.structs.replace(manifest, v=1)))


def reordered(graph: Graph) -> Graph:
    return msgspec.structs.replace(graph, segments=graph.segments[::-1])


def shortened(graph: Graph) -> Graph:
    return msgspec.structs.replace(graph, segments=graph.segments[:-1])


def doubled(graph: Graph) -> Graph:
    return msgspec.structs.replace(graph, segments=(*graph.segments, graph.segments[-1]))


def hasty(graph: Graph) -> Graph:
    """The first segment writes over what the last one reads."""
    first, *others = graph.segments
    late = {port.name for segment in others for port in segment.inputs}
    name = next(port.name for port in first.inputs if port.role == "state" and port.name in late)
    return msgspec.structs.replace(
        graph, segments=(msgspec.structs.replace(first, in_place=(*first.in_place, name)), *others)
    )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (reordered, "neither the graph has nor an earlier one leaves"),
        (shortened, "none leaves"),
        (doubled, "two leave|written over"),
        (hasty, "in place, which it or the graph does not"),
    ],
)
def test_segments_that_do_not_make_the_graph_are_refused(changed: object, message: str) -> None:
    manifest = bundled()
    graphs = tuple(changed(graph) if graph.segments else graph for graph in manifest.graphs)  # type: ignore[operator]

    with pytest.raises(BundleError, match=message):
        wire.decode_manifest(wire.encode_manifest(msgspec.structs.replace(manifest, graphs=graphs)))


def test_a_blob_of_other_segments_than_the_manifest_tells_is_refused() -> None:
    tight = written(TIGHT)

    with refuses(BundleError, graph="train", segments=8):
        OnnxEngine().load(shortened(graph_of(tight)), tight.model)
    with pytest.raises(BundleError, match="cannot be read"):
        OnnxEngine().load(graph_of(tight), written(None).model)


def test_an_engine_that_knows_no_segments_cannot_run_their_blob() -> None:
    tight = written(TIGHT)
    unaware = msgspec.structs.replace(graph_of(tight), segments=())

    with refuses(BundleError, graph="train", error=...):
        OnnxEngine().load(unaware, tight.model)
