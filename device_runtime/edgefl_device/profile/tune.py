"""Tuning of a bundle's steps ahead of the first round, on inputs that are random but valid."""

from __future__ import annotations

from collections.abc import Callable

from edgefl_device.engine.base import Engine
from edgefl_device.profile.measure.folder import BundleFolder
from edgefl_device.profile.measure.graph import state_before
from edgefl_device.profile.measure.inputs import Inputs
from edgefl_device.round.autotune import Autotuner, StepTrial, TuningResult


def tune_bundle(
    engine: Engine, folder: BundleFolder, tuner: Autotuner, progress: Callable[[str], None] = lambda _: None
) -> dict[str, TuningResult]:
    """Try every step that has several forms or numbers of threads, and replace older results.

    Args:
        engine: Engine for the bundle's format.
        folder: The unpacked bundle.
        tuner: Stores the results.
        progress: Receives the name of each graph before it is tried.

    Returns:
        The result of each graph that was tried.
    """
    manifest = folder.manifest
    results: dict[str, TuningResult] = {}
    steps = {phase.graph for phase in manifest.phases} | {
        bucket.graph for phase in manifest.phases for bucket in phase.shorter
    }
    for graph in manifest.graphs:
        if graph.variants or (graph.name in steps and len(engine.thread_counts) > 1):
            progress(graph.name)
            inputs = Inputs(manifest)
            feeds = inputs.feeds(graph)
            state = state_before(engine, folder, manifest, graph, inputs)
            result = tuner.choose(StepTrial(engine, graph, folder, feeds, state))
            if result is not None:
                results[graph.name] = result
    return results
