"""Trying the variants of a bundle's graphs ahead of the first round, on inputs that are random but valid."""

from __future__ import annotations

from collections.abc import Callable

from device_runtime.engine.base import Engine
from device_runtime.profile.measure.folder import BundleFolder
from device_runtime.profile.measure.graph import state_before
from device_runtime.profile.measure.inputs import Inputs
from device_runtime.round.tuning import Choice, Tuning, trial


def tuned(
    engine: Engine, folder: BundleFolder, tuning: Tuning, progress: Callable[[str], None] = lambda _: None
) -> dict[str, Choice]:
    """What was found for each graph that has variants; kept in ``tuning``, in place of what was known."""
    manifest = folder.manifest
    found: dict[str, Choice] = {}
    for graph in manifest.graphs:
        if graph.variants:
            progress(graph.name)
            inputs = Inputs(manifest)
            feeds = inputs.feeds(graph)
            state = state_before(engine, folder, manifest, graph, inputs)
            choice = trial(engine, graph, folder, feeds, state, tuning)
            found |= {} if choice is None else {graph.name: choice}
    return found
